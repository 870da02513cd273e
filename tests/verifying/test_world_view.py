"""Which ranks share samples, and factors in words."""

import math

import pytest
import torch

from allranks.parallel.mesh import MESH_AXES
from allranks.parameter_map import Box
from allranks.verifying.recording import Call, Forwards, Part, RunRecord, Start, StepRecord
from allranks.verifying.world_view import OUTERMOST_FIRST, WorldView, say_shared, view_of


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
    assert all(world.in_words(factor) == "" for factor in (math.nan, math.inf, -math.inf))
    assert (
        world.is_count(9.0, 3) and world.is_count(1 / 3, 3) and not world.is_count(1.5, 3) and not world.is_count(1, 1)
    )
    assert world.twins(3) == world.layer_twins(3) == [2, 3]
    staged = WorldView((0, 0, 1, 1, 0, 0, 1, 1), {"pp": 2, "dp": 2, "tp": 2})
    assert staged.twins(1) == [0, 1, 4, 5]
    assert staged.layer_twins(1) == [0, 1] and staged.layer_twins(6) == [6, 7]


TWO_BY_TWO = WorldView((0, 0, 1, 1), {"dp_shard": 2, "tp": 2}, micro_batches=3)
COPIES = WorldView((0, 1, 2, 3), {"dp_replicate": 2, "dp_shard": 2}, micro_batches=3)
CUT_TWICE = WorldView((0,) * 6, {"tp": 3, "cp": 2}, micro_batches=5)
OWN = WorldView((0, 0, 1, 1), {"dp": 2, "model": 2})
STAGED = WorldView((0, 0, 1, 1, 0, 0, 1, 1), {"dp_shard": 2, "tp": 2, "pp": 2}, micro_batches=3)


@pytest.mark.parametrize(
    ("world", "factor", "axis", "said"),
    [
        (TWO_BY_TWO, 2.0, "tp", "tp = 2"),
        (TWO_BY_TWO, 0.5, "dp_shard", "1/data ranks = 1/2"),
        (TWO_BY_TWO, 0.5, "dp_shard*tp", "1/(dp_shard or tp) = 1/2"),
        (TWO_BY_TWO, 4.0, "tp", "world size = 4"),
        (TWO_BY_TWO, 1 / 3, "tp", "1/micro-batches = 1/3"),
        (OWN, 2.0, "model", "model = 2"),
        (OWN, 2.0, "dp", "data ranks = 2"),
        (COPIES, 2.0, "dp_shard", "dp_shard = 2"),
        (COPIES, 2.0, "dp_replicate*dp_shard", "dp_replicate or dp_shard = 2"),
        (COPIES, 4.0, "dp_replicate*dp_shard", "data ranks = 4"),
        (CUT_TWICE, 3.0, "tp*cp", "tp = 3"),
        (CUT_TWICE, 1 / 6, "tp*cp", "1/tp*cp = 1/6"),
        (CUT_TWICE, 2.0, "", "cp = 2"),
    ],
)
def test_a_factor_is_the_number_of_its_axis(world: WorldView, factor: float, axis: str, said: str) -> None:
    assert world.in_words(factor, axis) == said


@pytest.mark.parametrize(
    ("world", "factor", "axis"),
    [
        (TWO_BY_TWO, 2.0, "dp_shard*tp"),  # the numbers alone cannot tell
        (TWO_BY_TWO, 4.0, "dp_shard*tp"),
        (COPIES, 2.0, "dp_replicate*dp_shard"),
        (COPIES, 4.0, "dp_replicate*dp_shard"),
        (CUT_TWICE, 1 / 3, "tp"),
        (CUT_TWICE, 2.0, "cp"),
        (CUT_TWICE, 6.0, "tp*cp"),
        (CUT_TWICE, 0.7, "tp*cp"),
        (STAGED, 0.5, "dp_shard*tp*pp"),
        (STAGED, 0.25, "tp*pp"),
        (WorldView((0, 0, 1, 1, 2, 2), {"dp_shard": 3, "tp": 2}), 2.0, "tp"),
        (WorldView((0, 0, 1, 1, 2, 2), {"dp_shard": 3, "tp": 2}), 1 / 3, "dp_shard"),
        (WorldView((0, 0, 1, 1, 2, 2), {"dp_shard": 3, "tp": 2}), 1.1, "dp_shard"),
    ],
)
def test_a_factor_tells_its_axis(world: WorldView, factor: float, axis: str) -> None:
    assert world.axis_of_factor(factor) == axis


