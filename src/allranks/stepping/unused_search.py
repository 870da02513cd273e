"""Does the loss leave parameters out? Asked once, at the start, where a wrapper would wait for their gradients."""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from allranks.data.plain_batch import plain_batch
from allranks.stepping.alike import on_any_rank
from allranks.stepping.loss_check import num_examined
from allranks.stepping.passes import Forward, buffers_kept
from allranks.verdict import Decision

NAMED = 4


def search_unused(
    forward: Forward, samples: Sequence[Any], micro_batch: int, group: dist.ProcessGroup | None
) -> tuple[Decision, ...]:
    """Have DDP look for parameters without gradient, where the loss leaves some: else they would hold up the others.

    HSDP would take such a unit for one whose gradients are lost. FSDP over one axis minds none, and DDP's static graph
    finds them by itself. Collective where a forward is.

    Args:
        samples: the first ones of the dataset, not collated; at least one.
        micro_batch: samples of a forward in training. No forward here is of more, so that its backward fits.
        group: of ranks that see other samples each; None where all see the same.
    """
    spread = forward.spread
    layout = spread.mesh.layout
    minds = (layout.replicated or (layout.copies > 1 and layout.dp_shard > 1)) and spread.stages is None
    if not minds or (layout.replicated and layout.static_graph) or spread.find_unused:
        return ()
    spread.synchronise(last=not layout.replicated)  # else HSDP would keep the gradients for the first step
    waited = spread.waited()
    number, left_out = num_examined(micro_batch), set[str]()
    most = min(micro_batch, number)
    with buffers_kept(spread, unless=False):
        # As often on each rank, whatever it has; from the front again where the samples end, so that each is as large.
        for begin in range(0, number, most):
            some = [samples[index % len(samples)] for index in range(begin, begin + most)]
            placed = forward.place(plain_batch(forward.task.collate(some)))
            forward.task.loss(forward(placed), placed).backward()
            left_out |= {name for name, parameter in waited.items() if parameter.grad is None}
            for parameter in spread.trainable().values():
                parameter.grad = None
    unused = [name for name in waited if name in left_out]
    if not on_any_rank(bool(unused), spread.device, group):
        return ()
    spread.expect_unused()
    named = ", ".join(unused[:NAMED]) or "a parameter of another process"
    others = f" and {len(unused) - NAMED} more" if len(unused) > NAMED else ""
    because = f"{named}{others} got none on the first samples"
    return (Decision("every backward is searched for parameters without gradient", because),)
