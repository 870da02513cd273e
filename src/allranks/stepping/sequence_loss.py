"""Is the loss of whole sequences the sum over their parts? Asked once, at the start, where sequences are cut (cp).

Each rank computes the loss of its own positions alone. A loss that looks at several of them, as one does that shifts
the targets inside, would train on in silence without what lies across two parts. So the ranks of a sequence join their
outputs of a few samples and compute the loss of them once more, whole: it needs no second model, and so no limit on
the model's size. Metrics are compared in the same way (sequence_metrics.py).

What is joined is bounded. Of long sequences, and of outputs as wide as a vocabulary, each part gives its first
positions, one at least: to a loss that is a sum over positions, these are as good as all, and one that misses a target
of a thousand is told from a rounding.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from allranks.errors import AllranksError, LayoutError
from allranks.layout import Layout
from allranks.parallel.context import Context
from allranks.parallel.mesh import Mesh
from allranks.parallel.sequences import shorten
from allranks.stepping.alike import everyones
from allranks.stepping.kept_state import undisturbed
from allranks.stepping.passes import Forward
from allranks.stepping.sequence_metrics import (
    Joined,
    Metrics,
    compare_metrics,
    copied,
    judge_metrics,
    relative_of,
)
from allranks.task_world import Alone, rows_of
from allranks.verdict import Decision

MOST_BYTES = 2**28  # of the joined output, where one position of each part takes no more; for a moment three times
MOST_POSITIONS = 1024  # one target of so many is far beyond the tolerance
UNKNOWN = "whether the loss of a sequence is the sum over its parts is not known"


def check_sequence_loss(
    forward: Forward,
    batch: Any,
    loss: Callable[[Any, Any], torch.Tensor],
    *,
    what: str,
    metrics: Metrics | None = None,
) -> Decision:
    """Compare the loss of whole sequences with the sum over their parts; collective over the world.

    Module, buffers and generators are afterwards as they were. Under pp the shapes between the stages are known.

    Args:
        batch: whole, and the same on all ranks of a sequence; other data-parallel ranks may have another.
        loss: (output, batch) -> a sum over targets, 0-dim.
        what: what the batch is called.
        metrics: (output, batch) -> name -> (sum, count), compared too where the loss can be; None where there are none.

    Raises:
        LayoutError: on every rank: they differ, or a metric does.
    """
    spread, context, module = forward.spread, forward.spread.context, forward.spread.bare()
    assert context is not None
    found, shown, measured = (0.0, 0.0, 0.0), 0, None
    with undisturbed(module), torch.no_grad(), rows_of(Alone()):
        placed = forward.place(batch)
        output, length = forward.raw(placed, module), context.length
        if spread.mesh.has_output:
            joined, shown = join_parts(forward, spread.precision.cast_output(output), batch)
            found = _compare(context, spread.device, joined, loss)
            if metrics is not None:
                measured = compare_metrics(metrics, joined, context.group, spread.device)
    spread.reshard()
    told = torch.tensor([float(spread.mesh.has_output), *found, shown], dtype=torch.float64, device=spread.device)
    all_told = [torch.empty_like(told) for _ in range(dist.get_world_size())]
    dist.all_gather(all_told, told)
    decision = _judge(spread.mesh.layout, [one.tolist() for one in all_told], length, what)
    if metrics is None or decision.what == UNKNOWN:
        return decision
    said = judge_metrics(everyones(measured, dist.group.WORLD, spread.device), spread.mesh.layout)
    return replace(decision, because=f"{decision.because}; {said}") if said else decision


def check_sequence_metrics(forward: Forward, output: Any, batch: Any, metrics: Metrics) -> None:
    """The same of metrics alone, where a loop of one's own has the output of its part of `batch`; collective.

    Raises:
        LayoutError: on every rank: one of them is no sum over positions.
    """
    spread, context, measured = forward.spread, forward.spread.context, None
    assert context is not None
    if spread.mesh.has_output:
        joined, _ = join_parts(forward, output, batch)
        measured = compare_metrics(metrics, joined, context.group, spread.device)
    judge_metrics(everyones(measured, dist.group.WORLD, spread.device), spread.mesh.layout)


def advise_loss(cp: int) -> str:
    """What is wrong with a loss that is not the sum over the parts of a sequence, and what to do."""
    return (
        f"loss() looks at more than one position, or at what cp={cp} has not cut: shift labels in the dataset, not in "
        "loss(), and see that the loss is a sum over positions"
    )


def _judge(layout: Layout, told: Sequence[Sequence[float]], length: int, what: str) -> Decision:
    """`told`: what each rank knows, as (whether it knows, error, parts, whole, positions of `length` compared)."""
    known = [found for knows, *found in told if knows]
    error, parts, whole, shown = max(known, key=lambda found: -math.inf if math.isnan(found[0]) else found[0])
    if error > 1:
        raise LayoutError(
            f"layout {layout} does not compute what one process computes: the loss is {parts:.6g} as the sum over the "
            f"{layout.cp} parts of each sequence, and {whole:.6g} for whole ones of the same outputs, so that "
            f"{advise_loss(layout.cp)}"
        )
    if any(math.isnan(error) for error, *_ in known):
        return Decision(UNKNOWN, "loss() fails, is not finite or draws random numbers, for outputs that are joined")
    if not any(whole for _, _, whole, _ in known):
        return Decision(UNKNOWN, f"it is 0 for {what}")
    of = f"{shown:,.0f} of {length:,} positions of {what}" if shown < length else what
    return Decision(f"the loss of a sequence is the sum over its {layout.cp} parts", f"both are {whole:.6g} for {of}")


def join_parts(forward: Forward, output: Any, batch: Any) -> tuple[Joined, int]:
    """This rank's output and that of all parts, each with its batch; the positions of a sequence that they have."""
    context = forward.spread.context
    assert context is not None
    share, sequences, batch = context.share, context.sequences, forward.on_device(batch)
    own, whole, length = _join(context, forward.spread.mesh, output, sequences.dim_in(batch))
    batch = sequences.shorten(batch, share.num_chunks, length)
    return Joined(own, sequences.cut(batch, share)[0], whole, batch), length * share.num_chunks


