"""Compiled blocks: the same numbers up to rounding, one graph for equal blocks, nothing else changed."""

import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from allranks.errors import LayoutError
from allranks.models.transformer import Attention, FeedForward, Transformer
from allranks.models.transformer import Block as TransformerBlock
from allranks.parallel import compiled
from allranks.parallel.compiled import compile_forward, uncompiled
from allranks.verifying.parity import record_run
from tests.distributed.pool import Pools
from tests.distributed.sessions import SGD, config_of, processes_of
from tests.distributed.tasks import MODELS, CountingTask, StarvedTask, Tiny

pytestmark = pytest.mark.distributed

# Makes graphs and cuts them as the usual backend does, but runs torch's own kernels: no C++ compiler has to work.
QUICK = "aot_eager_decomp_partition"


def quickly(function: Callable[..., Any], *args: Any, backend: str = QUICK) -> Any:
    """`function` in a worker, where torch may warn while it compiles, and compiled code is forgotten afterwards."""
    import torch._dynamo

    with warnings.catch_warnings(), patch.object(compiled, "BACKEND", backend):
        warnings.simplefilter("ignore")
        torch._dynamo.reset()
        try:
            return function(*args)
        finally:
            torch._dynamo.reset()


def count_graphs(numbers: Sequence[int]) -> int:
    """How often blocks that differ in a number are compiled."""
    from torch._dynamo.utils import counters

    class Numbered(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.linear, self.number = nn.Linear(4, 4), number

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.linear(x) * self.number
            return found

    counters.clear()
    blocks = [Numbered(number) for number in numbers]
    for block in blocks:
        block.forward = compile_forward("it", block.forward)  # type: ignore[method-assign]
    x = torch.ones(2, 4, requires_grad=True)
    for block in blocks:
        x = block(x)
    x.sum().backward()
    return int(counters["stats"]["unique_graphs"])


@pytest.mark.full
def test_equal_blocks_share_a_graph_and_many_different_ones_are_all_compiled(pool: Pools) -> None:
    assert pool(1).run(quickly, count_graphs, [1] * 6) == [1]
    assert pool(1).run(quickly, count_graphs, list(range(12))) == [12], "torch gives up after 8"


def kept_bytes(budget: bool) -> tuple[int, list[torch.Tensor]]:
    torch.manual_seed(0)
    block = TransformerBlock(64, Attention(64, 4, 4, 32), FeedForward(64, 192)).double()
    block.forward = compile_forward("it", block.forward, budget=budget)  # type: ignore[method-assign]
    x = torch.randn(2, 32, 64, dtype=torch.float64)
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = block(x)
    output.square().sum().backward()
    return sum(kept.values()), [p.grad for p in block.parameters() if p.grad is not None]


def test_a_budget_keeps_fewer_bytes(pool: Pools) -> None:
    ((most, expected),) = pool(1).run(quickly, kept_bytes, False)
    ((fewer, found),) = pool(1).run(quickly, kept_bytes, True)
    assert fewer < most
    assert len(found) == len(expected) > 0
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-13) for a, b in zip(found, expected, strict=True))


class Deep(Tiny):
    """Blocks for two stages a process."""

    def model(self) -> nn.Module:
        return Transformer(11, 4, 48, 24, ffn=12, max_seq=6, num_kv_heads=12)


def record(kind: str, layout: str) -> Any:
    # A pipeline's micro-steps are of one shape, and as many as its stages at least.
    batch, parts = (8, 4) if "pp" in layout else (5, 2)
    config = config_of(layout, f"train.global_batch={batch}", f"train.micro_steps={parts}", *SGD, steps=2)
    tasks = {"counting": CountingTask(), "deep": Deep(kind="transformer"), "starved": StarvedTask(kind="moe")}
    task = tasks.get(kind) or Tiny(kind=kind)
    try:
        return record_run(task, config, processes_of(config), 2)
    except LayoutError as error:
        return str(error)


