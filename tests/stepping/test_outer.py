"""The step that puts copies together: when, from where, and with what it does not go."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from allranks.errors import AllranksError
from tests.distributed.pool import Pools
from tests.distributed.sessions import SGD, config_of, parts_of, session_of, step_through, together
from tests.distributed.tasks import Points, Tiny
from tests.training.tasks import Streamed

pytestmark = pytest.mark.distributed

ROUTER = "layers.0.feed_forward.router"
SMALL = ("train.global_batch=9", *SGD)


def alike(every: int, num_steps: int, epoch: bool) -> list[tuple[bool, torch.Tensor]]:
    """After each step: whether the copies are said to be apart, and a parameter."""
    config = config_of("ddp", *SMALL, f"layout.local_sgd={every}", steps=num_steps)
    if epoch:
        config = config.model_copy(update={"train": config.train.model_copy(update={"steps": None, "epochs": 1})})
    session = session_of(Tiny(kind="mlp"), config)
    assert session.outer is not None
    found = []
    for _ in step_through(session, num_steps):
        found.append((session.outer.apart, session.spread.local("0.weight").clone()))
    return found


def test_copies_are_one_after_every_so_many_steps(pool: Pools) -> None:
    first, second = pool(2).run(alike, 3, 6, False)
    assert [apart for apart, _ in first] == [True, True, False] * 2
    for (apart, one), (_, other) in zip(first, second, strict=True):
        assert torch.equal(one, other) != apart


def test_the_last_round_of_an_epoch_may_be_short(pool: Pools) -> None:
    """61 samples are 7 steps of 9, the last one of 7."""
    first, second = pool(2).run(alike, 3, 7, True)
    assert [apart for apart, _ in first] == [True, True, False, True, True, False, False]
    assert torch.equal(first[-1][1], second[-1][1]) and not torch.equal(first[-2][1], first[-1][1])


def in_messages(limit: int) -> Any:
    import allranks.stepping.outer as outer

    kept, outer.MESSAGE_BYTES = outer.MESSAGE_BYTES, limit
    try:
        session = session_of(Tiny(kind="scalars"), config_of("dp_replicate=2,dp_shard=2", *SMALL, "layout.local_sgd=3"))
        assert session.outer is not None
        number = len(list(session.outer._messages()))
        list(step_through(session, 3))
        return number, parts_of(session)
    finally:
        outer.MESSAGE_BYTES = kept


def test_it_travels_in_messages(pool: Pools) -> None:
    one, many = pool(4).run(in_messages, 2**20), pool(4).run(in_messages, 100)
    assert [number for number, _ in one] == [2] * 4, "what is cut, and the scalars that are not"
    assert all(number > 3 for number, _ in many)
    whole, parted = (together([parts for _, parts in ranks][:2]) for ranks in (one, many))
    assert all(torch.allclose(whole[name], parted[name], rtol=1e-13, atol=1e-15) for name in whole)


class Follower(nn.Module):
    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        self.layer = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = x.detach().mean()
        found: torch.Tensor = self.layer(x)
        return found


class Following(Tiny):
    def model(self) -> nn.Module:
        return Follower()


class Sharded(torch.utils.data.IterableDataset[Any]):
    order = "sharded"

    def __iter__(self) -> Any:
        return iter([Points()[index] for index in range(20)])


class ShardedTask(Tiny):
    def dataset(self, split: str) -> Any:
        return Sharded()


def travelling(kind: str, *overrides: str) -> list[str]:
    session = session_of(Tiny(kind=kind), config_of("ddp", *SMALL, "layout.local_sgd=3", *overrides))
    assert session.outer is not None
    buffers = {name for name, entry in session.spread.map.items() if entry.kind == "buffer"}
    return sorted(buffers.intersection(name for names in session.outer._messages() for name in names))


@pytest.mark.parametrize(
    ("kind", "overrides", "some", "number"),
    [
        ("batchnorm", (), "blocks.1.running_mean", 9),
        ("batchnorm", ("layout.batchnorm=local",), "", 0),  # each rank keeps its own
        ("moe", (), f"{ROUTER}.bias", 2),
        ("counted", (), "", 0),
        ("transformer", (), "", 0),
    ],
)
def test_of_buffers_those_travel_that_follow_the_samples(
    pool: Pools, kind: str, overrides: tuple[str, ...], some: str, number: int
) -> None:
    for found in pool(2).run(travelling, kind, *overrides):
        assert len(found) == number and (some in found or not some), found


class Levelled(Tiny):
    """Its router has a buffer of a type that neither NCCL nor gloo reduces."""

    def model(self) -> nn.Module:
        model = super().model()
        model.get_submodule(ROUTER).register_buffer("level", torch.tensor([7, -3], dtype=torch.int16))
        return model


def levels() -> list[int]:
    session = session_of(Levelled(kind="moe"), config_of("ddp", *SMALL, "layout.local_sgd=3"))
    assert session.outer is not None
    level = session.spread.local(f"{ROUTER}.level")
    level += dist.get_rank()
    session.outer.synchronise()
    assert level.dtype == torch.int16
    return [*level.tolist(), *session.outer._anchors[f"{ROUTER}.level"].tolist()]


def test_small_integers_are_put_together(pool: Pools) -> None:
    assert pool(2).run(levels) == [[8, -2, 8, -2]] * 2


def refused(task: Any) -> str:
    try:
        session_of(task, config_of("ddp", "train.global_batch=4", "layout.local_sgd=3"))
    except AllranksError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (ShardedTask(), "layout.local_sgd=3 has to know which step is the last, and data that shards itself does not"),
        (Following(), "changes with the samples of a forward, and each of 2 data-parallel ranks sees its own"),
    ],
    ids=["sharded", "buffer"],
)
def test_what_would_speak_in_every_step_is_refused(pool: Pools, task: Any, message: str) -> None:
    assert all(message in said for said in pool(2).run(refused, task))


def test_data_in_one_order_may_be_a_stream(pool: Pools) -> None:
    assert pool(2).run(refused, Streamed()) == ["", ""]
