"""docs/tutorial/hundred-billion.md: below a command stands what it prints, and every figure in the text is there.

Planning and simulating take seconds and run each time; the dry runs take a minute and a half of a core together.
"""

import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from allranks.cli.main import main
from tests.commands import PROGRAMS, allranks
from tests.test_documentation import ROOT

PAGE = ROOT / "docs" / "tutorial" / "hundred-billion.md"
LEFT_OUT = "..."
FENCES = re.compile(r"^```(bash|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FIGURE = re.compile(r"\d+(?:[.,]\d+)*(?:%| [kMGTP]?B\b)?")
"""With its unit, where it is a share or a size: 2% is printed, and not some 2."""


def steps() -> list[tuple[list[str], list[str]]]:
    """(The words of a command, the excerpts below it), in the order of the page."""
    found: list[tuple[list[str], list[str]]] = []
    for language, block in FENCES.findall(PAGE.read_text()):
        if language == "bash":
            found.append((shlex.split(block), []))
        else:
            found[-1][1].append(block)
    return found


def missing(excerpt: str, printed: str) -> str:
    """The first piece of an excerpt whose lines do not follow one another in what was printed; "" where all do.

    Pieces are parted by `...`, and each begins behind the one before it.
    """
    lines, place = [line.rstrip() for line in printed.splitlines()], 0
    for piece in re.split(rf"^{re.escape(LEFT_OUT)}\n", excerpt, flags=re.MULTILINE):
        wanted = piece.splitlines()
        starts = (at for at in range(place, len(lines) + 1) if lines[at : at + len(wanted)] == wanted)
        at = next(starts, None)
        if at is None:
            return piece
        place = at + len(wanted)
    return ""


def sections() -> Iterator[tuple[str, set[str]]]:
    """(The text of a step, the figures that its own and all earlier commands were given or have printed).

    What comes before the first step is the question that its command puts.
    """
    shown: set[str] = set()
    for section in re.split(r"^## (?!1\.).*$", PAGE.read_text(), flags=re.MULTILINE):
        shown |= {figure for _, block in FENCES.findall(section) for figure in FIGURE.findall(block)}
        yield re.sub(r"^## 1\.", "", FENCES.sub("", section), flags=re.MULTILINE), set(shown)


def of_command(name: str) -> list[tuple[list[str], list[str]]]:
    """The page's steps with that command."""
    return [(words, excerpts) for words, excerpts in steps() if words[:2] == ["allranks", name]]


def test_it_plans_rehearses_and_simulates() -> None:
    assert [words[1] for words, _ in steps()] == ["plan", "dryrun", "dryrun", "dryrun", "simulate"]
    assert all(words[2] == "100b" and "8x8:a100-80g" in words and excerpts for words, excerpts in steps())


@pytest.mark.parametrize("name", ["plan", "simulate"])
def test_what_is_printed_at_once(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    ((words, excerpts),) = of_command(name)
    assert main(words[1:]) == 0
    printed = capsys.readouterr().out
    assert [missing(excerpt, printed) for excerpt in excerpts] == [""] * len(excerpts)


def test_what_is_rehearsed_is_what_was_planned() -> None:
    """The first dry run has the plan's layout and batch; the others change what the page says they do."""
    ((_, (verdict, *_)),) = of_command("plan")
    layout, micro_batch = re.findall(r"^FITS: (\S+), micro_batch (\d+)$", verdict, re.MULTILINE)[0]
    (batch,) = re.findall(r"^  batch +(\d+) samples a step", verdict, re.MULTILINE)
    cuts = [[word for word in words if word.startswith("train.")] for words, _ in of_command("dryrun")]
    assert all(words[words.index("--layout") + 1] == layout for words, _ in of_command("dryrun"))
    assert cuts[0] == [f"train.global_batch={batch}", f"train.micro_batch={micro_batch}"]
    assert cuts[1:] == [[cuts[0][0], "train.micro_batch=2"], ["train.global_batch=64"]]


@pytest.mark.full
@pytest.mark.parametrize("number", range(3))
def test_what_a_dry_run_prints_and_needs(number: int, tmp_path: Path) -> None:
    """Less than 1 GB and a minute of a core; what would help (--remedies) is rehearsed besides, and takes its own."""
    words, excerpts = of_command("dryrun")[number]
    check, used = 1 if "\ndoes not fit: " in excerpts[0] else 0, tmp_path / "used.json"
    launcher = (sys.executable, str(PROGRAMS / "usage.py"), str(used))
    ran = allranks(*words[1:], folder=tmp_path, check=check, launcher=launcher)
    assert [missing(excerpt, ran.stdout) for excerpt in excerpts] == [""] * len(excerpts), ran.stdout
    found = json.loads(used.read_text())
    assert found["memory_bytes"] < 1e9
    assert found["processor_seconds"] < (120 if "--remedies" in words else 60)


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "axes"),
    [
        ("pp=8,dp_shard=8,recompute=full", {"pp", "dp_shard"}),
        ("dp_shard=8,tp=8,recompute=full", {"tp", "dp_shard"}),
    ],
)
def test_as_a_pipeline_and_split_it_needs_no_more(layout: str, axes: set[str], tmp_path: Path) -> None:
    """The layouts of bench/hundred_billion.py that are not on the page."""
    used, batch = tmp_path / "used.json", ("train.global_batch=512", "train.micro_batch=1")
    launcher = (sys.executable, str(PROGRAMS / "usage.py"), str(used))
    words = ("dryrun", "100b", "--cluster", "8x8:a100-80g", "--layout", layout, *batch, "--json")
    told = json.loads(allranks(*words, folder=tmp_path, check=None, launcher=launcher).stdout)
    assert told["world_size"] == 64 and not told["findings"]
    ranks = told["ranks"].values()
    assert {one["axis"] for rank in ranks for one in rank["collectives"] if one["bytes"] > 1e9} == axes
    states = {rank["stage"]: rank["by_category"]["optimizer"] for rank in ranks}
    others = [size for stage, size in states.items() if 0 < stage < 7]  # as many parameters each as the one rehearsed
    mean = (states[0] + states[7] + 6 * others[0]) / 8 if "pp" in axes else states[0]
    assert mean == pytest.approx(2 * 4 * 101.6e9 / 64, rel=0.01), "both moments, over all ranks"
    found = json.loads(used.read_text())
    assert found["memory_bytes"] < 1e9
    assert found["processor_seconds"] < 60


def test_every_figure_in_the_text_was_printed() -> None:
    wrong = [(figure, text) for text, shown in sections() for figure in FIGURE.findall(text) if figure not in shown]
    assert not wrong


def test_an_excerpt_that_was_not_printed_is_seen() -> None:
    printed = "one\n  two   \nthree\nfour\n"
    assert missing("one\n  two\n", printed) == missing("one\n...\nthree\nfour\n", printed) == ""
    assert missing("one\nthree\n", printed) == "one\nthree\n"
    assert missing("three\n...\none\n", printed) == "one\n"
    assert missing("  two", printed) == "" and missing("tw", printed) == "tw"
