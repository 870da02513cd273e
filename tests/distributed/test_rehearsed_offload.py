"""A dry run with offload against real steps: the device's peak within 2%, the host's and what crosses to the byte.

The processor stands for the device here. The host's memory is mapped from the system for each copy: torch's allocator
knows as little of it as a GPU's does of pinned memory, and the profiler, which tells the real peak, sees none of it.
Reductions over gloo end at once on both sides: FSDP2 copies their results to the host behind them on a stream, and a
processor has none.
"""

import importlib
import math
import mmap
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch

from allranks.parallel.gloo_ops import gather_through_gloo
from allranks.rehearsal import RankRehearsal
from allranks.rehearsing.dryrun import World, rehearse_rank
from allranks.rehearsing.host_memory import What, beside_host
from allranks.rehearsing.rank_step import local
from allranks.training.prepare import resolve_layout
from tests.distributed.pool import Pools
from tests.distributed.sessions import config_of
from tests.rehearsing.tasks import Tokens

CLOSE = 0.02
SIZES: dict[str, Any] = {"hidden": 256, "seq": 128, "vocab": 256, "layers": 3}
CUT = ("train.global_batch=16", "train.max_norm=1.0", "optimizer.name=adamw")  # fused: its update makes nothing
CASES = [
    ("single,offload=activations", 1, ()),
    ("fsdp,offload=parameters", 2, ()),
    ("fsdp,offload=all,recompute=full", 2, ()),
    ("fsdp,offload=parameters", 2, ("train.micro_batch=4",)),
    ("tp=2,offload=activations", 2, ()),
    ("dp_replicate=2,dp_shard=2,offload=all", 4, ()),
]


@pytest.fixture(scope="module", autouse=True)
def dynamo() -> None:
    """Fake tensors import this, which sets an environment variable: before any test looks."""
    importlib.import_module("torch._inductor.runtime.cache_dir_utils")
    importlib.import_module("torch._dynamo")


class Mapped:
    """The host's memory, apart from torch's allocator; what crosses is counted."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self.crossed: Counter[tuple[str, str]] = Counter()
        self._known: dict[int, Any] = {}

    def on_host(self, tensor: torch.Tensor, what: What, *, pinned: bool) -> torch.Tensor:
        self.crossed[what, "host"] += tensor.nbytes
        flat = torch.frombuffer(mmap.mmap(-1, tensor.nbytes), dtype=tensor.dtype, count=tensor.numel())
        self._follow(flat.untyped_storage(), tensor.nbytes)
        return flat.as_strided(tensor.shape, torch.empty_like(tensor, device="meta").stride())

    def on_device(self, tensor: torch.Tensor, what: What) -> torch.Tensor:
        self.crossed[what, "device"] += tensor.nbytes
        return torch.empty_like(tensor)

    def _follow(self, storage: Any, num_bytes: int) -> None:
        def forget(_: object) -> None:
            self.now -= num_bytes
            del self._known[number]

        number = len(self.crossed) + max(self._known, default=0) + 1
        self._known[number] = weakref.ref(storage, forget)
        self.now += num_bytes
        self.most = max(self.most, self.now)


@contextmanager
def reducing_at_once() -> Iterator[None]:
    """Inside, no gradient travels while the next unit computes."""
    with patch("allranks.parallel.shard.gather_through_gloo", partial(_gather, gather_through_gloo)):
        yield


def _gather(gather: Any, *args: Any, **words: Any) -> Any:
    return gather(*args, **{**words, "overlap": False})


def real_step(layout: str, words: tuple[str, ...]) -> tuple[float, int, int, dict[tuple[str, str], int]]:
    """In a worker: (peak of the device, bytes of state on the host, most of the rest there, what crossed in a step)."""
    from allranks.rehearsing.reality import MEASURED_STEPS, WARM_STEPS, measure_step
    from tests.distributed.sessions import session_of

    mapped = Mapped()
    with beside_host(mapped, accelerator=True), reducing_at_once():
        session = session_of(Tokens(**SIZES), config_of(layout, *CUT, *words, precision="float32", steps=16))
        mapped.crossed.clear()  # the first samples are looked at before the first step
        mapped.most = mapped.now
        measured = measure_step(session)
    state = 0
    if session.processes.mesh.layout.offloads_parameters:
        parts = [part for _, part in session.optimizers.parts()]
        parts += [local(parameter.detach()) for parameter in session.spread.trainable().values()]
        state = sum(part.nbytes for part in parts)
    steps = WARM_STEPS + MEASURED_STEPS + 1
    return measured.peak_bytes - state, state, mapped.most, {key: n // steps for key, n in mapped.crossed.items()}


def predicted(layout: str, world: int, words: tuple[str, ...], rank: int) -> RankRehearsal:
    """The same, rehearsed."""
    config = config_of(layout, *CUT, *words, precision="float32", steps=16)
    found = resolve_layout(config, world)
    there = patch("allranks.parallel.host_parameters.has_own_memory", lambda device: True)
    with there, reducing_at_once():
        return rehearse_rank(Tokens(**SIZES), config, World(found, world, on_cuda=False), rank)


def compare(pool: Pools, layout: str, world: int, words: tuple[str, ...]) -> None:
    measured = pool(world).run(real_step, layout, words, timeout=240)
    for rank in {0, world - 1}:
        told = predicted(layout, world, words, rank)
        peak, state, rest, crossed = measured[rank]
        assert told.peak_bytes == pytest.approx(peak, rel=CLOSE)
        assert {(one.what, one.to): one.bytes for one in told.transfers} == crossed and crossed
        assert math.isclose(told.host_peak_bytes, state + rest, rel_tol=0.001), (told.host_peak_bytes, state, rest)


@pytest.mark.full
@pytest.mark.parametrize(("layout", "world", "words"), CASES[:1])
def test_a_dry_run_is_the_real_step(pool: Pools, layout: str, world: int, words: tuple[str, ...]) -> None:
    compare(pool, layout, world, words)


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.parametrize(("layout", "world", "words"), CASES[1:])
def test_a_dry_run_is_the_real_step_in_more_layouts(
    pool: Pools, layout: str, world: int, words: tuple[str, ...]
) -> None:
    compare(pool, layout, world, words)
