"""`allranks checkpoint diff`: exit codes, text and document."""

import json
from pathlib import Path

import pytest

from allranks.checkpointing.checkpoint import Checkpoint
from allranks.checkpointing.comparing import Comparison, compare
from allranks.checkpointing.reading import unless_read
from allranks.cli.main import main
from tests.checkpointing.worlds import flip, parts, save_alone, whole_tensors


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Two checkpoints that differ in one tensor and one value of the state."""
    save_alone(tmp_path / "a")
    tensors = whole_tensors()
    tensors["model.embedding.weight"][1, 3] *= 2
    save_alone(
        tmp_path / "b", pairs=parts(tensors, 0, 1), state={"position": 1608, "best": 0.1, "worst": -float("inf")}
    )
    return tmp_path / "a" / "step-00000200", tmp_path / "b" / "step-00000200"


def test_what_is_equal_is_0(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "diff", str(pair[0]), str(pair[0])]) == 0
    assert "equal: 7 tensors are equal, 0 differ" in capsys.readouterr().out


def test_what_differs_is_1_and_named(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "diff", *map(str, pair)]) == 1
    out = capsys.readouterr().out
    row = next(line.split() for line in out.splitlines() if line.startswith("model.embedding.weight"))
    assert row[1:3] == ["altered", "float32"] and row[-1] == "1,3"
    assert "state position: 1600 in the first, 1608 in the second" in out
    assert "6 tensors are equal, 1 differ" in out


def test_the_document(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "diff", *map(str, pair), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["equal"], document["num_equal"]) == (False, 6)
    (tensor,) = document["tensors"]
    assert (tensor["name"], tensor["elements"], tensor["index"]) == ("model.embedding.weight", 1, [1, 3])
    assert document["state"] == {"position": [1600, 1608]}


def test_a_damaged_one_is_3(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    flip(pair[1] / "rank-00000.safetensors", 3000)
    assert main(["checkpoint", "diff", *map(str, pair)]) == 3
    assert "error" in capsys.readouterr().err


def test_both_stay_while_they_are_compared(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Path] = []

    def look(*checkpoints: Checkpoint) -> Comparison:
        for one in checkpoints:
            assert unless_read(one.path, lambda path: pytest.fail(f"{path} is read")) is None
            seen.append(one.path)
        return compare(*checkpoints)

    monkeypatch.setattr("allranks.checkpointing.comparing.compare", look)
    assert main(["checkpoint", "diff", *map(str, pair)]) == 1 and seen == list(pair)
