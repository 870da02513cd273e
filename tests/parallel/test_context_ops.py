"""Swapping positions for heads: each rank attends with some heads over the whole sequence."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from allranks.errors import LayoutError
from allranks.parallel.context_ops import Call, exchange, swap_heads
from tests.distributed.pool import Pools

pytestmark = pytest.mark.distributed

ATTENTION: Callable[..., torch.Tensor] = functional.scaled_dot_product_attention


def part(whole: torch.Tensor, dim: int) -> torch.Tensor:
    """This rank's chunk."""
    return whole.chunk(dist.get_world_size(), dim)[dist.get_rank()]


def exchange_twice(dtype: torch.dtype) -> tuple[bool, bool, bool]:
    torch.manual_seed(0)
    group = dist.group.WORLD
    assert group is not None
    whole = torch.randn(2, 6, 12, 4).to(dtype)
    # As a transposed view of channels, or in any other format that is not contiguous.
    mine = part(whole, -2).detach().contiguous(memory_format=torch.channels_last).requires_grad_()
    heads = exchange(mine, group, -3, -2)
    back = exchange(heads, group, -2, -3)
    weights = torch.arange(heads.numel()).view(heads.shape).to(dtype)
    (gradient,) = torch.autograd.grad(heads, mine, weights)
    expected = exchange(weights, group, -2, -3)
    return torch.equal(heads, part(whole, -3)), torch.equal(back, mine), torch.equal(gradient, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_an_exchange_and_its_inverse(pool: Pools, dtype: torch.dtype) -> None:
    assert pool(3).run(exchange_twice, dtype) == [(True, True, True)] * 3


def attend(
    heads: int,
    key_heads: int,
    lead: tuple[int, ...],
    make_mask: Callable[[], tuple[torch.Tensor, int | None]] | None,
    options: dict[str, Any],
) -> list[float]:
    """Largest differences of this rank's output, gradients and the mask's gradient from those of the whole."""
    torch.manual_seed(0)
    group = dist.group.WORLD
    assert group is not None
    shapes = ((*lead, count, 12, 4) for count in (heads, key_heads, key_heads))
    wholes = [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]
    gradient = torch.randn(*lead, heads, 12, 4, dtype=torch.float64)
    mask, cut = (None, None) if make_mask is None else make_mask()
    given = {"dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": key_heads < heads, **options}
    expected = ATTENTION(*wholes, attn_mask=mask, **given)
    expected.backward(gradient)
    mine = [part(whole.detach(), -2).contiguous().requires_grad_() for whole in wholes]
    own_mask = None if mask is None else mask.detach() if cut is None else part(mask.detach(), cut)
    if own_mask is not None and own_mask.is_floating_point():
        own_mask.requires_grad_()
    found = swap_heads(Call(mine[0], mine[1], mine[2], own_mask, **given), group, ATTENTION)
    found.backward(part(gradient, -2))
    pairs = [(found, part(expected, -2))]
    for own, whole in zip(mine, wholes, strict=True):
        assert own.grad is not None and whole.grad is not None
        pairs.append((own.grad, part(whole.grad, -2)))
    if own_mask is not None and own_mask.grad is not None:
        assert mask is not None and mask.grad is not None
        if cut is None:  # each rank has the gradient of its own heads
            dist.all_reduce(own_mask.grad)
        pairs.append((own_mask.grad, mask.grad if cut is None else part(mask.grad, cut)))
    return [float((a - b).detach().abs().max()) for a, b in pairs]


def bias(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64).requires_grad_()


MASKS: dict[str, Callable[[], tuple[torch.Tensor, int | None]] | None] = {
    "none": None,
    "all": lambda: (torch.ones(12, 12, dtype=torch.bool).tril(2), None),
    "padding": lambda: (torch.arange(12).expand(2, 1, 1, 12) < 7, -1),
    "keys": lambda: (bias(12), -1),
    "queries": lambda: (bias(12, 12), -2),
    "heads": lambda: (bias(2, 6, 12, 12), None),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("key_heads", [6, 3, 2, 1])
def test_each_position_gets_what_the_whole_gives_it(pool: Pools, mask: str, key_heads: int) -> None:
    """2 and 1 heads of keys and values are fewer than ranks, and 2 do not divide them."""
    for errors in pool(3).run(attend, 6, key_heads, (2,), MASKS[mask], {}):
        assert len(errors) == (5 if mask in ("keys", "queries", "heads") else 4)
        assert max(errors) < 1e-13


@pytest.mark.parametrize(
    ("lead", "options"), [((2,), {"is_causal": True}), ((), {"is_causal": True, "scale": 0.7}), ((2, 3), {})]
)
def test_every_way_of_asking(pool: Pools, lead: tuple[int, ...], options: dict[str, Any]) -> None:
    assert max(max(errors) for errors in pool(2).run(attend, 6, 6, lead, None, options)) < 1e-13


def refuse(heads: int, mask_shape: tuple[int, ...] | None, ndim: int) -> str:
    group = dist.group.WORLD
    assert group is not None
    query = torch.ones((1, heads, 4, 2)[-ndim:])
    mask = None if mask_shape is None else torch.ones(mask_shape)
    with pytest.raises(LayoutError) as caught:
        swap_heads(Call(query, query, query, mask, 0.0, False, None, False), group, ATTENTION)
    return str(caught.value)


def test_what_cannot_be_shared_is_refused_with_the_numbers(pool: Pools) -> None:
    assert pool(4).run(refuse, 6, None, 4)[0] == (
        "cp(4) does not divide the 6 attention heads of a process: cp can be 1, 2, 3, 6, or any number with "
        "layout.context=ring"
    )
    assert "attention over [4, 2] has no heads, which cp(2) could share" in pool(2).run(refuse, 2, None, 2)[0]
    message = pool(2).run(refuse, 2, (4, 4), 4)[0]
    assert "mask of [4, 4] tells which of this process's own positions see each other, but cp(2)" in message