def check(pool: Pools, kind: str, layout: str, modes: str, backend: str) -> None:
    expected = pool(2).run(quickly, record, kind, layout, timeout=300)
    found = pool(2).run(lambda: quickly(record, kind, f"{layout},{modes}", backend=backend), timeout=300)
    for steps, others in zip(expected, found, strict=True):
        for one, other in zip(steps, others, strict=True):
            assert one.loss == pytest.approx(other.loss, rel=1e-12)
            for name, (*_, part) in one.gradients.items():
                assert torch.allclose(part, other.gradients[name][-1], rtol=1e-12, atol=1e-13), name


MODES = ("compile=block", "compile=block,recompute=full", "compile=block,recompute=budget")
QUICK_CASES = [
    ("counting", "ddp", "compile=block"),
    ("counting", "fsdp", "compile=block,recompute=full"),
    ("encoder", "tp=2", "compile=block"),
    # A budget may keep a counter that is counted up before the backward, and torch then refuses the backward.
    ("sharing", "ddp", "compile=block,recompute=budget"),
    ("sharing", "fsdp", "compile=block,recompute=selective"),
]


@pytest.mark.sample(5)
@pytest.mark.parametrize(("kind", "layout", "modes"), QUICK_CASES)
def test_compiled_blocks_compute_the_same(pool: Pools, kind: str, layout: str, modes: str) -> None:
    check(pool, kind, layout, modes, QUICK)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
@pytest.mark.parametrize("modes", [*MODES, "compile=block,recompute=selective"])
@pytest.mark.parametrize("kind", ["sharing", "tied"])
def test_the_usual_backend_computes_the_same(pool: Pools, kind: str, modes: str, layout: str) -> None:
    check(pool, kind, layout, modes, "inductor")


@pytest.mark.full
@pytest.mark.timeout(600)  # many small graphs, each through the C++ compiler
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("transformer", "tp=2"),
        ("transformer", "cp=2"),
        ("transformer", "pp=2"),
        ("deep", "pp=2,schedule=interleaved"),
        ("moe", "dp_replicate=2,ep=2"),
        ("starved", "dp_replicate=2,ep=2"),
    ],
)
def test_the_usual_backend_computes_the_same_of_cut_models(pool: Pools, kind: str, layout: str) -> None:
    check(pool, kind, layout, "compile=block", "inductor")


@pytest.mark.full
@pytest.mark.parametrize("recompute", ["full", "budget"])
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("transformer", "tp=2"),
        ("transformer", "cp=2"),
        ("transformer", "pp=2"),
        ("deep", "pp=2,schedule=interleaved"),
        ("moe", "dp_replicate=2,ep=2"),
    ],
)
def test_cut_blocks_are_compiled_and_recomputed(pool: Pools, kind: str, layout: str, recompute: str) -> None:
    check(pool, kind, layout, f"compile=block,recompute={recompute}", QUICK)


def test_counters_inside_of_a_selective_graph_are_refused(pool: Pools) -> None:
    """torch would count twice."""
    (found,) = pool(1).run(quickly, record, "counting", "single,compile=block,recompute=selective")
    assert isinstance(found, str)
    assert found.startswith("block blocks.0 cannot be compiled in one piece (")
    assert found.endswith("), as recompute=selective with compile=block needs it: recompute=full or budget")


def run_uncompiled() -> tuple[int, int]:
    from torch._dynamo.utils import counters

    module = MODELS["mlp"]()
    module.forward = compile_forward("it", module.forward)
    x = torch.ones(2, 5)
    counters.clear()
    with uncompiled():
        module(x)
    before = int(counters["stats"]["unique_graphs"])
    module(x)
    return before, int(counters["stats"]["unique_graphs"])


def test_checks_at_the_start_compile_nothing(pool: Pools) -> None:
    assert pool(1).run(quickly, run_uncompiled) == [(0, 1)]


def test_the_compiler_is_not_loaded_for_what_nobody_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    assert isinstance(uncompiled(), nullcontext)
