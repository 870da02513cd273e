"""A bit that flips on one rank is found, with rank and tensor, along whichever axis copies lie."""

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist

from allranks.parameter_map import Box, Entry
from allranks.stepping.replicas import Comparison, Difference, differ, explain, find_differences, sum_copies
from tests.distributed.pool import Pools
from tests.distributed.sessions import config_of, session_of, step_through
from tests.distributed.tasks import CountingTask, Tiny
from tests.stepping.rounds import hold_round

HOSTS = {0: "a", 1: "a", 2: "b"}


def flip(kind: str, layout: str, rank: int | None, where: str = "whole", *overrides: str) -> Any:
    """In a worker: the verdict after two steps; the lowest bit of one number was flipped on `rank`.

    `where`: in a parameter that is "whole" or "sharded", in a "buffer", in a "state" of the optimizer, or in the
    "average".
    """
    config = config_of(layout, "train.global_batch=12", "optimizer.lr=0.01", *overrides, precision="float32")
    session = session_of(Tiny(kind=kind), config)
    for _ in step_through(session, 2):
        pass
    spread = session.spread
    of_parameters = {name: spread.map[name].sharded for name in spread.trainable()}
    found = {
        "whole": [spread.local(name) for name, sharded in of_parameters.items() if not sharded],
        "sharded": [spread.local(name) for name, sharded in of_parameters.items() if sharded],
        "buffer": [spread.local(name) for name, entry in spread.map.items() if entry.kind == "buffer"],
        "state": [tensor for entry, tensor in session.optimizers.parts() if ".exp_avg_sq." in entry.name],
        "average": [] if session.ema is None else [tensor for _, tensor in session.ema.parts()],
    }[where]
    if dist.get_rank() == rank:
        next(one for one in reversed(found) if one.dtype == torch.float32).view(torch.int32).view(-1)[0] ^= 1
    return {name: (verdict.kind, verdict.what) for name, verdict in hold_round(session, 2).items()}


CASES = [
    ("mlp", "ddp", "whole", "after step 2 rank 0 (", "hold different values: 6.bias is not alike"),
    ("mlp", "ddp", "state", "after step 2 rank 0 (", "optimizer.exp_avg_sq.6.bias is not alike"),
    ("mlp", "dp_shard=2,sharding=optimizer", "whole", "rank 0 (", "6.bias is not alike"),
    ("transformer", "tp=2", "whole", "rank 0 (", "is not alike"),
    ("batchnorm", "ddp", "buffer", "rank 0 (", "running_var is not alike"),
]


@pytest.mark.distributed
@pytest.mark.parametrize(("kind", "layout", "where", "who", "what"), CASES)
def test_two_that_differ_are_named(pool: Pools, kind: str, layout: str, where: str, who: str, what: str) -> None:
    assert pool(2).run(flip, kind, layout, None, where) == [{}, {}]
    for found in pool(2).run(flip, kind, layout, 1, where):
        verdict_kind, said = found["replicas"]
        assert verdict_kind == "replicas_differ" and who in said and what in said, said


@pytest.mark.distributed
def test_an_average_is_compared_too(pool: Pools) -> None:
    for found in pool(2).run(flip, "mlp", "ddp", 0, "average", "train.ema=0.9"):
        assert "ema." in found["replicas"][1]


@pytest.mark.distributed
def test_of_three_the_one_is_outvoted(pool: Pools) -> None:
    for found in pool(3).run(flip, "mlp", "ddp", 2):
        assert "after step 2 rank 2 (" in found["replicas"][1] and "holds other values than rank 0" in str(found)


@pytest.mark.distributed
@pytest.mark.full
def test_parts_are_compared_with_those_who_hold_the_same(pool: Pools) -> None:
    assert pool(4).run(flip, "mlp", "dp_replicate=2,dp_shard=2", None, "sharded") == [{}] * 4
    for found in pool(4).run(flip, "mlp", "dp_replicate=2,dp_shard=2", 3, "sharded"):
        assert "rank 1 (" in found["replicas"][1] and "3 (" in found["replicas"][1]
        assert "rank 0 (" not in found["replicas"][1]


