"""Is every metric of whole sequences the sum over their parts? Asked beside the loss, where sequences are cut (cp).

Each rank measures its own positions, and sums and counts are added up over all ranks. A metric that counts samples
counts each of them once a part, and of one that asks for a whole sequence ("all of it right") each rank sees a part:
both would be wrong in silence. The mean alone does not tell, as it may be 0 of 5 and 0 of 10 before the first step.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from allranks.errors import AllranksError, LayoutError
from allranks.layout import Layout
from allranks.stepping.alike import everyones

Metrics = Callable[[Any, Any], Mapping[str, tuple[Any, Any]]]

# What sums in another order leave between two sums of the same outputs, by the type that they come in.
RELATIVE = {torch.float64: 1e-10, torch.float32: 5e-5}
HALF = 2e-2

UNMEASURED = "its metrics were not compared, as metrics() fails for outputs that are joined"
_FAILS = "fails"


class Joined(NamedTuple):
    """This rank's part of a batch, and all of it: outputs and batches."""

    own: Any
    own_batch: Any
    whole: Any
    batch: Any


class _Number(NamedTuple):
    """A sum or a count, and how far it may be off by its type."""

    value: float
    relative: float


_NOTHING = (_Number(0.0, 0.0), _Number(0.0, 0.0))


def relative_of(dtype: torch.dtype) -> float:
    """How far two sums of this type may be apart; whole numbers are exact."""
    return RELATIVE.get(dtype, HALF) if dtype.is_floating_point else 0.0


def copied(output: Any) -> Any:
    """The same output in tensors of its own, which the user's code may change in place."""
    return pytree.tree_map_only(torch.Tensor, torch.clone, output)


def compare_metrics(metrics: Metrics, joined: Joined, group: dist.ProcessGroup | None, device: torch.device) -> Any:
    """What `judge_metrics` asks of this rank; a JSON value. Collective over `group`, the ranks of a sequence.

    Returns:
        (name, sum over the parts, their count, sum of whole sequences, their count) of the first metric that differs;
        None where none does; "fails".
    """
    own: dict[str, tuple[_Number, _Number]] | None
    try:
        own = _measure(metrics, joined.own, joined.own_batch)
        whole, again = (_measure(metrics, joined.whole, joined.batch) for _ in range(2))
    except AllranksError:
        raise
    except Exception:
        # It may know no output of this form; whether it does those of a run, the first evaluation shows.
        own, whole, again = None, {}, {}
    told = everyones(own, group, device)
    if any(one is None for one in told):
        return _FAILS
    for name in sorted({*whole, *(name for one in told for name in one)}):
        sums, counts = ([_Number(*one.get(name, _NOTHING)[which]) for one in told] for which in (0, 1))
        (total, of), (total_again, of_again) = (one.get(name, _NOTHING) for one in (whole, again))
        if _differs(sums, total, total_again, abs(of.value)) or _differs(counts, of, of_again, 0.0):
            added = (sum(part.value for part in some) for some in (sums, counts))
            return [name, *added, total.value, of.value]
    return None


def judge_metrics(told: list[Any], layout: Layout) -> str:
    """What is to be said of them, by what each rank has compared; mostly nothing.

    Raises:
        LayoutError: one is no sum over positions.
    """
    found = next((one for one in told if one is not None and one != _FAILS), None)
    if found is not None:
        name, total, count, whole, of = found
        raise LayoutError(
            f"layout {layout} does not measure what one process measures: metrics() gives {name} as {total:.6g} of "
            f"{count:.6g}, summed over the {layout.cp} parts of each sequence, and {whole:.6g} of {of:.6g} for whole "
            f"ones of the same outputs: under cp={layout.cp} a metric has to be a sum over positions and their number "
            "(count positions, not samples): return these, leave it out, or use a layout without cp"
        )
    return UNMEASURED if _FAILS in told else ""


def _measure(metrics: Metrics, output: Any, batch: Any) -> dict[str, tuple[_Number, _Number]]:
    found = metrics(copied(output), batch)
    return {str(name): (_number(total), _number(count)) for name, (total, count) in found.items()}


def _number(value: Any) -> _Number:
    if isinstance(value, torch.Tensor):
        return _Number(float(value), relative_of(value.dtype))
    # A float may have been a tensor's, of float32.
    return _Number(float(value), 0.0 if isinstance(value, int) else RELATIVE[torch.float32])


def _differs(parts: list[_Number], whole: _Number, again: _Number, count: float) -> bool:
    """`count`: of the whole; a sum of both signs may be as small as what is left of it by rounding."""
    total, size = sum(part.value for part in parts), sum(abs(part.value) for part in parts)
    relative = max(number.relative for number in (*parts, whole))
    if not math.isfinite(total + whole.value) or abs(whole.value - again.value) > relative * abs(whole.value):
        return False  # it is nan, or draws random numbers
    return abs(total - whole.value) > relative * (size + abs(whole.value) + count)
