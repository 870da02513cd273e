"""A recomputed block: the same gradients to the bit, fewer bytes kept, nothing done twice."""

import copy
import gc
import importlib
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import set_checkpoint_early_stop

from allranks.errors import LayoutError
from allranks.models.transformer import Attention, Block, FeedForward
from allranks.parallel.recompute import recompute, selective, watch_again

POLICIES: dict[str, tuple[Any, ...]] = {"full": (), "selective": (selective,)}


class Operations(TorchDispatchMode):
    """Names of the operations that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def apply(modules: Sequence[nn.Module], policy: str) -> None:
    for index, module in enumerate(modules):
        forward: Any = module.forward
        module.forward = recompute(f"layers.{index}", module, forward, *POLICIES[policy])


def saved_bytes(run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, int]:
    """What `run` returns, and the bytes that its autograd graph keeps, and a policy beside it."""
    kept: dict[tuple[int, int], int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.data_ptr(), tensor.nbytes] = tensor.nbytes
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = run()
    wrapped = [found.val for found in gc.get_objects() if type(found) is torch.utils.checkpoint._VersionWrapper]
    for tensor in wrapped:
        if isinstance(tensor, torch.Tensor):
            pack(tensor)
    return output, sum(kept.values())


class Stateful(nn.Module):
    """Dropout, a buffer that it reads after counting in it, and a scale that comes by name."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.dropout = nn.Dropout(0.5)
        self.calls = 0
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor, seen: list[str]) -> torch.Tensor:
        if self.training:
            self.count += 1
            self.calls += 1
        seen.append("here")
        hidden = self.dropout(torch.tanh(self.up(x)))
        # A sum of its own: what is counted up later must not be what the backward needs.
        found: torch.Tensor = x + self.dropout(self.down(hidden)) * scale * (self.count + 0)
        return found


def stateful() -> nn.ModuleList:
    torch.manual_seed(0)
    modules = nn.ModuleList(Stateful() for _ in range(3)).double()
    modules[1].requires_grad_(False)
    modules[2].up = modules[0].up
    return modules


def step(modules: Any, num_forwards: int = 2) -> tuple[Any, int]:
    """(gradients and what is left in the modules, bytes kept) of so many forwards and then their backward."""
    scale = torch.full((), 0.5, dtype=torch.float64, requires_grad=True)
    seen: list[str] = []

    def run() -> torch.Tensor:
        torch.manual_seed(1)
        total = torch.zeros(())
        for index in range(num_forwards):
            x = torch.randn(4, 8, dtype=torch.float64)
            for module in modules:
                x = module(x, scale=scale, seen=seen)
            total = total + (index + 1) * x.square().sum()
        return total

    loss, kept = saved_bytes(run)
    after = torch.rand(1)  # the backward shall not move the generator
    torch.manual_seed(2)
    loss.backward()
    drawn = torch.rand(1)
    gradients = {name: p.grad for name, p in modules.named_parameters()}
    left = [(module.calls, int(module.count)) for module in modules]
    return (loss.detach(), gradients, scale.grad, left, len(seen), after, drawn), kept


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_masks_counters_and_generators_are_the_same_to_the_bit(policy: str) -> None:
    """Also with a frozen block, a shared layer, arguments by name and two forwards before the backward."""
    expected, kept = step(stateful())
    modules = stateful()
    names = [name for name, _ in modules.named_parameters()]
    apply(list(modules), policy)
    assert [name for name, _ in modules.named_parameters()] == names
    found, fewer = step(modules)
    assert same(found, expected)
    assert expected[3] == [(2, 2)] * 3
    assert fewer < kept


def test_autocast_is_kept() -> None:
    def gradients(policy: str | None) -> list[Any]:
        torch.manual_seed(0)
        block = Block(16, Attention(16, 2, 2, 8), FeedForward(16, 48))
        if policy is not None:
            apply([block], policy)
        with torch.autocast("cpu", torch.bfloat16):
            output = block(torch.randn(2, 8, 16))
        output.float().square().sum().backward()
        return [p.grad for p in block.parameters()]

    for policy in POLICIES:
        assert same(gradients(policy), gradients(None))


