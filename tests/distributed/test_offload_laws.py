"""Law 4 for parameters in the host's memory, with the CPU in the accelerator's place.

Here both memories are one, and nothing is pinned: what is tested is FSDP2's way through its offload, and ours around
it. That values cross between two memories is tested where there is an accelerator (bench/gpu/one_gpu.py).
"""

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy
from torch.utils.data import default_collate

from allranks.layout import Layout, parse_layout
from allranks.models.moe import MoETransformer
from allranks.verifying.parity import RecordedStep, compare, fed, record_run
from allranks.verifying.reference import plain_loop
from tests.distributed.pool import Pools
from tests.distributed.sessions import (
    Parts,
    config_of,
    initial_model,
    parts_of,
    processes_of,
    session_of,
    step_through,
    together,
)
from tests.distributed.tasks import IGNORED, Tiny
from tests.training.snapshots import contents_of, find, saver_of

pytestmark = pytest.mark.distributed

# A name in it is replaced below, which a type checker would only allow for names that it exports.
parallelizing: Any = importlib.import_module("allranks.parallel.parallelize")

STEPS = 3
CUT = ("train.global_batch=13", "train.micro_steps=3", "train.max_norm=0.05")
ADAMW = ("optimizer.name=adamw", "optimizer.lr=0.001", "optimizer.weight_decay=0.01")
SGD = ("optimizer.name=sgd", "optimizer.lr=0.1", "optimizer.momentum=0.9", "optimizer.weight_decay=0.01")
CASES = [
    ("fsdp", 3, "scalars", SGD),
    ("fsdp,sharding=grad_op", 2, "tied", ADAMW),
    ("dp_replicate=2,dp_shard=2", 4, "mlp", SGD),
    ("tp=2,dp_shard=2", 4, "transformer", SGD),
    ("pp=2,dp_shard=2", 4, "transformer", SGD),
    ("cp=2,dp_shard=2", 4, "transformer", SGD),
    ("dp_shard=2,ep=2", 2, "moe", SGD),
]


@contextmanager
def cpu_as_accelerator() -> Iterator[None]:
    """Inside, a layout with offload=parameters is made on the CPU, too."""

    def choose(layout: Layout, device: torch.device) -> OffloadPolicy:
        return CPUOffloadPolicy(pin_memory=False) if layout.offloads_parameters else OffloadPolicy()

    with patch.object(parallelizing, "choose_offload", choose):
        yield


def record(layout: str, kind: str, overrides: Sequence[str]) -> list[RecordedStep]:
    config = config_of(f"{layout},offload=parameters", *overrides, steps=STEPS)
    with cpu_as_accelerator():
        return record_run(Tiny(kind=kind), config, processes_of(config), STEPS)


def finish(model: nn.Module) -> None:
    if isinstance(model, MoETransformer):
        model.update_balance()


@pytest.mark.sample(3)
@pytest.mark.parametrize(("layout", "size", "kind", "optimizer"), CASES, ids=[f"{case[0]}-{case[2]}" for case in CASES])
def test_equal_to_one_device(pool: Pools, layout: str, size: int, kind: str, optimizer: Sequence[str]) -> None:
    cut = ("train.global_batch=12", *CUT[1:]) if "pp" in layout else CUT
    ranks = pool(size).run(record, layout, kind, (*cut, *optimizer))
    degrees, task = Layout.resolve(parse_layout(layout), size), Tiny(kind=kind)
    dataset, model, work = task.dataset("train"), initial_model(task).double(), []
    for step in range(STEPS):
        positions = fed(ranks, step, range(0, size // degrees.pp, degrees.tp * degrees.cp))
        batch = default_collate([dataset[sample] for sample in positions.values()])
        batch["x"] = batch["x"].double() if batch["x"].is_floating_point() else batch["x"]
        work.append((batch, int((batch["y"] != IGNORED).sum())))
    adaptive = optimizer is ADAMW

    def make(parameters: Any) -> torch.optim.Optimizer:
        if adaptive:
            return torch.optim.AdamW(parameters, lr=0.001, weight_decay=0.01)
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)

    def forward(module: nn.Module, batch: Any) -> torch.Tensor:
        return task.loss(module(batch["x"]), batch)

    expected = plain_loop(model, make, work, forward, 0.05, finish=finish)
    assert not compare(ranks, expected, adaptive=adaptive)


LARGE = ("train.global_batch=8", "train.max_norm=0.5", "train.ema=0.5", *ADAMW)


def train(layout: str, precision: str) -> tuple[Parts, list[dict[str, float]], list[bool]]:
    """In a worker: what is held after some steps (averages, too), what was told, and what of it waits on the host."""
    config = config_of(layout, *LARGE, precision=precision, steps=STEPS)
    with cpu_as_accelerator():
        session = session_of(Tiny(kind="transformer"), config)
    told = [s.outcome.scaling.values() for s in step_through(session, STEPS) if s.outcome.scaling is not None]
    averages = session.ema.parts() if session.ema is not None else []
    parts = parts_of(session) | {entry.name: (entry.shape, entry.box, part.clone()) for entry, part in averages}
    units = [unit for unit in session.spread.modules[""].modules() if isinstance(unit, FSDPModule)]
    groups = [unit._get_fsdp_state()._fsdp_param_group for unit in units]
    waits = [own.offload_to_cpu for group in groups if group is not None for own in group.fsdp_params]
    return parts, told, waits


@pytest.mark.sample(3)
@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16"])
def test_it_is_the_same_run_to_the_bit(pool: Pools, precision: str) -> None:
    """With clipping, an average and, in float16, a scaler."""
    plain, offloaded = (pool(2).run(train, f"fsdp{offload}", precision) for offload in ("", ",offload=parameters"))
    for (parts, told, kept), (others, also, waits) in zip(plain, offloaded, strict=True):
        assert told == also and bool(told) == (precision == "float16")
        assert parts.keys() == others.keys() and any(name.startswith("ema.") for name in parts)
        assert all(torch.equal(part, others[name][2]) for name, (_, _, part) in parts.items())
        assert len(waits) > 10 and all(waits) and not any(kept)


def save(directory: Path, layout: str) -> Parts:
    with cpu_as_accelerator():
        session, contents = contents_of(Tiny(kind="transformer"), config_of(layout, *LARGE), 2)
    saver_of(session, contents, directory).save(2)
    list(step_through(session, 1))
    return parts_of(session)


def go_on(directory: Path, layout: str) -> Parts:
    with cpu_as_accelerator():
        session, contents = contents_of(Tiny(kind="transformer"), config_of(layout, *LARGE), 0)
    contents.load(find(directory, session))
    list(step_through(session, 1))
    return parts_of(session)


@pytest.mark.full
def test_a_checkpoint_goes_both_ways(pool: Pools, tmp_path: Path) -> None:
    """Resumed in the same layout to the bit, with offload or without, and in others as law 4 says."""
    offloaded = "fsdp,offload=parameters"
    for index, (one, other) in enumerate([(offloaded, offloaded), (offloaded, "fsdp"), ("fsdp", offloaded)]):
        saved = pool(2).run(save, tmp_path / str(index), one)
        for whole, resumed in zip(saved, pool(2).run(go_on, tmp_path / str(index), other), strict=True):
            assert len(whole) > 60
            assert all(torch.equal(part, resumed[name][2]) for name, (_, _, part) in whole.items())
    alone = together(pool(1).run(go_on, tmp_path / "0", "single"))
    for name, value in together(saved).items():
        assert torch.allclose(alone[name], value, rtol=1e-9, atol=1e-13), name
