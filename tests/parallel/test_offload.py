"""What blocks save waits elsewhere and comes back one block ahead; here from the CPU's memory to the CPU's."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from allranks.models.transformer import Attention, Block, FeedForward
from allranks.parallel import offload as offloading
from allranks.parallel.offload import SMALLEST_BYTES, Offloader
from allranks.parallel.recompute import recompute

CPU = torch.device("cpu")


class Journey:
    """Every tensor that was moved, in order: ("out" or "back", number of the tensor)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.moves: list[tuple[str, int]] = []
        self.bytes = 0
        self.waiting: list[weakref.ref[Any]] = []
        waiting_class = offloading._Waiting
        start, fetch = waiting_class.__init__, waiting_class.fetch

        def noted_start(waiting: Any, block: Any, tensor: torch.Tensor, stream: Any) -> None:
            start(waiting, block, tensor, stream)
            waiting.number = len(self.waiting)
            self.waiting.append(weakref.ref(waiting))
            self.moves.append(("out", waiting.number))
            self.bytes += tensor.nbytes

        def noted_fetch(waiting: Any) -> None:
            if waiting._back is None:
                self.moves.append(("back", waiting.number))
            fetch(waiting)

        monkeypatch.setattr(waiting_class, "__init__", noted_start)
        monkeypatch.setattr(waiting_class, "fetch", noted_fetch)

    def alive(self) -> int:
        gc.collect()
        return sum(reference() is not None for reference in self.waiting)


@pytest.fixture
def journey(monkeypatch: pytest.MonkeyPatch) -> Journey:
    return Journey(monkeypatch)


def apply(modules: Any, smallest_bytes: int = 0, *, again: bool = False) -> Offloader:
    offloader = Offloader(CPU, smallest_bytes)
    for index, module in enumerate(modules):
        forward = recompute(str(index), module, module.forward) if again else module.forward
        module.forward = offloader.offload(module, forward)
    return offloader


def blocks(count: int = 3) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Block(16, Attention(16, 2, 2, 8), FeedForward(16, 48)) for _ in range(count)).double()


def run(modules: Any) -> torch.Tensor:
    x = torch.linspace(0, 1, 256, dtype=torch.float64).view(2, 8, 16)
    for module in modules:
        x = module(x)
    return x.square().sum()


def gradients(modules: Any) -> list[Any]:
    run(modules).backward()
    return [parameter.grad for parameter in modules.parameters()]


@pytest.mark.parametrize("again", [False, True])
def test_gradients_are_the_same_to_the_bit(journey: Journey, again: bool) -> None:
    expected = gradients(blocks())
    modules = blocks()
    apply(modules, again=again)
    assert all(torch.equal(a, b) for a, b in zip(gradients(modules), expected, strict=True))
    assert journey.bytes > 0


def test_of_a_recomputed_block_the_input_alone_is_moved(journey: Journey) -> None:
    modules = blocks()
    modules[0].requires_grad_(True)
    apply(modules, again=True)
    run(modules)
    assert journey.bytes == 3 * 256 * 8


class Squares(nn.Module):
    """Saves its input, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x**2 + self.gain


def test_tensors_come_back_one_block_ahead_of_the_backward(journey: Journey) -> None:
    modules = nn.ModuleList(Squares() for _ in range(4))
    apply(modules)
    order: list[Any] = []
    x = torch.linspace(0.1, 0.5, 6, requires_grad=True)
    output = x
    for index, module in enumerate(modules):
        output = module(output)
        output.register_hook(lambda _, index=index: order.append((index, journey.moves[4:])))
    output.sum().backward()
    assert journey.moves[:4] == [("out", index) for index in range(4)]
    # What had come back when the backward of each block began: its own, and for the others one more each time.
    assert order == [
        (3, []),
        (2, [("back", 3), ("back", 2)]),
        (1, [("back", 3), ("back", 2), ("back", 1)]),
        (0, [("back", 3), ("back", 2), ("back", 1), ("back", 0)]),
    ]


def test_two_backwards_through_one_graph(journey: Journey) -> None:
    modules = blocks()
    apply(modules)
    loss = run(modules)
    loss.backward(retain_graph=True)
    first = [p.grad.clone() for p in modules.parameters() if p.grad is not None]
    modules.zero_grad()
    loss.backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(first, modules.parameters(), strict=True))  # type: ignore[arg-type]


def test_a_graph_that_nobody_holds_leaves_nothing_waiting(journey: Journey) -> None:
    modules = blocks()
    offloader = apply(modules)
    loss = run(modules)
    assert journey.alive() == len(journey.waiting) > 0
    del loss
    assert journey.alive() == 0
    assert offloader.newest is not None and offloader.newest() is None
    gradients(modules)
    assert journey.alive() == 0


def test_a_graph_without_a_backward_goes_with_what_stays(journey: Journey) -> None:
    """What stays may be an operator's output, which knows its node, which would know it."""
    modules = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4), nn.Softmax(-1)) for _ in range(1))
    apply(modules, 64 * 64)
    loss = modules[0](torch.rand(16, 64, requires_grad=True)).sum()
    assert journey.alive() > 0
    del loss
    assert journey.alive() == 0


def test_what_stays(journey: Journey) -> None:
    """Parameters and views of them, what is small or expanded, and all of a forward without gradients."""
    linear = nn.Linear(64, 64, bias=False)
    apply([linear], 64 * 64 * 4)
    x = torch.ones(2, 64, requires_grad=True)
    (linear(x) @ linear.weight.t()).sum().backward()
    assert journey.moves == []
    apply([linear := nn.Linear(64, 64)])
    with torch.no_grad():
        linear(x)
    assert journey.moves == []
    apply([squares := Squares()])
    squares(torch.ones((), requires_grad=True).expand(512)).sum().backward()
    assert journey.moves == []
    squares(torch.ones(512, requires_grad=True)).sum().backward()
    assert journey.moves == [("out", 0), ("back", 0)]
    assert SMALLEST_BYTES == 1024 * 1024


def test_what_stays_must_not_be_written_to(journey: Journey) -> None:
    apply([squares := Squares()], 10**9)
    x = torch.ones(4, requires_grad=True) * 1
    output = squares(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@pytest.mark.parametrize("order", [torch.channels_last, torch.contiguous_format])
def test_the_order_in_memory_is_kept(order: torch.memory_format) -> None:
    tensor = torch.rand(2, 3, 4, 5).contiguous(memory_format=order)
    block = offloading._Block(Offloader(CPU, 0), set())
    packed = block.pack(tensor)
    assert isinstance(packed, offloading._Waiting)
    back = offloading._unpack(packed)
    assert torch.equal(back, tensor) and back.stride() == tensor.stride() and back.data_ptr() != tensor.data_ptr()


@pytest.mark.gpu
def test_on_a_gpu_the_copies_are_asynchronous_and_exact() -> None:
    device = torch.device("cuda")
    found = []
    for offloaded in (False, True):
        torch.manual_seed(0)
        modules = nn.ModuleList(Block(256, Attention(256, 4, 4, 256), FeedForward(256, 768)) for _ in range(4)).to(
            device
        )
        if offloaded:
            offloader = Offloader(device, 0)
            for module in modules:
                module.forward = offloader.offload(module, module.forward)
        torch.cuda.reset_peak_memory_stats()
        x = torch.randn(16, 256, 256, device=device)
        for module in modules:
            x = module(x)
        held = torch.cuda.memory_allocated()
        x.square().sum().backward()
        found.append((held, [parameter.grad for parameter in modules.parameters()]))
    assert found[1][0] < found[0][0]
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))  # type: ignore[arg-type]
