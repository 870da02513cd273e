"""The real command: words, the JSON document and exit codes."""

import json
from pathlib import Path

import pytest

from allranks.cli.main import main
from tests.commands import POINTS, allranks

COUPLED = str(Path(__file__).parents[2] / "corpus" / "S29_task_not_coupled.py")
PAGE = (Path(__file__).parents[2] / "docs" / "tutorial" / "find-a-bug.md").read_text()


def blocks() -> list[str]:
    """The Python blocks of the tutorial page."""
    return [block.split("\n", 1)[1].split("```")[0] for block in PAGE.split("```python")[1:]]


@pytest.mark.full
@pytest.mark.distributed
def test_the_tutorial_finds_its_bug_and_mends_it(tmp_path: Path) -> None:
    wrong, mended = blocks()
    (tmp_path / "loop.py").write_text(wrong)
    document = json.loads(allranks("verify", "loop.py", "--nproc", "2", "--json", folder=tmp_path, check=1).stdout)
    assert document["equal"] is False
    (verdict,) = document["verdicts"]
    assert {"kind", "tensor", "axis", "factor", "evidence", "next"} <= set(verdict)
    assert (verdict["kind"], verdict["step"], verdict["axis"]) == ("S9", 0, "dp")
    assert verdict["what"] in PAGE and verdict["evidence"][0].startswith("weights of the ranks' batches [0.5, 0.5]")
    (tmp_path / "loop.py").write_text(f"{wrong}\n\n{mended}")
    told = allranks("verify", "loop.py", folder=tmp_path).stdout
    assert told.startswith("equal: 2 processes compute what one device computes, over 4 steps")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "verify needs a Task or a file with build, step and data"),
        ((POINTS, "--steps", "1"), "give at least 2"),
        ((POINTS, "--nproc", "1"), "one device is compared with at least 2 processes"),
        ((POINTS, "--layout", "single"), "one device is compared with at least 2 processes"),
        ((POINTS, "--layout", "tp=4,dp_shard=4"), "the nearest that exercises every axis: --layout dp_shard=2,tp=2"),
        pytest.param(
            (COUPLED, "--layout", "ddp", "--nproc", "2"),
            "take the rows of all ranks by self.world.gather(rows) and say coupled = True",
            marks=pytest.mark.distributed,
        ),
    ],
)
def test_refusals(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err and len(err.strip().splitlines()) == 1
