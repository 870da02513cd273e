"""A dry run against the real step: peak memory within 2%, messages exactly, on every axis (real processes on the CPU).

Memory is compared in the steady state, as torch's allocator tells it; messages by axis, kind, number and bytes. Of
experts the real router decides how many tokens travel, and the dry run shares them out evenly: there the number of
messages is compared, and the mean of the peaks of all ranks of a stage, because what one has more of another has less.
That mean is up to 2% less than what equal shares take; with a router that shares them out evenly all is compared.
That a real step leaves nothing behind is looked at, too: what a dry run then counts between steps nobody has measured.
"""

import importlib
from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import pytest

from allranks.rehearsing.dryrun import World, rehearse_rank
from allranks.task import Task
from allranks.training.prepare import resolve_layout
from tests.distributed.pool import Pools
from tests.distributed.sessions import config_of
from tests.rehearsing.tasks import EvenExperts, Experts, Tokens


class Chunked(Tokens):
    """Its loss holds the logits of a few positions at once."""

    chunk: int = 32


CLOSE = 0.02
SIZES: dict[str, Any] = {"hidden": 128, "seq": 128, "vocab": 512, "layers": 4}
ACCUMULATED = ("train.micro_batch=1",)
BFLOAT16 = ("train.precision=bfloat16",)
FIRST = [
    (Tokens, "ddp", 2, ()),
]
OTHERS = [
    (Tokens, "tp=2,recompute=selective", 2, ()),
    (Tokens, "fsdp,sharding=grad_op", 2, ACCUMULATED),
    (Tokens, "single", 1, ()),
    (Tokens, "ddp,recompute=full", 2, ACCUMULATED),
    (Tokens, "fsdp", 2, ()),
    (Tokens, "fsdp,recompute=full", 2, ()),
    (Tokens, "fsdp", 2, BFLOAT16),
    (Tokens, "dp_shard=2,sharding=optimizer", 2, ()),
    (Tokens, "dp_replicate=2,sharding=none", 2, ()),
    (Tokens, "dp_replicate=2,sharding=none", 2, ACCUMULATED),
    (Tokens, "single,recompute=selective", 1, ()),
    (Tokens, "dp_shard=2,recompute=selective", 2, ()),
    (Tokens, "cp=2,recompute=selective", 2, ()),
    (Tokens, "pp=2,recompute=selective", 2, ()),
    (Tokens, "tp=2,dp_shard=2,recompute=selective", 4, ()),
    (Tokens, "tp=2,recompute=full", 2, ()),
    (Tokens, "tp=2", 2, ()),
    (Tokens, "cp=2", 2, ()),
    (Tokens, "pp=2", 2, ()),
    (Tokens, "pp=2,schedule=gpipe", 2, ()),
    (Experts, "dp_replicate=2,ep=2", 2, ()),
    (Tokens, "dp_replicate=2,dp_shard=2", 4, ACCUMULATED),
    (Tokens, "tp=2,dp_shard=2", 4, ()),
    (Tokens, "cp=2,dp_shard=2", 4, ()),
    (Tokens, "tp=2,cp=2", 4, ()),
    (Tokens, "pp=2,dp_shard=2", 4, ()),
    (Tokens, "pp=2,tp=2", 4, ()),
    (EvenExperts, "dp_shard=4,ep=2", 4, ()),
    (Tokens, "cp=2", 2, ("layout.context=ring",)),
    (Chunked, "single", 1, ()),
    (Chunked, "fsdp", 2, ()),
    (Experts, "cp=2,dp_replicate=2,ep=2", 4, ()),
    (EvenExperts, "cp=2,dp_replicate=2,ep=2", 4, ()),
    (EvenExperts, "dp_replicate=2,tp=2,ep=2", 4, ()),
    (Tokens, "pp=2,schedule=interleaved", 2, ()),
    (Tokens, "pp=2,schedule=interleaved_zb", 2, ()),
    (Tokens, "pp=2,schedule=zbv", 2, ()),
    (Tokens, "pp=2,schedule=dualpipev", 2, ()),
    (Tokens, "pp=2,schedule=looped_bfs", 2, ()),
    (Tokens, "pp=2,cp=2", 4, ()),
    (Experts, "pp=2,dp_replicate=2,ep=2", 4, ()),
    (Experts, "pp=2,dp_shard=2,ep=2", 4, ()),
    (EvenExperts, "pp=2,dp_shard=2,ep=2", 4, ()),
    (Tokens, "dp_shard=2,tp=2,pp=2", 8, ()),
    (Tokens, "dp_replicate=2,dp_shard=2,tp=2", 8, ()),
    (Tokens, "fsdp", 2, ("train.precision=float16",)),
    (Tokens, "tp=2", 2, ("train.precision=float16",)),
    (Tokens, "pp=4", 4, ACCUMULATED),
    (Tokens, "pp=4,recompute=full", 4, ()),
    (EvenExperts, "dp_replicate=2,ep=2,recompute=full", 2, ()),
    (EvenExperts, "dp_shard=2,ep=2", 2, BFLOAT16),
]


@pytest.fixture(scope="module", autouse=True)
def dynamo() -> None:
    """Fake tensors import this, which sets an environment variable: before any test looks."""
    importlib.import_module("torch._inductor.runtime.cache_dir_utils")
    importlib.import_module("torch._dynamo")