def _compare(
    context: Context, device: torch.device, joined: Joined, loss: Callable[[Any, Any], torch.Tensor]
) -> tuple[float, float, float]:
    """(error, the sum over the parts, the loss of whole sequences).

    The error is a multiple of what is allowed; nan where there is no loss.
    """
    nothing = torch.full((), math.nan, dtype=torch.float64)
    mine, first, again, relative = nothing, nothing, nothing, 0.0
    try:
        # An operation in place on its output must not reach the later calls; the third tells whether it draws numbers.
        found = loss(copied(joined.own), joined.own_batch)
        relative = relative_of(found.dtype)
        first, again = (loss(copied(joined.whole), joined.batch) for _ in range(2))
        mine = found if abs(float(first - again)) <= relative * abs(float(first)) else nothing
    except AllranksError:
        raise
    except Exception:
        # It has worked on the parts, whole; an output of a form that is not known here is no reason to end a run.
        pass
    mine = mine.double().reshape(()).to(device)
    parts = torch.stack([mine, mine.abs()])
    dist.all_reduce(parts, group=context.group)
    (total, size), expected = parts.tolist(), float(first)
    allowed = relative * (size + abs(expected))
    difference = abs(total - expected)
    error = difference / allowed if allowed else 0.0 * difference
    return error, total, expected


def _join(context: Context, mesh: Mesh, output: Any, usual: int) -> tuple[Any, Any, int]:
    """(this rank's output, that of all parts, positions in each chunk of them): of each chunk the first positions.

    What has no positions counts as nothing in both, since its part of a loss is nobody's here.

    Args:
        usual: the dim of positions, where a tensor has as many in several.
    """
    share, leaves = context.share, [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    own = context.length // share.num_ranks
    dims = {id(leaf): _find_dim(leaf, own, usual) for leaf in leaves}
    a_position = sum(leaf.nbytes for leaf in leaves if dims[id(leaf)] is not None) // own
    most = min(MOST_POSITIONS, MOST_BYTES // max(1, a_position)) // share.num_chunks
    length = min(own // share.own_chunks, max(1, most))
    if mesh.layout.tp > 1:  # whose ranks may hold logits of unequally many words
        agreed = torch.tensor(length, device=leaves[0].device)
        dist.all_reduce(agreed, dist.ReduceOp.MIN, group=mesh.group("tp"))
        length = int(agreed)

    def cut(leaf: torch.Tensor) -> torch.Tensor:
        dim = dims[id(leaf)]
        return torch.zeros_like(leaf) if dim is None else shorten(leaf, dim, share.own_chunks, length).contiguous()

    def join(leaf: torch.Tensor) -> torch.Tensor:
        dim, mine = dims[id(leaf)], cut(leaf)
        if dim is None:
            return mine
        parts = [torch.empty_like(mine) for _ in range(share.num_ranks)]
        dist.all_gather(parts, mine, group=context.group)
        return share.join(parts, dim)

    own_output = pytree.tree_map_only(torch.Tensor, cut, output)
    return own_output, pytree.tree_map_only(torch.Tensor, join, output), length


def _find_dim(leaf: torch.Tensor, own: int, usual: int) -> int | None:
    dims = [dim for dim, size in enumerate(leaf.shape) if size == own]
    return usual if usual in dims else next(iter(dims), None)