def transformer_block() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Block(64, Attention(64, 4, 4, 32), FeedForward(64, 192)).double(), torch.randn(
        2, 32, 64, dtype=torch.float64, requires_grad=True
    )


def kept_by(policy: str | None) -> int:
    block, x = transformer_block()
    if policy is not None:
        apply([block], policy)
    block(x)  # what only the first forward makes
    return saved_bytes(lambda: block(x))[1]


def test_a_block_keeps_its_input_and_what_the_policy_says() -> None:
    _, x = transformer_block()
    assert kept_by("full") == x.nbytes
    # Queries and values; attention with a number for each row and head; the gate; the last product.
    per_row_and_head = x.nbytes // 64 * 4
    assert kept_by("selective") == x.nbytes * (1 + 2 + 1 + 3 + 1) + per_row_and_head
    assert kept_by(None) > 20 * x.nbytes


def backward_operations(policy: str | None) -> list[str]:
    block, x = transformer_block()
    if policy is not None:
        apply([block], policy)
    output = block(x)
    with Operations() as operations:
        output.sum().backward()
    names: list[str] = operations.names
    return names


ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


def test_selective_computes_every_second_product_again_and_no_attention() -> None:
    """The last product, which ends the block, is not needed for its backward."""
    plain, full, some = (backward_operations(policy) for policy in (None, "full", "selective"))
    products = {name: names.count("mm") for name, names in (("none", plain), ("full", full), ("selective", some))}
    assert products["full"] - products["none"] == 6
    assert products["selective"] - products["none"] == 3
    assert [names.count(ATTENTION) for names in (plain, full, some)] == [0, 1, 0]
    assert len(some) < len(full)


class Attending(nn.Module):
    """Attention with dropout, and a dropout after it that must find the generator where the first run had it."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
        found: torch.Tensor = self.dropout(mixed) * self.dropout(x)
        return found


@pytest.mark.parametrize("policy", POLICIES)
def test_dropout_inside_of_attention(policy: str) -> None:
    found = []
    for applied in (False, True):
        block = Attending()
        if applied:
            apply([block], policy)
        torch.manual_seed(3)
        x = torch.randn(1, 2, 8, 4, dtype=torch.float64, requires_grad=True)
        block(x).square().sum().backward()
        found.append(x.grad)
    assert same(*found)


def test_an_attention_kernel_that_drops_is_not_kept() -> None:
    """CUDA's kernels draw in one operation; here asked of the policy alone."""
    first, _ = selective()
    policy = first.policy_fn  # type: ignore[attr-defined]
    q = torch.zeros(1)
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention.default

    class Context:
        is_recompute = False

    assert policy(Context(), flash, q, q, q, 0.0, True).name == "MUST_SAVE"
    assert policy(Context(), flash, q, q, q, 0.1, True).name == "PREFER_RECOMPUTE"
    assert policy(Context(), efficient, q, q, q, None, True, is_causal=True).name == "MUST_SAVE"
    assert policy(Context(), efficient, q, q, q, None, True, 0.1).name == "PREFER_RECOMPUTE"
    assert policy(Context(), torch.ops.aten.tanh.default, q).name == "PREFER_RECOMPUTE"


