"""Which ranks share samples, and factors in words."""

import math

import pytest
import torch

from allranks.parameter_map import Box
from allranks.verifying.recording import Part, RunRecord, Start, StepRecord
from allranks.verifying.world_view import WorldView, view_of


def test_factors_in_words() -> None:
    world = WorldView((0, 0, 1, 1, 2, 2), {"dp_shard": 3, "tp": 2}, micro_batches=5)
    assert (world.size, world.data_ranks, world.model_ranks, world.data_axis, world.model_axis) == (
        6,
        3,
        2,
        "dp_shard",
        "tp",
    )
    assert world.in_words(3.0) == "data ranks = 3" and world.in_words(1 / 3) == "1/data ranks = 1/3"
    assert world.in_words(2.0) == "tp = 2" and world.in_words(6.0) == "world size = 6"
    assert world.in_words(0.2) == "1/micro-batches = 1/5" and world.in_words(1.5) == 1.5
    assert world.in_words(math.nan) == ""
    assert (
        world.is_count(9.0, 3) and world.is_count(1 / 3, 3) and not world.is_count(1.5, 3) and not world.is_count(1, 1)
    )
    assert world.twins(3) == world.layer_twins(3) == [2, 3]
    staged = WorldView((0, 0, 1, 1, 0, 0, 1, 1), {"pp": 2, "dp": 2, "tp": 2})
    assert staged.twins(1) == [0, 1, 4, 5]
    assert staged.layer_twins(1) == [0, 1] and staged.layer_twins(6) == [6, 7]


def rank(rows: list[int], weight: torch.Tensor, given: tuple[int, ...] = (), row: int | None = None) -> RunRecord:
    box = None if row is None else Box((row,), (1,))
    start = Start(parameters={"w": Part(box, weight)})
    return RunRecord(start=start, steps=[StepRecord(rows=rows)], given=list(given))


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([rank([1, 2], torch.ones(2)), rank([3, 4], torch.ones(2))], (0, 1)),
        # The same samples on whole copies: a mistake of data parallelism, not a layer that is cut.
        ([rank([1, 2], torch.ones(2)), rank([2, 1], torch.ones(2))], (0, 1)),
        ([rank([1, 2], torch.ones(2)), rank([1, 2], torch.zeros(2))], (0, 0)),
        ([rank([1, 2], torch.ones(2)), rank([1, 2], torch.ones(3))], (0, 0)),
        # Shards of fully_shard: the same where modules are given the same, other ones where sequences are cut.
        ([rank([1, 2], torch.ones(1), (7, 8), 0), rank([1, 2], torch.ones(1), (7, 8), 1)], (0, 1)),
        ([rank([1, 2], torch.ones(1), (7, 8), 0), rank([1, 2], torch.ones(1), (7, 9), 1)], (0, 0)),
        ([rank([1, 2], torch.ones(1), (), 0), rank([1, 2], torch.ones(1), (), 1)], (0, 0)),
    ],
)
def test_ranks_that_share_samples(ranks: list[RunRecord], expected: tuple[int, ...]) -> None:
    assert view_of(ranks).data_rank == expected
