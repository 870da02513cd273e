"""Cross-entropy in chunks is cross-entropy, with a bounded number of logits at a time."""

import importlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from allranks.losses import ChunkedHead, chunked_cross_entropy

VOCABULARY, CHANNELS = 37, 8


@pytest.fixture(scope="module", autouse=True)
def dynamo() -> None:
    """A mode imports it, which sets an environment variable: do so first."""
    importlib.import_module("torch._dynamo")


def operands(
    *shape: int, bias: bool = False, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Hidden values that reach far, so that an unsafe exponential would overflow; every fifth target is ignored."""
    generator = torch.Generator().manual_seed(0)
    hidden = (torch.randn(*shape, CHANNELS, generator=generator, dtype=torch.float64) * 30).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, CHANNELS, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    added = (
        torch.randn(VOCABULARY, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() if bias else None
    )
    targets = torch.randint(VOCABULARY, shape, generator=generator)
    targets.view(-1)[::5] = -100
    return hidden, weight, added, targets


def close(found: torch.Tensor | None, expected: torch.Tensor | None, relative: float = 1e-12) -> bool:
    assert found is not None and expected is not None
    return bool((found - expected).abs().max() <= relative * expected.abs().max())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 12, 1000])
@pytest.mark.parametrize("shape", [(12,), (3, 4)])
def test_it_is_cross_entropy(shape: tuple[int, ...], chunk: int, bias: bool) -> None:
    ours, theirs = operands(*shape, bias=bias), operands(*shape, bias=bias)
    found = chunked_cross_entropy(*ours[:2], ours[3], bias=ours[2], chunk=chunk, reduction="none")
    logits = functional.linear(theirs[0], theirs[1], theirs[2]).reshape(-1, VOCABULARY)
    expected = functional.cross_entropy(logits, theirs[3].reshape(-1), reduction="none").view(shape)
    assert close(found, expected) and found.shape == shape
    weights = torch.linspace(-1, 2, expected.numel(), dtype=torch.float64).view(shape)
    for losses in (found, expected):
        (losses * weights).sum().backward()
    for own, other in zip(ours[:3], theirs[:3], strict=True):
        assert own is None or other is None or close(own.grad, other.grad)


def test_the_sum_and_what_needs_no_gradient() -> None:
    hidden, weight, _, targets = operands(9)
    none = chunked_cross_entropy(hidden, weight, targets, chunk=4, reduction="none")
    assert torch.equal(chunked_cross_entropy(hidden, weight, targets, chunk=4), none.sum())
    assert (none[targets == -100] == 0).all() and (none[targets != -100] > 0).all()
    chunked_cross_entropy(hidden, weight.detach(), targets, chunk=4).backward()
    assert hidden.grad is not None and weight.grad is None
    assert chunked_cross_entropy(hidden[:0], weight, targets[:0]).item() == 0.0
    ignored = chunked_cross_entropy(hidden, weight, torch.zeros_like(targets), ignore_index=0)
    assert ignored.item() == 0.0


def test_what_autocast_lowers_comes_back_in_float32() -> None:
    ours, theirs = (operands(12, dtype=torch.float32) for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16):
        found = chunked_cross_entropy(ours[0], ours[1], ours[3], chunk=5)
        expected = functional.cross_entropy(functional.linear(*theirs[:2]).float(), theirs[3], reduction="sum")
    assert found.dtype is torch.float32 and close(found, expected, 1e-5)
    found.backward()
    expected.backward()
    assert ours[1].grad is not None and ours[1].grad.dtype is torch.float32
    assert close(ours[0].grad, theirs[0].grad, 2e-2) and close(ours[1].grad, theirs[1].grad, 2e-2)


class Largest(TorchDispatchMode):
    """Notes the most elements that any result has."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for value in found if isinstance(found, tuple) else (found,):
            self.elements = max(self.elements, value.numel() if isinstance(value, torch.Tensor) else 0)
        return found


def test_no_more_logits_than_a_chunk_ever_exist() -> None:
    hidden, weight, _, targets = operands(400)
    with Largest() as largest:  # type: ignore[no-untyped-call]
        chunked_cross_entropy(hidden, weight, targets, chunk=50).backward()
    assert largest.elements == max(50 * VOCABULARY, 400 * CHANNELS) < 400 * VOCABULARY


def test_a_head_gives_logits_or_losses() -> None:
    torch.manual_seed(0)
    head, plain = ChunkedHead(CHANNELS, VOCABULARY, chunk=3), nn.Linear(CHANNELS, VOCABULARY, bias=False)
    plain.load_state_dict(head.state_dict())
    hidden, _, _, targets = operands(2, 5, dtype=torch.float32)
    assert torch.equal(head(hidden), plain(hidden))
    expected = functional.cross_entropy(plain(hidden).flatten(0, 1), targets.flatten(), reduction="none").view(2, 5)
    assert torch.allclose(head(hidden, targets), expected, rtol=1e-5, atol=1e-5)


def test_it_can_be_differentiated_once() -> None:
    hidden, weight, _, targets = operands(4)
    with pytest.raises(RuntimeError, match="can be differentiated once: use cross_entropy on whole logits"):
        torch.autograd.grad(chunked_cross_entropy(hidden, weight, targets), hidden, create_graph=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"targets": torch.zeros(3, dtype=torch.int64)}, r"hidden \[4, 8\], weight \[37, 8\], targets \[3\]: expected"),
        ({"weight": torch.ones(37, 9, dtype=torch.float64)}, r"weight \[37, 9\]"),
        ({"chunk": 0}, "chunk=0: expected at least 1 position"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    hidden, weight, _, targets = operands(4)
    with pytest.raises(ValueError, match=message):
        chunked_cross_entropy(**{"hidden": hidden, "weight": weight, "targets": targets, **change})
