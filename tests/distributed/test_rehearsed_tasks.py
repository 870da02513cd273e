"""A dry run against the real step for Tasks besides a language model's: steps of their own, and buffers that are learnt.

As in `test_rehearsal_laws.py`: memory within 2%, messages exactly.
"""

from typing import Any

import pytest

from allranks.task import Task
from tests.distributed.pool import Pools
from tests.distributed.test_rehearsal_laws import ACCUMULATED, SIZES, compare, dynamo
from tests.rehearsing.tasks import Adversaries, Gathering, Normed, Stepping, Tokens

__all__ = ["dynamo"]

SKIPPING = ("guard.spike=skip",)
FIRST = [
    (Adversaries, "ddp", 2, ()),
    (Normed, "ddp", 2, ()),
    (Normed, "single", 1, ()),
]
OTHERS = [
    (Adversaries, "fsdp", 2, ()),
    (Adversaries, "single", 1, ()),
    (Adversaries, "ddp", 2, ("train.micro_batch=8",)),
    (Adversaries, "fsdp", 2, ("train.micro_batch=8",)),
    (Adversaries, "dp_replicate=2,dp_shard=2", 4, ()),
    (Adversaries, "dp_shard=2,sharding=optimizer", 2, ()),
    (Gathering, "ddp", 2, ()),
    (Gathering, "fsdp", 2, ()),
    (Stepping, "ddp", 2, ()),
    (Stepping, "fsdp", 2, ACCUMULATED),
    (Stepping, "tp=2", 2, ()),
    (Normed, "fsdp", 2, ()),
    (Normed, "ddp", 2, SKIPPING),
    (Tokens, "fsdp", 2, SKIPPING),
    (Tokens, "pp=2", 2, SKIPPING),
]


def check(pool: Pools, kind: type[Task], layout: str, world: int, words: tuple[str, ...]) -> None:
    """The first and the last rank."""
    sizes: dict[str, Any] = SIZES if issubclass(kind, Tokens) else {}
    batch = () if issubclass(kind, Tokens) else ("train.global_batch=32",)
    compare(pool, kind, layout, world, (*batch, *words), sizes)


@pytest.mark.parametrize(("kind", "layout", "world", "words"), FIRST)
def test_a_dry_run_is_the_real_step(
    pool: Pools, kind: type[Task], layout: str, world: int, words: tuple[str, ...]
) -> None:
    check(pool, kind, layout, world, words)


@pytest.mark.full
@pytest.mark.parametrize(("kind", "layout", "world", "words"), OTHERS)
def test_a_dry_run_is_the_real_step_under_every_layout(
    pool: Pools, kind: type[Task], layout: str, world: int, words: tuple[str, ...]
) -> None:
    check(pool, kind, layout, world, words)