def compare(
    pool: Pools,
    kind: type[Task],
    layout: str,
    world: int,
    words: tuple[str, ...],
    sizes: Mapping[str, Any] = SIZES,
) -> None:
    """The first rank, one in the middle (of four stages that is the third) and the last."""
    given = ("train.global_batch=8", "train.max_norm=1.0", *words)
    precision = next((word.partition("precision=")[2] for word in words if "precision" in word), "float32")
    config = config_of(layout, *(word for word in given if "precision" not in word), precision=precision, steps=16)

    def real() -> tuple[int, int, int, dict[str, tuple[int, int]]]:
        from allranks.rehearsing import reality
        from tests.distributed.sessions import session_of

        with patch.object(reality, "MEASURED_STEPS", 2):  # reading what a profile says takes longer than the step
            measured = reality.measure_step(session_of(kind(**sizes), config))
        return measured.peak_bytes, measured.resting_bytes, measured.left_bytes, dict(measured.collectives)

    pool(world).close()  # of the rank's threads it asks each whether it is idle: those of earlier groups are many
    measured = pool(world).run(real, timeout=240)
    found = resolve_layout(config, world)
    for rank in {0, world // 2, world - 1}:
        told = rehearse_rank(kind(**sizes), config, World(found, world, on_cuda=False), rank)
        peak, resting, left, messages = measured[rank]
        assert left < CLOSE / 2 * peak
        if kind is Experts:
            mates = measured[rank * found.pp // world * (world // found.pp) :][: world // found.pp]
            peak = sum(each for each, *_ in mates) / len(mates)
        assert told.resting_bytes == pytest.approx(resting, rel=1e-3)
        assert told.peak_bytes == pytest.approx(peak, rel=CLOSE)
        mine: dict[str, tuple[int, int]] = {}
        for one in told.collectives:
            num_bytes, count = mine.get(f"{one.axis} {one.op}", (0, 0))
            mine[f"{one.axis} {one.op}"] = num_bytes + one.bytes, count + one.count
        if kind is Experts:
            assert {name: count for name, (_, count) in mine.items()} == {n: c for n, (_, c) in messages.items()}
        else:
            assert mine == messages


@pytest.mark.parametrize(("kind", "layout", "world", "words"), FIRST)
def test_a_dry_run_is_the_real_step(
    pool: Pools, kind: type[Tokens], layout: str, world: int, words: tuple[str, ...]
) -> None:
    compare(pool, kind, layout, world, words)


@pytest.mark.full
@pytest.mark.parametrize(("layout", "world"), [("single", 1), ("fsdp", 2)])
def test_a_dry_run_in_eight_bits_is_the_real_step(pool: Pools, layout: str, world: int) -> None:
    """As a processor emulates them."""
    pytest.importorskip("torchao", reason="torchao is not installed: allranks[float8]")
    compare(pool, Tokens, layout, world, ("train.precision=float8",))


@pytest.mark.full
@pytest.mark.parametrize(("kind", "layout", "world", "words"), OTHERS)
def test_a_dry_run_is_the_real_step_on_every_axis(
    pool: Pools, kind: type[Tokens], layout: str, world: int, words: tuple[str, ...]
) -> None:
    compare(pool, kind, layout, world, words)


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "layout", "world", "words"),
    [
        (Tokens, "ddp", 2, ACCUMULATED),
        (Tokens, "fsdp,recompute=full", 2, ()),
        (Tokens, "tp=2,recompute=selective", 2, ()),
        (Tokens, "cp=2", 2, ()),
        (Tokens, "pp=2", 2, ACCUMULATED),
        (EvenExperts, "dp_replicate=2,ep=2", 2, ()),
    ],
)
def test_floating_point_operations_are_those_of_the_real_step(
    pool: Pools, kind: type[Tokens], layout: str, world: int, words: tuple[str, ...]
) -> None:
    """As torch's counter has them of each rank; its registry lacks the processor's attention, and grouped products."""
    given = ("train.global_batch=8", "train.max_norm=1.0", *words)
    config = config_of(layout, *given, precision="float32", steps=16)

    def real() -> int:
        import torch
        from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

        from tests.distributed.sessions import session_of

        session = session_of(kind(**SIZES), config)
        with session.loader() as loader:
            batch = next(loader)
        before = session.step.run(batch, session.step.agree_first(batch), lambda: batch).pending
        aten = torch.ops.aten
        formulas: dict[Any, Any] = {
            aten._scaled_dot_product_flash_attention_for_cpu: lambda *given, **_: sdpa_flop_count(*given[:3]),
            aten._scaled_dot_product_flash_attention_for_cpu_backward: (
                lambda *given, **_: sdpa_backward_flop_count(*given[:4])
            ),
            aten._grouped_mm: lambda left, right, *_, **__: 2 * left[0] * left[1] * right[-1],
        }
        with FlopCounterMode(display=False, custom_mapping=formulas) as counted:
            session.step.run(batch, before, lambda: batch).pending.read()
        return int(counted.get_total_flops())

    counted = pool(world).run(real, timeout=240)
    found = resolve_layout(config, world)
    for rank in {0, world - 1}:
        told = rehearse_rank(kind(**SIZES), config, World(found, world, on_cuda=False), rank)
        assert told.flops == counted[rank] > 0
