"""A dry run against the real step for Tasks besides a language model's: steps of their own, buffers that are learnt.

As in `test_rehearsal_laws.py`: memory within 2%, messages exactly.
"""

from typing import Any

import pytest

from allranks.errors import LayoutError
from allranks.rehearsing.dryrun import World, rehearse_rank
from allranks.task import Task
from allranks.training.prepare import resolve_layout
from tests.distributed.pool import Pools
from tests.distributed.sessions import config_of, session_of
from tests.distributed.test_rehearsal_laws import ACCUMULATED, SIZES, compare, dynamo
from tests.rehearsing.tasks import Adversaries, Gathering, Normed, Stepping, Tokens
from tests.rehearsing.test_findings import Hinting

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


USED = ("fsdp", "pp=2", "ddp,recompute=full", "ddp,compile=block")
UNUSED = ("ddp", "tp=2", "cp=2", "single")


@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", [*UNUSED, *USED])
def test_a_hint_for_nothing_is_refused_where_training_refuses_it(pool: Pools, layout: str) -> None:
    """And is found where training does not look."""
    world = 1 if layout == "single" else 2
    config = config_of(layout, "train.global_batch=8")

    def real() -> str:
        try:
            session_of(Hinting(), config)
        except LayoutError as error:
            return str(error)
        return ""

    refused = set(pool(world).run(real))
    try:
        told = rehearse_rank(Hinting(), config, World(resolve_layout(config, world), world, on_cuda=False), 0)
    except LayoutError as error:
        assert refused == {str(error)} and layout in USED
    else:
        assert refused == {""} and layout in UNUSED
        (found,) = told.findings
        assert "hints().blocks: 'blocks.*' matches no module with parameters; the nearest are layers" in found.what
        assert not found.fails


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
