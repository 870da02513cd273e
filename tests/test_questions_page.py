"""Figures of docs/explanation/questions.md that a plan or a simulation gave: today's command gives them again."""

import re
import shlex

import pytest

from allranks.cli.main import main
from tests.test_documentation import ROOT

TEXT = (ROOT / "docs" / "explanation" / "questions.md").read_text()

# What begins a command on the page -> (words of the page, the same in what the command prints), pair by pair.
FIGURES: dict[str, tuple[tuple[str, str], ...]] = {
    "allranks plan llama3-8b --cluster 4x8:a100-80g@10g": (
        (
            "`hsdp` ahead at 10 Gbit/s a device (41.9 s a step",
            r"^FITS: dp_replicate=4,dp_shard=8,(.|\n)*hsdp alone +41\.9 s ",
        ),
        ("against 44.1 s)", r"fsdp alone +44\.1 s "),
    ),
    "allranks plan llama3-8b --cluster 4:a100-40g": (
        ("it finds `tp=4,recompute=full`", r"FITS: tp=4,recompute=full,"),
        ("40.8 GB in use of 42.3,", r"40\.8 GB in use\sof\s42\.3 GB"),
        ("FSDP alone does not fit (47.9 GB)", r"fsdp alone .* 47\.9 GB .*\n +does not fit"),
        ("would free 1.0 GB more", r"offload=activations +-1\.0 GB, "),
        ("at the price of 4.3 GB in the host's memory", r"\+0% speed, 4\.3 GB in each host's memory"),
    ),
    "allranks plan llama3-70b --cluster 8x8:h100@400g": (
        ("7.06 samples a second at 400 Gbit/s a device", r"8x8:h100@400g +7\.06 "),
        ("and 5.26 at 25, with another layout", r"8x8:h100@25g +5\.26 .* dp_shard=8,pp=8,"),
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
    (line,) = re.findall(r"^allranks plan llama3-8b --cluster 4x8:a100-80g@10g.*$", TEXT, re.MULTILINE)
    assert "`fsdp` at 100 Gbit/s (35.8 s against 36.4 s; `@ethernet100` in place of `@10g`)" in TEXT
    assert main(shlex.split(line.replace("@10g", "@ethernet100"))[1:]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"fsdp alone +35\.8 s ", printed) and re.search(r"hsdp alone +36\.4 s ", printed)


@pytest.mark.parametrize("fabric", ["@10g", "@ethernet100"])
def test_a_smaller_batch_turns_it_too(fabric: str, capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = re.findall(r"^allranks plan llama3-8b --cluster 4x8:a100-80g@10g.*$", TEXT, re.MULTILINE)
    assert "with 64 samples `fsdp` is ahead of it at both" in TEXT
    words = line.replace("@10g", fabric).replace("--global-batch 1024", "--global-batch 64")
    assert main(shlex.split(words)[1:]) == 0
    printed = capsys.readouterr().out
    fsdp, hsdp = (re.findall(rf"{family} alone +(\S+) s ", printed)[0] for family in ("fsdp", "hsdp"))
    assert float(fsdp) < float(hsdp)
