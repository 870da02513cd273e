"""Figures of docs/explanation/questions.md that a plan or a simulation gave: today's command gives them again."""

import re
import shlex

import pytest

from allranks.cli.main import main
from tests.test_documentation import ROOT

TEXT = (ROOT / "docs" / "explanation" / "questions.md").read_text()

# What begins a command on the page -> (words of the page, the same in what the command prints), pair by pair.
FIGURES: dict[str, tuple[tuple[str, str], ...]] = {
    "allranks plan llama3-8b --cluster 4x8:a100-80g@25g": (
        (
            "`hsdp` ahead at 25 Gbit/s a device (9.8 s a step",
            r"^FITS: dp_replicate=4,dp_shard=8,(.|\n)*hsdp alone +9\.8 s ",
        ),
        ("against 10.2 s)", r"fsdp alone +10\.2 s "),
    ),
    "allranks plan llama3-8b --cluster 4:a100-40g": (
        ("it finds `tp=4,recompute=selective`", r"FITS: tp=4,recompute=selective,"),
        ("40.9 GB in use of 42.3,", r"40\.9 GB in use\sof\s42\.3 GB"),
        ("FSDP alone does not fit (47.9 GB)", r"fsdp alone .* 47\.9 GB .*\n +does not fit"),
        ("would free 2.8 GB more", r"offload=activations +-2\.8 GB, "),
        ("at the price of 12.1 GB in the host's memory", r"\+0% speed, 12\.1 GB in each host's memory"),
    ),
    "allranks plan llama3-70b --cluster 8x8:h100@400g": (
        ("6.88 samples a second at 400 Gbit/s a device", r"8x8:h100@400g +6\.88 "),
        ("and 5.52 at 25, with another layout", r"8x8:h100@25g +5\.52 .* dp_shard=4,cp=2,pp=8,"),
    ),
    "allranks simulate --cluster 512x8:h100": (
        ("interrupted every 7 h 13 min", r"one every 7 h 13 min"),
        (
            "96.2% of the time ends as training where nine spare nodes stand by",
            r"Goodput 96\.2% (.|\n)*^9 .* best, yours",
        ),
        ("and 3.9% where none does", r"^0 +3\.9% "),
    ),
}


@pytest.mark.parametrize("begins", FIGURES)
def test_a_command_prints_what_the_page_says_of_it(begins: str, capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = re.findall(rf"^{re.escape(begins)}.*$", TEXT, re.MULTILINE)
    assert main(shlex.split(line)[1:]) == 0
    printed = capsys.readouterr().out
    for words, pattern in FIGURES[begins]:
        assert words in TEXT
        assert re.search(pattern, printed, re.MULTILINE), (words, printed)


def test_faster_links_turn_the_choice(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = re.findall(r"^allranks plan llama3-8b --cluster 4x8:a100-80g@25g.*$", TEXT, re.MULTILINE)
    assert "`fsdp` at 100 Gbit/s (9.0 s against 9.2 s; `@ethernet100` in place of `@25g`)" in TEXT
    assert main(shlex.split(line.replace("@25g", "@ethernet100"))[1:]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"fsdp alone +9\.0 s ", printed) and re.search(r"hsdp alone +9\.2 s ", printed)


@pytest.mark.parametrize("fabric", ["@25g", "@ethernet100"])
def test_a_smaller_batch_turns_it_too(fabric: str, capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = re.findall(r"^allranks plan llama3-8b --cluster 4x8:a100-80g@25g.*$", TEXT, re.MULTILINE)
    assert "with 64 samples `fsdp` leads at both" in TEXT
    words = line.replace("@25g", fabric).replace("--global-batch 256", "--global-batch 64")
    assert main(shlex.split(words)[1:]) == 0
    assert re.search(r"^FITS: dp_shard=32,", capsys.readouterr().out, re.MULTILINE)
