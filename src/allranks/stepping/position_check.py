"""Does forward treat each position by itself, attention aside? Asked at the start, where sequences are cut (cp).

The comparison with the whole model (whole_check.py) tells it, but needs that model, which may be too large. Here two
forwards of the cut model do, without gradients. Attention over sequences looks at each position alone meanwhile, so
that nothing may tell a position of another one, or where in this rank's part it lies. The second forward gets the last
half of each part in place of its first, too, with the positions that belong to it: outputs have to be the same there.

    part       a b c d   -> f(a) f(b) f(c) f(d)
    repeated   c d c d   -> f(c) f(d) f(c) f(d)

The right halves differ: something looks at other positions, and not through the attention that is joined over ranks.
Only the left one differs from f(c) f(d): something counts positions from the start of the part.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from allranks.data.random_keys import seed_all
from allranks.errors import LayoutError
from allranks.layout import Layout
from allranks.parallel.compiled import uncompiled
from allranks.parallel.sequences import repeat_last
from allranks.stepping.loss_check import undisturbed
from allranks.stepping.passes import Forward
from allranks.task_world import Alone, rows_of
from allranks.verdict import Decision

FOUND = "forward treats each position by itself, attention aside"
UNKNOWN = "whether forward treats each position by itself, attention aside, is not known"
POSITIONS_AT_ONCE = 64

# What other places in a tensor leave in rounding. What looks elsewhere changes far more of some position.
_RELATIVE = {torch.float64: 1e-7, torch.float32: 1e-3}
_HALF = 6e-2
# A router may send a token elsewhere for a rounding: there all positions count together.
_ROUTED = 0.1


def check_positions(forward: Forward, batch: Any, *, what: str) -> Decision:
    """Compare two forwards of the cut model; collective over the world.

    Parameters have noise on them meanwhile, because what begins at zero would hide what lies behind it. Module, buffers
    and generators are afterwards as they were. Under pp the shapes between the stages are known.

    Args:
        batch: whole, and the same on all ranks of a sequence; other data-parallel ranks may have another.
        what: what the batch is called.

    Raises:
        LayoutError: on every rank: something else looks at several positions, or knows places in a part of a sequence;
            or that is not known, and no attention over sequences was seen.
    """
    spread, context, module = forward.spread, forward.spread.context, forward.spread.bare()
    assert context is not None
    layout, calls = spread.mesh.layout, context.num_calls
    with spread.shaken(), undisturbed(module), torch.no_grad(), rows_of(Alone()), uncompiled(layout.compile):
        placed = forward.place(batch)
        with context.alone():
            first = _run(forward, placed)
            calls = context.num_calls - calls
            again = _run(forward, placed, seed=1)
        with context.alone(repeated=True):
            second = _run(forward, context.sequences.each(placed, repeat_last))
        spread.reshard()
    dim, own = context.sequences.dim_in(placed), context.length // context.share.num_ranks
    found = _compare(forward, (first, again, second), dim, own) if spread.mesh.has_output else (0.0, 0.0, False, False)
    told = torch.tensor([*found, float(calls)], dtype=torch.float64, device=spread.device)
    dist.all_reduce(told, dist.ReduceOp.MAX)
    elsewhere, place, judged, drawn, calls_seen = told.tolist()
    return _judge(layout, elsewhere, place, _why_unknown(judged, drawn), int(calls_seen), what)


def _run(forward: Forward, placed: Any, seed: int = 0) -> Any:
    seed_all(seed)
    return forward.raw(placed, forward.spread.bare())


def _why_unknown(judged: float, drawn: float) -> str:
    if drawn:
        return "its outputs are not finite, or draw random numbers"
    return "" if judged else "none of its outputs has the positions of a part, of which there have to be two"


def _judge(layout: Layout, elsewhere: float, place: float, unknown: str, calls: int, what: str) -> Decision:
    """`elsewhere`, `place`: the errors of the right and of the left halves, in multiples of what is allowed."""
    says = f"layout {layout} does not compute what one process computes"
    seen = f"{calls} calls of attention were joined over the {layout.cp} parts of each sequence"
    advice = (
        "call torch.nn.functional.scaled_dot_product_attention by that name (nn.MultiheadAttention does with "
        'need_weights=False, Hugging Face with attn_implementation="sdpa"), and let all else look at each position by '
        "itself"
    )
    if unknown and not calls:
        raise LayoutError(
            f"layout {layout} cuts sequences, and no call of attention was joined over their {layout.cp} parts; "
            f"whether forward looks at other positions in another way is not known, because {unknown}: {advice}"
        )
    if unknown:
        return Decision(UNKNOWN, f"{unknown}; {seen}")
    if elsewhere > 1:
        raise LayoutError(f"{says}: {seen}, but forward looks at other positions of its part beside them: {advice}")
    if place > 1:
        raise LayoutError(
            f"{says}: forward knows where in its part of a sequence a position lies, not where in the whole: take the "
            "argument `positions` (or position_ids), which allranks fills, in place of torch.arange"
        )
    return Decision(FOUND, f"outputs of {what} follow their own positions alone; {seen}")


def _compare(forward: Forward, outputs: Sequence[Any], usual: int, own: int) -> tuple[float, float, bool, bool]:
    """(error of the right halves, of the left ones, whether any was judged, whether none is to be trusted)."""
    half, worst, judged = own // 2, [0.0, 0.0, 0.0], False
    for first, again, second in zip(*map(pytree.tree_leaves, outputs), strict=True):
        if not (isinstance(first, torch.Tensor) and first.is_floating_point()):
            continue
        dims = [dim for dim, size in enumerate(first.shape) if size == own]
        if not dims or not half:
            continue
        dim, judged = usual if usual in dims else dims[0], True
        last = first.narrow(dim, own - half, half)
        right, left = (second.narrow(dim, start, half) for start in (own - half, 0))
        for index, other in enumerate((right, left, again.narrow(dim, own - half, half))):
            worst[index] = max(worst[index], _error(forward, last, other, dim))
    elsewhere, place, noise = worst
    return (elsewhere, place, judged, False) if noise <= 1 else (0.0, 0.0, judged, True)


def _error(forward: Forward, expected: torch.Tensor, found: torch.Tensor, dim: int) -> float:
    """The largest difference of a position, of the mean size of one, in multiples of what is allowed; inf for nan."""
    others = [other for other in range(expected.ndim) if other != dim]
    sizes, differences = list[torch.Tensor](), list[torch.Tensor]()
    for one, other in zip(expected.split(POSITIONS_AT_ONCE, dim), found.split(POSITIONS_AT_ONCE, dim), strict=True):
        sizes.append(_norms(one.double(), others))
        differences.append(_norms(one.double() - other.double(), others))
    size, difference = (torch.cat(parts).square() for parts in (sizes, differences))
    dtype = forward.spread.precision.compute or forward.spread.precision.parameters
    routed = forward.spread.experts is not None
    allowed = max(_RELATIVE.get(dtype, _HALF), _ROUTED) if routed else _RELATIVE.get(dtype, _HALF)
    worst = float((difference.mean() if routed else difference.max()).sqrt())
    if not math.isfinite(worst):
        return math.inf
    mean = float(size.mean().sqrt())
    return worst / (allowed * mean) if mean else float(worst > 0) * 2


def _norms(value: torch.Tensor, dims: list[int]) -> torch.Tensor:
    found: torch.Tensor = torch.linalg.vector_norm(value, dim=dims) if dims else value.abs()
    return found
