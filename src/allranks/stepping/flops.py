"""How many floating-point operations a sample costs, counted on the user's own forward."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from allranks.stepping.passes import Forward, buffers_kept

PASSES = 3  # a backward costs about two forwards (arXiv 2001.08361, section 2.1)


def count_flops(forward: Forward, batch: Any, num_samples: int) -> float | None:
    """Operations of one forward and backward, for each of the `num_samples` samples of `batch`; None: not countable.

    torch counts matrix products, convolutions and (on CUDA) attention, a product and a sum as two. Under a sharded
    layout this is collective: all ranks call it.
    """
    module = forward.spread.bare()
    modes = [(part, part.training) for part in module.modules()]
    counter = FlopCounterMode(display=False)
    try:
        module.eval()
        arguments = forward.inputs(forward.place(batch))
        with torch.no_grad(), buffers_kept(forward.spread, unless=False), forward.autocast(), counter:
            module(**arguments) if isinstance(arguments, Mapping) else module(*arguments)
    except Exception:
        # A module may do what cannot be counted; that costs it a curve, and nothing else.
        return None
    finally:
        for part, training in modes:
            part.training = training
        forward.spread.reshard()
    # Each rank of a tp group computes its part of every layer that is cut, each of a cp group that of its positions.
    layout = forward.spread.mesh.layout
    return PASSES * counter.get_total_flops() * layout.tp * layout.cp / num_samples or None
