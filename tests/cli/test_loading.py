"""`data.workers` under the command's own launcher: the same run, and the same errors."""

from pathlib import Path

import pytest

from tests.commands import POINTS, PROGRAMS, allranks, steps

QUICK = ("train.steps=6", "train.global_batch=10", "train.seed=3")


@pytest.mark.full
def test_processes_that_load_change_nothing(tmp_path: Path) -> None:
    for workers in (0, 2):
        allranks("train", POINTS, *QUICK, "--run", f"w{workers}", f"data.workers={workers}", folder=tmp_path)
    alone, loaded = (
        [(event["loss"], event["ledger"]) for event in steps(tmp_path / f"w{workers}").values()] for workers in (0, 2)
    )
    assert len(alone) == 6 and loaded == alone


@pytest.mark.full
def test_an_item_that_raises_is_shown_with_its_own_traceback(tmp_path: Path) -> None:
    task = tmp_path / "task.py"
    source = (PROGRAMS / "points.py").read_text()
    task.write_text(
        source
        + """

class Holes:
    def __init__(self, inner): self.inner = inner
    def __len__(self): return len(self.inner)
    def __getitem__(self, index):
        if index == 11:
            raise KeyError("no eleventh sample")
        return self.inner[index]

class Broken(Points):
    def dataset(self, split):
        inner = super().dataset(split)
        return Holes(inner) if split == "train" else inner
"""
    )
    ran = allranks("train", "task.py:Broken", *QUICK, "train.steps=40", "data.workers=1", folder=tmp_path, check=1)
    assert "no eleventh sample" in ran.stderr and "while loading sample 11" in ran.stderr
    assert ran.stderr.count("no eleventh sample") <= 2
