"""Products in pieces: in both passes, of low precisions alone, with another rounding and nothing else."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from allranks.verifying.pieces import Pieces


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(dtype)


PRODUCTS: dict[str, Callable[[torch.dtype], torch.Tensor]] = {
    "mm": lambda dtype: numbers(3, 64, dtype=dtype) @ numbers(64, 2, dtype=dtype),
    "bmm": lambda dtype: torch.bmm(numbers(2, 3, 64, dtype=dtype), numbers(2, 64, 5, dtype=dtype)),
    "mv": lambda dtype: numbers(7, 64, dtype=dtype) @ numbers(64, dtype=dtype),
    "addmm": lambda dtype: torch.addmm(
        numbers(2, dtype=dtype), numbers(3, 64, dtype=dtype), numbers(64, 2, dtype=dtype)
    ),
    "baddbmm": lambda dtype: torch.baddbmm(
        numbers(2, 3, 5, dtype=dtype), numbers(2, 3, 64, dtype=dtype), numbers(2, 64, 5, dtype=dtype)
    ),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
def test_only_the_rounding_is_another(product: Callable[[torch.dtype], torch.Tensor], dtype: torch.dtype) -> None:
    plain = product(dtype)
    with Pieces(3) as pieces:
        cut = product(dtype)
    with Pieces(1) as whole:
        assert torch.equal(product(dtype), plain)
    assert (pieces.cut, whole.cut) == (1, 0)
    assert cut.dtype is dtype and cut.shape == plain.shape and not torch.equal(cut, plain)
    off = (cut.double() - plain.double()).abs().max() / plain.double().abs().max()
    assert off < 4 * torch.finfo(dtype).eps


def test_each_piece_is_rounded() -> None:
    left, right = numbers(3, 8), numbers(8, 2)
    with Pieces(2):
        cut = left @ right
    assert torch.equal(cut, left[:, :4] @ right[:4] + left[:, 4:] @ right[4:])


def test_what_has_no_low_precision_or_is_too_short_is_left() -> None:
    with Pieces(4) as pieces:
        numbers(3, 64, dtype=torch.float32) @ numbers(64, 2, dtype=torch.float32)
        numbers(3, 3) @ numbers(3, 2)
        torch.addmm(numbers(2), numbers(3, 64), numbers(64, 2), beta=0.5)
    assert pieces.cut == pieces.whole == 0


def test_the_backward_is_cut_too() -> None:
    model, x = nn.Linear(16, 8), torch.randn(6, 16, requires_grad=True)
    with Pieces(2) as pieces:
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        forward = pieces.cut
        out.float().square().sum().backward()
    assert (forward, pieces.cut) == (1, 3), "one product, and one for each gradient"


def test_convolutions_are_counted_and_left_whole() -> None:
    model, x = nn.Conv1d(4, 4, 3), torch.randn(2, 4, 9)
    with Pieces(2) as pieces:
        model(x).sum().backward()
        assert pieces.whole == 0, "in float32"
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        out.float().sum().backward()
    assert (pieces.whole, pieces.cut) == (2, 0)