class Skipping(nn.Module):
    """Scaled by numbers from the plain generators, and left out at times."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if random.random() < 0.3:
            return x
        hidden = torch.tanh(self.linear(x)) * random.gauss(1, 1)
        if np.random.random() < 0.3:
            return x + hidden
        found: torch.Tensor = x + torch.tanh(self.linear(hidden)) * float(np.random.standard_normal())
        return found


@pytest.mark.parametrize("policy", POLICIES)
def test_numbers_of_python_and_numpy_are_drawn_again(policy: str) -> None:
    """As stochastic depth draws them; the backward moves neither generator."""
    found = []
    for applied in (False, True):
        torch.manual_seed(0)
        blocks = nn.Sequential(*(Skipping() for _ in range(6))).double()
        if applied:
            apply(list(blocks), policy)
        random.seed(5)
        np.random.seed(5)
        losses = [blocks(torch.full((2, 4), 0.5, dtype=torch.float64)).square().sum() for _ in range(4)]
        after = [random.random(), np.random.standard_normal()]
        random.seed(6)
        np.random.seed(6)
        torch.stack(losses).sum().backward()
        drawn = [random.random(), np.random.standard_normal()]
        found.append((losses, [p.grad for p in blocks.parameters()], after, drawn))
    assert same(*found)


class Once(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.forwards = 0
        self.runs: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs.append(len(self.runs))
        found: torch.Tensor = torch.tanh(self.linear(x))
        return found


def test_nothing_is_computed_again_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    block = Once()
    apply([block], "full")
    with torch.no_grad(), monkeypatch.context() as patched:
        patched.setattr("allranks.parallel.recompute.ModuleState", None)  # nothing is noted for a second run either
        block(torch.ones(2, 4))
    assert len(block.runs) == 1
    block(torch.ones(2, 4)).sum().backward()
    assert len(block.runs) == 3, "a forward and its second run"


@pytest.mark.parametrize("policy", POLICIES)
def test_two_backwards_through_one_graph(policy: str) -> None:
    """As a loop of one's own runs them, where DDP's buckets find their final order."""
    torch.manual_seed(0)
    block = nn.Sequential(Once(), Once(), Once())
    plain = copy.deepcopy(block)
    apply([block], policy)
    found: list[Any] = []
    for module in (plain, block):
        x = torch.ones(2, 4, requires_grad=True)
        output = module(x).square().sum()
        for last in (False, False, True):
            x.grad = None
            output.backward(retain_graph=not last)
            found.append(x.grad)
    assert all(same(one, found[0]) for one in found)


def test_every_backward_counts_products_from_the_first_on() -> None:
    """torch 2.11 asks in the second run, too: after an odd number of products it would take others for kept."""
    first, again = selective()
    policy = first.policy_fn  # type: ignore[attr-defined]

    class Context:
        def __init__(self, is_recompute: bool) -> None:
            self.is_recompute = is_recompute

    def kept(is_recompute: bool) -> list[bool]:
        product = torch.ops.aten.mm.default
        return [policy(Context(is_recompute), product).name == "MUST_SAVE" for _ in range(3)]

    assert kept(False) == [True, False, True]
    for _ in range(2):
        with again:
            assert kept(True) == [True, False, True]


def test_hooks_run_once() -> None:
    """FSDP's and the notes of which unit was entered hang on the module: a second run does not enter it."""
    block, entered = Once(), []
    block.register_forward_pre_hook(lambda *_: entered.append("in"))
    block.register_forward_hook(lambda *_: entered.append("out"))
    apply([block], "full")
    block(torch.ones(2, 4)).sum().backward()
    assert entered == ["in", "out"]


def test_a_copy_of_the_module_computes_with_its_own_parameters() -> None:
    block = Once()
    apply([block], "full")
    twin = copy.deepcopy(block)
    with torch.no_grad():
        twin.linear.weight.zero_()
        twin.linear.bias.zero_()
    assert not twin(torch.ones(2, 4)).any()
    twin(torch.ones(2, 4)).sum().backward()
    assert twin.linear.weight.grad is not None and block.linear.weight.grad is None


def refusal(block: nn.Module, policy: str) -> str:
    apply([block], policy)
    with pytest.raises(LayoutError) as raised:
        block(torch.randn(2, 4, requires_grad=True) * 1).sum().backward()
    return str(raised.value)


def test_a_block_that_writes_over_its_input_is_refused() -> None:
    block = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))
    assert refusal(block, "full") == (
        "block layers.0 changes its input in place, so that its activations cannot be computed again: use "
        "inplace=False there, or recompute=none"
    )


