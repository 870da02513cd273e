"""`allranks train --layout cp=2`: whole runs on text, in real processes."""

import json
from pathlib import Path

import pytest

from tests.commands import allranks, steps, tensor_digests

TINY = (
    *("task.seq=32", "task.num_layers=1", "task.hidden=32", "train.steps=4", "train.global_batch=4"),
    *("train.precision=float64", "checkpoint.every=2", "task.held_out=0.1", "data.text=text.txt"),
)


@pytest.mark.full
def test_each_process_has_half_of_every_sequence(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("".join(f"{number} bottles of beer on the wall, " for number in range(200)))
    found = {}
    for name, layout in (("one", ("single",)), ("swapped", ("cp=2",)), ("ring", ("cp=2", "layout.context=ring"))):
        ran = allranks("train", *TINY, "--layout", *layout, "--run", name, "--json", folder=tmp_path)
        losses = [event["loss"] for event in steps(tmp_path / name).values()]
        found[name] = (
            losses,
            json.loads(ran.stdout)["validation"],
            [e["ledger"] for e in steps(tmp_path / name).values()],
        )
        if name != "one":
            assert "each sequence is cut over cp=2: x, y, because" in ran.stderr
            assert "the cut model computes what the whole one does" in ran.stderr
    losses, validation, ledgers = found["one"]
    for name in ("swapped", "ring"):
        assert found[name][0] == pytest.approx(losses, rel=1e-9)  # AdamW divides noise by eps
        assert found[name][1] == pytest.approx(validation, rel=1e-6)
        assert found[name][2] == ledgers

    # What two processes have saved goes on in one, and as they would have.
    ends = tensor_digests(tmp_path / "swapped", 4)
    allranks("train", "--resume", "swapped", "--layout", "single", "--nproc", "1", "train.steps=6", folder=tmp_path)
    assert tensor_digests(tmp_path / "swapped", 4) == ends
    assert list(steps(tmp_path / "swapped")) == [1, 2, 3, 4, 5, 6]


@pytest.mark.full
def test_a_length_that_does_not_divide_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("x y z " * 400)
    given = [*TINY, "task.seq=33", "--layout", "cp=2", "--run", "run"]
    ran = allranks("train", *given, folder=tmp_path, check=78)
    assert "cp(2) does not divide the 33 positions of entry 'x': 32 or 34 do" in ran.stderr
    assert "Traceback" not in ran.stderr