def fill() -> Any:
    """In a worker: 3 samples a step on 2 ranks in 2 micro-steps, so that one rank has a filler, and counts less."""
    settings = ("train.global_batch=3", "train.micro_batch=1")
    session = session_of(CountingTask(), config_of("ddp", *settings, precision="float32"))
    for _ in step_through(session, 2):
        pass
    counted = [int(session.spread.local(name)) for name in session.spread.map if name.endswith("calls")]
    return counted, list(hold_round(session, 2))


@pytest.mark.distributed
def test_a_filler_leaves_counters_apart_and_is_no_fault(pool: Pools) -> None:
    (first, found), (second, also) = pool(2).run(fill)
    assert first != second, "else the case shows nothing"
    assert found == also == []


def go_alone() -> Any:
    settings = ("train.global_batch=6", "layout.local_sgd=2", "train.ema=0.9")
    session = session_of(Tiny(), config_of("ddp", *settings, precision="float32"))
    for _ in step_through(session, 2):
        pass
    assert session.outer is not None and not session.outer.apart
    return list(hold_round(session, 2))


@pytest.mark.distributed
def test_of_copies_that_meet_from_time_to_time_parameters_are_compared(pool: Pools) -> None:
    assert pool(2).run(go_alone) == [[], []]


def test_what_a_rank_tells_stays_short_however_many_hold_a_part() -> None:
    def told(num_holders: int, value: float = 1.0, first: int = 0) -> list[list[Any]]:
        holders = tuple(range(first, first + num_holders))
        entry = Entry("w", (2,), "float32", Box.whole((2,)), holders)
        return sum_copies([("parameters", entry, torch.full((2,), value))])

    assert len(json.dumps(told(2))) == len(json.dumps(told(4096))) < 100
    assert not differ([told(3), told(3), told(3)])
    assert differ([told(3), told(3, 2.0), told(3)])
    assert not differ([told(3), told(3, 2.0, first=3)]), "other ranks hold another part"


def test_votes() -> None:
    def told(*digests: str) -> list[list[list[Any]]]:
        everyone = list(range(len(digests)))
        return [[["w", everyone, digest], ["b", everyone, "0"]] for digest in digests]

    assert find_differences(told("1", "1", "1")) == ()
    assert find_differences(told("1", "2", "1")) == (Difference("w", (0, 1, 2), (1,)),)
    assert find_differences(told("1", "2", "1", "2")) == (Difference("w", (0, 1, 2, 3), ()),)
    assert find_differences(told("1", "2", "3")) == (Difference("w", (0, 1, 2), ()),)
    lacking = [*told("1", "1"), [["b", [0, 1, 2], "0"]]]
    lacking = [[[name, [0, 1, 2], digest] for name, _, digest in parts] for parts in lacking]
    assert find_differences(lacking) == (Difference("w", (0, 1, 2), (2,)),), "what only some have is not alike"


def test_the_words() -> None:
    three = explain(Comparison((Difference("w", (0, 1, 2), (2,)), Difference("b", (0, 1, 2), (2,))), HOSTS), 200, 100)
    assert three.what.startswith(
        "after step 200 rank 2 (b) holds other values than rank 0 (a), 1 (a): w (and 1 more) is"
    )
    assert three.next.startswith("resume from a checkpoint of step 100 or before")
    assert three.next.endswith("or the memory and the device of rank 2 (b)")
    assert three.evidence[-1] == "at step 100 all were alike"
    two = explain(Comparison((Difference("w", (0, 1), ()),), HOSTS), 200, 0)
    assert "rank 0 (a), 1 (a) hold different values" in two.what and two.next.endswith("the hosts of these ranks")
    assert two.next.startswith("resume from the newest checkpoint")