@pytest.mark.parametrize(
    ("world", "off", "axis"),
    [
        (TWO_BY_TWO, [1, 3], "tp"),
        (TWO_BY_TWO, [2, 3], "dp_shard"),
        (TWO_BY_TWO, [3], "dp_shard*tp"),
        (TWO_BY_TWO, [0, 1, 2, 3], "dp_shard"),
        (COPIES, [2, 3], "dp_replicate"),
        (COPIES, [0, 2], "dp_shard"),
        (COPIES, [1, 2, 3], "dp_replicate*dp_shard"),
        (STAGED, [4, 5, 6, 7], "pp"),
        (STAGED, [2, 3, 6, 7], "dp_shard"),
        (OWN, [1, 3], "model"),
        (WorldView((0, 1, 0, 1), {"dp": 2, "model": 2}), [1, 3], "dp"),
        (CUT_TWICE, [3, 4, 5], "cp"),
        (WorldView((0,)), [0], "model"),
    ],
)
def test_ranks_tell_their_axis(world: WorldView, off: list[int], axis: str) -> None:
    assert world.axis_of(off) == axis


def test_values_tell_their_axis() -> None:
    assert COPIES.axis_of_values({0: 1.0, 1: 2.0, 2: 1.0, 3: 2.0}, 1.0, 1e-9) == "dp_shard"
    assert COPIES.axis_of_values(dict.fromkeys(range(4), 4.0), 1.0, 1e-9) == "dp_replicate*dp_shard"
    uneven = WorldView((0, 1, 2, 3, 4, 5), {"dp_replicate": 3, "dp_shard": 2})
    assert uneven.axis_of_values(dict.fromkeys(range(6), 3.0), 1.0, 1e-9) == "dp_replicate"
    assert uneven.axis_of_values({}, 0.0, 1e-9) == "dp_replicate*dp_shard"
    assert uneven.counts_an_axis(0.5) and not uneven.counts_an_axis(6.0)


def test_ranks_are_counted_as_in_a_mesh() -> None:
    assert tuple(name for name in OUTERMOST_FIRST if name != "dp") == MESH_AXES


def rank(rows: list[int], weight: torch.Tensor, box: Box | None = None) -> RunRecord:
    return RunRecord(start=Start(parameters={"w": Part(box, weight)}), steps=[StepRecord(rows=rows)])


def sharded(number: int, *values: float, rows: int = 1, unseen: bool = False) -> RunRecord:
    """A rank with a row of what fully_shard has cut over both; its modules are given `values`."""
    start = Start(parameters={"w": Part(Box((number,), (1,)), torch.ones(1))}, gathered={"w": (0, 1)})
    calls = [Call(f"{place}", (value, 1.0)) for place, value in enumerate(values)]
    return RunRecord(start=start, steps=[StepRecord(rows=[rows])], given=Forwards(calls, unseen))


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([rank([1, 2], torch.ones(2)), rank([3, 4], torch.ones(2))], (0, 1)),
        # The same samples on whole copies: a mistake of data parallelism, not a layer that is cut.
        ([rank([1, 2], torch.ones(2)), rank([2, 1], torch.ones(2))], (0, 1)),
        ([rank([1, 2], torch.ones(2)), rank([1, 2], torch.zeros(2))], (0, 0)),
        ([rank([1, 2], torch.ones(2)), rank([1, 2], torch.ones(3))], (0, 0)),
        ([rank([1], torch.ones(1), Box((place,), (1,))) for place in (0, 1)], (0, 0)),
        # Shards of fully_shard: the same where modules are given the same, other ones where sequences are cut.
        ([sharded(0, 7, 8), sharded(1, 7, 8)], (0, 1)),
        ([sharded(0, 7, 8), sharded(1, 7, 9)], (0, 0)),
        ([sharded(0, 7, 8), sharded(1, 7)], (0, 1)),  # rank 0 looks at something more
        ([sharded(0, 7, 8, unseen=True), sharded(1, 7, 8, unseen=True)], (0, 1)),
        ([sharded(0), sharded(1)], (0, 0)),
        # Of several kinds of ranks only what is seen is told.
        ([sharded(0, 7), sharded(1, 7), sharded(0, 7, rows=2), sharded(1, 7, rows=2)], (0, 1, 2, 3)),
        ([sharded(0, 7, unseen=True), sharded(1, 7), sharded(0, 7, rows=2), sharded(1, 6, rows=2)], (0, 0, 1, 1)),
    ],
)
def test_ranks_that_share_samples(ranks: list[RunRecord], expected: tuple[int, ...]) -> None:
    assert view_of(ranks).data_rank == expected


def test_parts_that_begin_alike_are_other_ones_by_their_places() -> None:
    ranks = [rank([1], torch.zeros(2)), rank([1], torch.zeros(2))]
    assert view_of(ranks).data_rank == (0, 1)
    places = {("w", number): Box((2 * number,), (2,)) for number in range(2)}
    assert view_of(ranks, places).data_rank == (0, 0)


def test_ranks_that_share_samples_are_told() -> None:
    (told,) = say_shared(TWO_BY_TWO)
    assert told.startswith("ranks 0, 1; ranks 2, 3 were fed the same samples, and are taken for ranks that share")
    assert say_shared(COPIES) == ()
