"""How many floating-point operations a sample costs, counted on the user's own forward."""

from typing import Any

import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from allranks.stepping.evaluation_mode import evaluation_mode
from allranks.stepping.passes import Forward, buffers_kept

PASSES = 3  # a backward costs about two forwards (arXiv 2001.08361, section 2.1)


def count_flops(forward: Forward, batch: Any, num_samples: int) -> float | None:
    """Operations of one forward and backward, for each of the `num_samples` samples of `batch`; None: not countable.

    torch counts matrix products, convolutions and (on CUDA) attention, a product and a sum as two. Under a sharded
    layout this is collective: all ranks call it.

    Raises:
        Exception: the module's own, in a pipeline, whose other stages wait for what this one was to send.
    """
    module = forward.spread.bare()
    counter = FlopCounterMode(display=False)
    with evaluation_mode((module,)):
        try:
            with torch.no_grad(), buffers_kept(forward.spread, unless=False), counter:
                forward.raw(forward.place(batch), module)
        except Exception:
            if forward.spread.stages is not None:
                raise
            # A module may do what cannot be counted; that costs it a curve, and nothing else.
            return None
    layout, total = forward.spread.mesh.layout, float(counter.get_total_flops())
    if forward.spread.experts is not None:
        # A rank computes its experts for the tokens of all ranks of its ep group: some for more, some for fewer.
        total = forward.spread.experts.mean(total, forward.spread.device)
    # Each rank of a tp group computes its part of every layer that is cut, each of a cp group that of its positions.
    total *= layout.tp * layout.cp
    stages = forward.spread.stages
    if stages is not None:
        told = torch.tensor(total, dtype=torch.float64, device=forward.spread.device)
        dist.all_reduce(told, group=stages.group)
        total = float(told)
    return PASSES * total / num_samples or None
