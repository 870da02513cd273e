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
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from allranks.data.random_keys import seed_all
from allranks.errors import LayoutError
from allranks.layout import Layout
from allranks.parallel.compiled import uncompiled
from allranks.parallel.sequences import repeat_last
from allranks.stepping.kept_state import undisturbed
from allranks.stepping.passes import Forward
from allranks.task_world import Alone, rows_of
from allranks.verdict import Decision

FOUND = "forward treats each position by itself, attention aside"
UNKNOWN = "whether forward treats each position by itself, attention aside, is not known"
KEPT_BYTES = 2**25  # of an output, of each half

# What other places in a tensor leave in rounding. What looks elsewhere changes far more of some position.
_RELATIVE = {torch.float64: 1e-7, torch.float32: 1e-3}
_HALF = 6e-2
# A router may send a token elsewhere for a rounding: then few positions differ, here and there. What looks at others
# differs in the first position of a half, whose neighbour is another one, or in most of them.
_FEW = 0.05

_Halves = list[tuple[torch.Tensor, torch.Tensor]]


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
    with (
        spread.shaken(by_part=True),
        undisturbed(module),
        torch.no_grad(),
        rows_of(Alone()),
        uncompiled(),
    ):
        placed = forward.place(batch)
        with context.alone():
            first = _run(forward, placed)
            calls = context.num_calls - calls
            again = _run(forward, placed, seed=1)
        with context.alone(repeated=True):
            second = _run(forward, context.sequences.each(placed, repeat_last))
        spread.reshard()
    found = _compare(_allowed(forward), first, again, second)
    told = torch.tensor([*found, float(calls)], dtype=torch.float64, device=spread.device)
    dist.all_reduce(told, dist.ReduceOp.MAX)
    elsewhere, place, judged, drawn, scattered, calls_seen = told.tolist()
    few = scattered > 0 and max(elsewhere, place) <= 1
    return _judge(layout, elsewhere, place, _why_unknown(judged, drawn, few=few), int(calls_seen), what)


def _run(forward: Forward, placed: Any, seed: int = 0) -> _Halves:
    """What forward returns, as far as it is compared; nothing on ranks that have no output."""
    seed_all(seed)
    context = forward.spread.context
    output = forward.raw(placed, forward.spread.bare())
    if context is None or not forward.spread.mesh.has_output:
        return []
    return _halves(output, context.sequences.dim_in(placed), context.length // context.share.num_ranks)


def _halves(output: Any, usual: int, own: int) -> _Halves:
    """(the first half of the part, the last one) of every output that has `own` positions: [position, the rest].

    Of large outputs the first positions of each half: a batch times a vocabulary is more than a step has room for.
    """
    found: _Halves = []
    for leaf in pytree.tree_leaves(output):
        if not (isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.ndim > 1):
            continue
        dims = [dim for dim, size in enumerate(leaf.shape) if size == own]
        if dims and own > 1:
            rows = leaf.movedim(usual if usual in dims else dims[0], 0)
            most = min(own // 2, max(1, KEPT_BYTES * own // max(1, leaf.numel() * leaf.element_size())))
            left, right = (rows.narrow(0, begin, most).flatten(1).clone() for begin in (0, own - own // 2))
            found.append((left, right))
    return found


def _why_unknown(judged: float, drawn: float, *, few: bool) -> str:
    if drawn:
        return "its outputs are not finite, or draw random numbers"
    if not judged:
        return "none of its outputs has the positions of a part, of which there have to be two"
    if few:
        return "a few positions differ here and there, as where a router sends tokens elsewhere for a rounding"
    return ""


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


def _allowed(forward: Forward) -> float:
    precision = forward.spread.precision
    return _RELATIVE.get(precision.compute or precision.parameters, _HALF)


def _compare(allowed: float, first: _Halves, again: _Halves, second: _Halves) -> tuple[float, float, bool, bool, bool]:
    """(error of the right halves, of the left ones, whether any was judged, whether none is to be trusted, whether few
    positions differ here and there)."""
    shapes = [[half.shape for pair in found for half in pair] for found in (first, again, second)]
    if shapes != shapes[:1] * 3:
        return 0.0, 0.0, bool(first), True, False
    elsewhere = place = noise = 0.0
    scattered = False
    for (_, last), (_, repeat), (left, right) in zip(first, again, second, strict=True):
        found = [_error(last, other, allowed) for other in (right, left, repeat)]
        elsewhere, place, noise = map(max, (elsewhere, place, noise), (error for error, _ in found))
        scattered = scattered or any(few for _, few in found[:2])
    if noise > 1:
        return 0.0, 0.0, True, True, False
    return elsewhere, place, bool(first), False, scattered


def _error(expected: torch.Tensor, found: torch.Tensor, allowed: float) -> tuple[float, bool]:
    """(the largest difference of a position, in multiples of what is allowed; whether only few differ, which are 0).

    A position is compared with the mean size of one. inf for nan.
    """
    wide = [torch.linalg.vector_norm(value, dim=1) for value in (expected.double(), expected.double() - found.double())]
    mean = float(wide[0].square().mean().sqrt())
    if not bool(torch.isfinite(wide[1]).all()):
        return math.inf, False
    errors = wide[1] / (allowed * mean) if mean else (wide[1] > 0) * 2.0
    over = errors > 1
    few = bool(over.any()) and not bool(over[0]) and float(over.double().mean()) <= _FEW
    return (0.0, True) if few else (float(errors.max()), False)
