"""`allranks train --layout ...,ep=N`: a mixture of experts in real processes."""

import json
from pathlib import Path

import pytest

from tests.commands import POINTS, PROGRAMS, allranks, steps

EXPERTS = str(PROGRAMS / "experts.py")
SETTINGS = ("train.precision=float64", "train.global_batch=7", "optimizer.name=sgd", "optimizer.lr=0.1")


@pytest.mark.full
def test_a_run_is_that_of_one_process_and_goes_on_as_one(tmp_path: Path) -> None:
    alone = (*SETTINGS, "train.steps=8", "--layout", "single", "--nproc", "1", "--run", "alone")
    allranks("train", EXPERTS, *alone, folder=tmp_path)
    cut = ("--layout", "dp_replicate=2,ep=2", "--run", "cut")
    ran = allranks("train", EXPERTS, *SETTINGS, "train.steps=5", "schedule.steps=8", *cut, "--json", folder=tmp_path)
    assert json.loads(ran.stdout)["reason"] == "done"
    said = " ".join(ran.stderr.split())  # wrapped by the terminal's width
    assert "each of ep=2 ranks holds 2 of 4 experts a layer, because" in said
    assert "the cut model computes what the whole one does, because" in said
    allranks(
        "train", "--resume", "cut", "train.steps=8", "--layout", "single", "--nproc", "1", "--json", folder=tmp_path
    )
    expected, found = steps(tmp_path / "alone"), steps(tmp_path / "cut")
    assert list(found) == list(range(1, 9))
    for step, event in expected.items():
        assert found[step]["ledger"] == event["ledger"]
        for name in ("loss", "grad_norm"):
            assert found[step][name] == pytest.approx(event[name], rel=1e-10, abs=0)


@pytest.mark.full
def test_what_has_no_experts_or_an_odd_number_is_refused(tmp_path: Path) -> None:
    layout = ("--layout", "dp_replicate=2,ep=2")
    ran = allranks("train", POINTS, "train.steps=2", *layout, folder=tmp_path, check=78)
    assert "ep=2 cuts experts over ranks, and model() has none" in " ".join(ran.stderr.split())
    ran = allranks("train", EXPERTS, "train.steps=2", "task.num_experts=3", *layout, folder=tmp_path, check=78)
    assert "layers.0.feed_forward.experts has num_experts=3, which ep(2) does not divide; ep can be 1, 3" in " ".join(
        ran.stderr.split()
    )
