"""Keys and values go round; what each position gets is what the whole gives it."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from allranks.errors import LayoutError
from allranks.parallel.context_ops import Call
from allranks.parallel.ring import pass_around
from allranks.parallel.sequences import Share
from tests.distributed.pool import Pools

pytestmark = pytest.mark.distributed

ATTENTION: Any = functional.scaled_dot_product_attention


def attend(seq: int, lead: tuple[int, ...], key_heads: int, causal: bool, dtype: torch.dtype) -> list[float]:
    """Differences of output and gradients from the whole's in float64, as parts of the largest value."""
    torch.manual_seed(0)
    group = dist.group.WORLD
    assert group is not None
    share = Share(dist.get_rank(), dist.get_world_size(), balanced=True)
    shapes = ((*lead, count, seq, 4) for count in (6, key_heads, key_heads))
    wholes = [torch.randn(shape, dtype=torch.float64).to(dtype).double().requires_grad_() for shape in shapes]
    gradient = torch.randn(*lead, 6, seq, 4, dtype=torch.float64).to(dtype)
    gqa = key_heads < 6
    expected = ATTENTION(*wholes, is_causal=causal, enable_gqa=gqa)
    expected.backward(gradient.double())
    mine = [share.take(whole.detach(), -2).to(dtype).requires_grad_() for whole in wholes]
    found = pass_around(Call(mine[0], mine[1], mine[2], None, 0.0, causal, None, gqa), group)
    assert found.dtype is dtype
    found.backward(share.take(gradient, -2))
    pairs = [
        (found.detach(), expected.detach()),
        *((own.grad, whole.grad) for own, whole in zip(mine, wholes, strict=True)),
    ]
    errors = []
    for own, whole in pairs:
        assert own is not None and whole is not None
        errors.append(float((own - share.take(whole, -2)).abs().max() / whole.abs().max()))
    return errors


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("size", "seq", "lead", "key_heads"), [(2, 8, (2,), 6), (3, 12, (), 2), (4, 8, (2, 2), 1)])
def test_each_position_gets_what_the_whole_gives_it(
    pool: Pools, size: int, seq: int, lead: tuple[int, ...], key_heads: int, causal: bool
) -> None:
    for errors in pool(size).run(attend, seq, lead, key_heads, causal, torch.float64):
        assert max(errors) < 1e-14


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_lower_types_are_merged_in_float32(pool: Pools, dtype: torch.dtype, bound: float) -> None:
    for errors in pool(2).run(attend, 16, (1,), 6, True, dtype):
        assert max(errors) < bound


def refuse(options: dict[str, Any], num_keys: int = 4, ndim: int = 4) -> str:
    group = dist.group.WORLD
    assert group is not None
    given = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False, **options}
    query, key = torch.ones((1, 2, 4, 2)[-ndim:]), torch.ones((1, 2, num_keys, 2)[-ndim:])
    with pytest.raises(LayoutError) as caught:
        pass_around(Call(query, key, key, **given), group)
    return str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ({"attn_mask": torch.ones(4, 4)},),
            "ring attention over cp(2) cannot honour an attention mask of [4, 4]: use is_causal=True, or "
            "layout.context=ulysses",
        ),
        (
            ({"dropout_p": 0.1},),
            "ring attention over cp(2) cannot drop: set attention's dropout, 0.1, to 0, or use layout.context=ulysses",
        ),
        (
            ({"is_causal": True}, 6),
            "ring attention over cp(2) cannot be causal from 4 to 6 positions: use layout.context=ulysses",
        ),
        (({}, 4, 2), "attention over [4, 2] has no heads, which cp(2) needs: use cp=1"),
    ],
)
def test_what_it_cannot_honour_is_refused(pool: Pools, arguments: Any, message: str) -> None:
    assert pool(2).run(refuse, *arguments) == [message] * 2


def bytes_kept() -> tuple[int, int]:
    """Bytes that a forward leaves for its backward, and those of one tensor of it."""
    group = dist.group.WORLD
    assert group is not None
    kept: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.nbytes)
        return tensor

    parts = [torch.ones(1, 2, 64, 8, requires_grad=True) for _ in range(3)]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        pass_around(Call(parts[0], parts[1], parts[2], None, 0.0, True, None, False), group)
    return sum(kept), parts[0].nbytes


def test_nobody_keeps_the_whole(pool: Pools) -> None:
    """Query, key, value and output of own positions, and a number a query and head: no scores, no other rank's keys."""
    for kept, one in pool(2).run(bytes_kept):
        assert kept == 4 * one + one // 8
