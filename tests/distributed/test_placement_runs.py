"""The commands of docs/how-to/placement.md, run; and the runs are those of one device."""

import re
import shutil
from pathlib import Path

import pytest

import allranks as library
from allranks.run import Run
from tests.commands import PROGRAMS, allranks, steps, tensor_digests

pytestmark = pytest.mark.distributed

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "placement.md").read_text()
SMALL = ("train.global_batch=6", "train.steps=6", "train.precision=float64", "checkpoint.every=3", "schedule.steps=6")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def losses(directory: Path) -> list[float]:
    return [event["loss"] for _, event in sorted(steps(directory).items())]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The page's task and its RUN.toml, whose GPUs are names for the CPU here."""
    shutil.copy(PROGRAMS / "blocks.py", tmp_path / "task.py")
    (toml,) = blocks("toml")
    named = toml.replace('"cuda:1"', '"cpu:2"').replace('"cuda:0"', '"cpu:1"')
    (tmp_path / "RUN.toml").write_text(named)
    return tmp_path


@pytest.mark.full
def test_the_commands_of_the_page(folder: Path) -> None:
    lines = [line.split() for block in blocks("bash") for line in block.splitlines()]
    assert len(lines) == 5
    allranks("train", "task.py", *SMALL, "--layout", "single", "--run", "alone", folder=folder)
    for index, (program, *arguments) in enumerate(lines):
        assert program == ".venv/bin/allranks"
        if "--resume" in arguments:
            ran = allranks(*arguments, "train.steps=9", folder=folder)
            banner = ran.stdout.partition("The run lies in")[0]  # the report tells of earlier attempts, too
            assert "layout dp_shard=2" in banner and "cpu:0 holds" not in banner
            continue
        name = "runs/large" if arguments == ["train", "RUN.toml"] else f"run{index}"
        ran = allranks(*arguments, *SMALL, "--run", name, folder=folder)
        assert "a step moves" in ran.stdout and "placement changes nothing here" in ran.stdout
        assert losses(folder / name) == pytest.approx(losses(folder / "alone"), rel=1e-12)
        last, alone = (list(Run.open(folder / one).steps())[-1] for one in (name, "alone"))
        assert last["ledger"] == alone["ledger"]
        assert last["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-12)
    started = list(Run.open(folder / "runs/large").events())
    said = " ".join(str(event) for event in started if event["event"] == "decision")
    assert "cpu:0 holds" in said and "[layout.placement] says so of blocks.[4-7], head.*" in said
    assert isinstance(library.load(folder / "runs/large"), library.load(folder / "alone").__class__)


@pytest.mark.full
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(folder: Path) -> None:
    common = ("train", "RUN.toml", *SMALL, "--layout", "ddp")
    allranks(*common, "--run", "whole", folder=folder)
    allranks(*common, "train.steps=3", "--run", "halves", folder=folder)
    allranks("train", "--resume", "halves", "train.steps=6", folder=folder)
    assert tensor_digests(folder / "halves", 6) == tensor_digests(folder / "whole", 6)


@pytest.mark.full
def test_a_rule_that_fits_nothing_is_one_line(folder: Path) -> None:
    for rule, words in {
        '{"block.3" = "cpu:1"}': ("'block.3' matches no parameter", "the nearest are blocks.3"),
        '{"head" = "cuda:5"}': ("names device 'cuda:5'", "cpu:0 to cpu:7"),
    }.items():
        ran = allranks("train", "task.py", *SMALL, f"layout.placement={rule}", folder=folder, check=78)
        assert all(word in ran.stderr for word in words) and "Traceback" not in ran.stderr
