"""What some keep for themselves, read back by as many, by others, by one."""

from pathlib import Path
from typing import Any

import pytest
import torch

from allranks.checkpointing.checkpoint import Checkpoint, Header
from allranks.checkpointing.each import Adapted, adapt
from allranks.checkpointing.restore import restore
from allranks.checkpointing.save import save
from allranks.errors import CheckpointError
from allranks.parameter_map import Box, Entry, one_of_each

HEADER = Header(run="run", generation=1, layout="single", step=1, samples=1)


def row(name: str, index: int, number: int, value: torch.Tensor) -> tuple[Entry, torch.Tensor]:
    entry = Entry(name, tuple(value.shape), "float32", Box.whole(tuple(value.shape)), (0,))
    return one_of_each(entry, index, number, (0,)), value.unsqueeze(0)


def plain(name: str, value: torch.Tensor) -> tuple[Entry, torch.Tensor]:
    return Entry(name, tuple(value.shape), "float32", Box.whole(tuple(value.shape)), (0,)), value


def written(folder: Path, parts: list[Any]) -> Checkpoint:
    state: dict[str, Any] = {}
    return save(
        folder, header=HEADER, parts=parts, aliases={}, state=state, group=None, rank=0, world_size=1, token="a"
    )


ROWS = [torch.full((2, 3), 1.0), torch.full((2, 3), 2.0), torch.full((2, 3), 6.0)]
MOMENT = "optimizer.exp_avg.w"


def of_three() -> list[Any]:
    return [row(MOMENT, index, 3, value) for index, value in enumerate(ROWS)]


def test_as_many_read_their_own(tmp_path: Path) -> None:
    checkpoint = written(tmp_path, of_three())
    target = torch.zeros(2, 3)
    adapted = adapt(checkpoint, [row(MOMENT, 1, 3, target)])
    assert [entry.name for entry, _ in adapted.fitting] == [f"{MOMENT}@each"]
    assert (adapted.leftover, adapted.decisions) == (frozenset(), ())
    restore(checkpoint, adapted.fitting)
    assert torch.equal(target, ROWS[1])


def said(adapted: Adapted) -> list[str]:
    return [str(decision) for decision in adapted.decisions]


def test_others_and_one_begin_with_the_mean(tmp_path: Path) -> None:
    checkpoint = written(tmp_path, of_three())
    for two in (True, False):
        target = torch.zeros(2, 3)
        adapted = adapt(checkpoint, [row(MOMENT, 1, 2, target) if two else plain(MOMENT, target)])
        assert torch.equal(target, torch.full((2, 3), 3.0)) and adapted.fitting == []
        assert adapted.leftover == {f"{MOMENT}@each"}
        assert said(adapted) == ["exp_avg go on from the mean, because 3 have saved their own, and others go on"]


def test_a_part_of_it_reads_its_own_box(tmp_path: Path) -> None:
    value = torch.arange(12.0).view(4, 3)
    checkpoint = written(tmp_path, [row(MOMENT, 0, 2, value), row(MOMENT, 1, 2, value * 3)])
    target = torch.zeros(2, 2)
    entry = Entry(MOMENT, (4, 3), "float32", Box((1, 1), (2, 2)), (0,))
    adapt(checkpoint, [(entry, target)])
    assert torch.equal(target, 2 * value[1:3, 1:3])


def test_one_value_is_everybodys(tmp_path: Path) -> None:
    checkpoint = written(tmp_path, [plain(MOMENT, ROWS[1]), plain("model.w", ROWS[0])])
    target = torch.zeros(2, 3)
    adapted = adapt(checkpoint, [row(MOMENT, 3, 4, target), plain("model.w", torch.zeros(2, 3))])
    assert torch.equal(target, ROWS[1]) and said(adapted) == []
    assert [entry.name for entry, _ in adapted.fitting] == ["model.w"] and adapted.leftover == {MOMENT}


def test_what_is_optional_may_be_missing_on_either_side(tmp_path: Path) -> None:
    error, factor = "optimizer.powersgd_error.w", "optimizer.powersgd_q.w"
    with_it = written(tmp_path / "with", [*[row(error, 0, 1, ROWS[0])], plain(factor, ROWS[1]), plain("w", ROWS[2])])
    left = adapt(with_it, [plain("w", torch.zeros(2, 3))])
    assert left.leftover == {f"{error}@each", factor} and [entry.name for entry, _ in left.fitting] == ["w"]
    assert said(left) == [
        "powersgd_error, powersgd_q of the checkpoint are left out, because this layout has no use for them"
    ]
    without = written(tmp_path / "without", [plain("w", ROWS[2])])
    kept = torch.ones(2, 3)
    begun = adapt(without, [row(error, 0, 1, kept), plain("w", torch.zeros(2, 3))])
    assert torch.equal(kept, torch.ones(2, 3)) and [entry.name for entry, _ in begun.fitting] == ["w"]
    assert said(begun) == ["powersgd_error begin anew, because the checkpoint has none that fit"]
    other = adapt(with_it, [plain(factor, torch.zeros(5)), plain("w", torch.zeros(2, 3))])
    assert other.leftover == {f"{error}@each", factor}


def test_what_does_not_fit_is_refused_as_ever(tmp_path: Path) -> None:
    checkpoint = written(tmp_path, of_three())
    adapted = adapt(checkpoint, [row(MOMENT, 0, 2, torch.zeros(5))])
    with pytest.raises(CheckpointError, match=r"is float32\[3, 2, 3\] in the checkpoint and float32\[2, 5\] here"):
        restore(checkpoint, adapted.fitting, adapted.leftover)
