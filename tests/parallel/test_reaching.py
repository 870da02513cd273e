"""Ranks that take unlike branches inside of one sharded unit are stopped by name; those that take like ones go on."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from allranks.errors import TaskError
from allranks.parallel import parting
from tests.distributed.pool import Pools
from tests.distributed.sessions import config_of, session_of, step_through
from tests.distributed.tasks import Block, Stack, Tiny, vector_gain


class Forked(Block):
    """A block with two ways through it; `ways`: by rank the one that it takes once it is told to ("": past both)."""

    def __init__(self, ways: dict[int, str], width: int) -> None:
        super().__init__(vector_gain())
        self.a = nn.Linear(7, 7)
        self.b = nn.Linear(7, 7) if width == 7 else nn.Sequential(nn.Linear(7, width), nn.Linear(width, 7))
        self.ways, self.told = ways, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        way = self.ways.get(dist.get_rank(), "ab") if self.told else "ab"
        for name in way:
            x = x + self.get_submodule(name)(x)
        found: torch.Tensor = super().forward(x) if way or not self.told else x
        return found


class ForkedTask(Tiny):
    """The second of three blocks has two ways through it."""

    ways: dict[int, str] = {}
    width: int = 7

    def model(self) -> nn.Module:
        return Stack([Block(vector_gain()), Forked(self.ways, self.width), Block(vector_gain())])


def forked(layout: str, ways: dict[int, str], width: int) -> tuple[str, int, bool]:
    """What a training is stopped with, after how many steps, and whether a parameter moved in the last one."""
    task = ForkedTask()
    task.ways, task.width = dict(ways), width
    with patch.object(parting, "SLICE_SECONDS", 0.2):
        session = session_of(task, config_of(layout, "train.global_batch=8", steps=3))
        fork = session.spread.bare().get_submodule("blocks.1")
        assert isinstance(fork, Forked)
        done, before = 0, dict[str, torch.Tensor]()
        names = list(session.spread.trainable())
        try:
            for _ in step_through(session, 3):
                fork.told = True
                done, before = done + 1, {name: session.spread.local(name).clone() for name in names}
        except TaskError as error:
            moved = any(not torch.equal(before[name], session.spread.local(name)) for name in names)
            return f"TaskError: {error}", done, moved
        return "", done, True


UNLIKE = [
    (
        {0: "a", 1: "b"},
        7,
        "rank 0 {} without blocks.1.b.weight, blocks.1.b.bias, rank 1 {} without blocks.1.a.weight, ",
    ),
    ({0: "a", 1: "b"}, 3, "rank 0 {} without blocks.1.b.0.weight, blocks.1.b.0.bias, "),
    ({1: "b"}, 7, "rank 0 {}, rank 1 {} without blocks.1.a.weight, blocks.1.a.bias. A sharded"),
    pytest.param({1: ""}, 7, "rank 0 {}, rank 1 {} without blocks.1.", marks=pytest.mark.full),
]


@pytest.mark.distributed
@pytest.mark.parametrize(("ways", "width", "words"), UNLIKE)
def test_ranks_that_take_unlike_branches_of_a_unit_are_stopped_by_name(
    pool: Pools, ways: dict[int, str], width: int, words: str
) -> None:
    """In the backward: nothing that they mixed reaches a parameter."""
    try:
        ranks = pool(2).run(forked, "fsdp", ways, width, timeout=50)
    finally:
        pool(2).close()  # what they still wait for would meet the next case
    for text, done, moved in ranks:
        assert text.startswith("TaskError: the ranks ran different modules: "), ranks
        assert words.format(*["the gradients of the model"] * words.count("{}")) in text
        assert (done, moved) == (1, False)


AMONG_COPIES = [
    # All parts of the second copy (ranks 2 and 3) have taken another way than those of the first.
    ({2: "b", 3: "b"}, 7, "rank 0 {}, rank 2 {} without blocks.1.a.weight, blocks.1.a.bias. A sharded"),
    ({2: "a", 3: "a"}, 3, "rank 0 {}, rank 2 {} without blocks.1.b.0.weight, blocks.1.b.0.bias, "),
    # One part of each copy.
    ({1: "a", 3: "a"}, 3, "rank 0 {}, rank 1 {} without blocks.1.b.0.weight, blocks.1.b.0.bias, "),
    pytest.param({2: "", 3: ""}, 7, "rank 0 {}, rank 2 {} without blocks.1.", marks=pytest.mark.full),
]


@pytest.mark.distributed
@pytest.mark.parametrize(("ways", "width", "words"), AMONG_COPIES)
def test_copies_that_take_unlike_branches_of_a_unit_are_stopped_by_name(
    pool: Pools, ways: dict[int, str], width: int, words: str
) -> None:
    """Before any of them waits for another inside of FSDP2, and so all of them at once."""
    for text, done, moved in pool(4).run(forked, "dp_replicate=2,dp_shard=2", ways, width, timeout=50):
        assert text.startswith("TaskError: the ranks ran different modules: ")
        assert words.format(*["the gradients of the model"] * words.count("{}")) in text
        assert (done, moved) == (1, False)


@pytest.mark.distributed
@pytest.mark.full
def test_copies_without_parts_are_stopped_too(pool: Pools) -> None:
    for text, done, moved in pool(2).run(forked, "fsdp,sharding=none", {1: "a"}, 3, timeout=50):
        assert text.startswith("TaskError: the ranks ran different modules: rank 0 the gradients of the model, rank 1 ")
        assert (done, moved) == (1, False)


@pytest.mark.distributed
@pytest.mark.full
def test_copies_that_take_the_same_branch_go_on(pool: Pools) -> None:
    ways = dict.fromkeys(range(4), "b")
    assert pool(4).run(forked, "dp_replicate=2,dp_shard=2", ways, 7, timeout=50) == [("", 3, True)] * 4


@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["fsdp", pytest.param("fsdp,sharding=grad_op", marks=pytest.mark.full)])
def test_ranks_that_take_the_same_branch_go_on(pool: Pools, layout: str) -> None:
    assert pool(2).run(forked, layout, {0: "b", 1: "b"}, 7, timeout=50) == [("", 3, True)] * 2