def test_a_block_that_writes_over_what_is_kept_is_refused() -> None:
    block = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))
    assert refusal(copy.deepcopy(block), "selective") == (
        "block layers.0 changes in place what recompute=selective keeps: use inplace=False there, or recompute=full"
    )
    apply([block], "full")
    block(torch.ones(2, 4)).sum().backward()


class Caching(nn.Module):
    """Computes with what a cache of the caller's has, once it is there, as a decoder's cross-attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.out = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, cache: list[torch.Tensor]) -> torch.Tensor:
        if not cache:
            cache.append(self.keys(x))
        found: torch.Tensor = self.out(x) * cache[0]
        return found


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Caching()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.block(x, Cache())
        return found


class Cache(list[torch.Tensor]):
    """No container to torch, and so what is in it is not put back."""


@pytest.mark.parametrize("policy", POLICIES)
def test_a_block_that_computes_less_the_second_time_is_refused(policy: str) -> None:
    decoder = Decoder()
    apply([decoder.block], policy)
    for early_stop in (True, False):
        with pytest.raises(LayoutError) as raised, set_checkpoint_early_stop(early_stop):
            decoder(torch.ones(2, 4)).sum().backward()
        assert str(raised.value) == (
            "block layers.0 saves fewer tensors in its second run than in its first: something outside of it has "
            "changed in between (a cache of keys and values: use_cache=False in training), so that its activations "
            "cannot be computed again; leave that out, or use recompute=none"
        )


@pytest.mark.parametrize("policy", POLICIES)
def test_a_second_run_ends_early_whatever_is_set_around_it(policy: str) -> None:
    block = Once()
    apply([block], policy)
    with set_checkpoint_early_stop(False):
        block(torch.ones(2, 4)).sum().backward()
    assert block.linear.weight.grad is not None


def test_generators_of_all_devices_of_a_block_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch finds the devices among the arguments; the meta device stands for a second one."""

    class Parted(nn.Module):
        def __init__(self, there: str) -> None:
            super().__init__()
            self.here, self.there = nn.Linear(2, 2), nn.Linear(2, 2, device=there)

        def forward(self, x: torch.Tensor, *, scale: float) -> Any:
            return self.here(x) * scale

    seen: list[tuple[str, ...]] = []
    module: Any = importlib.import_module("allranks.parallel.recompute")
    real = module.checkpoint

    def watched(run: Any, *leaves: Any, **named: Any) -> Any:
        seen.append(tuple(leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)))
        return real(run, *leaves, **named)

    monkeypatch.setattr(module, "checkpoint", watched)
    for there in ("cpu", "meta"):
        block = Parted(there)
        x = torch.ones(3, 2, requires_grad=True)
        recompute("block", block, block.forward)(x, scale=2.0).sum().backward()
        assert x.grad is not None and torch.equal(x.grad[0], 2 * block.here.weight.sum(0))
    assert seen == [("cpu",), ("cpu", "cpu", "meta")]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_second_run_alone_is_watched_also_under_another_forward(policy: str) -> None:
    """Around it, with what ends it early; another forward around the block's is what offloading puts there."""
    told: list[str] = []
    block = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    block[0].register_forward_pre_hook(lambda *_: told.append("runs"))
    apply([block], policy)
    inner: Any = block.forward

    @wraps(inner)
    def outer(*args: Any) -> Any:
        return inner(*args)

    block.forward = outer  # type: ignore[method-assign]

    @contextmanager
    def around() -> Iterator[None]:
        told.append("begins")
        try:
            yield
        finally:
            told.append("ends")

    leave = watch_again(block, around)
    for _ in range(2):
        block(torch.ones(1, 2, requires_grad=True)).sum().backward()
        leave()
    assert told == ["runs", "begins", "runs", "ends", "runs", "runs"]
    watch_again(nn.Linear(2, 2), around)()  # of a block that keeps its activations nothing is told
