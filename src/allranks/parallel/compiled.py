"""torch.compile, block by block: equal blocks share one compiled graph, and each stays a unit of its own.

Only a block's forward is compiled. What surrounds it (FSDP's gathering, DDP's reducing, the notes of which unit was
entered) runs as without.
"""

import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from allranks.errors import LayoutError

Forward = Callable[..., Any]

BACKEND = "inductor"
"""What makes code of a graph: torch's usual one."""

MEMORY_BUDGET = 0.5
"""The part of the activations that recompute=budget keeps, of what torch.compile would keep without a budget."""

# Blocks that differ in an attribute (their own number, say) are compiled one by one; torch gives up after 8.
MOST_GRAPHS = 1024


def compile_forward(name: str, forward: Forward, *, whole: bool = False, budget: bool = False) -> Forward:
    """`forward` through torch.compile; compiled at its first call, and again for shapes or modes that it has not seen.

    Sets torch's options for the whole process, which reads them when it compiles.

    Args:
        name: of the block, for messages.
        whole: compile it in one piece or not at all.
        budget: keep `MEMORY_BUDGET` of the activations only, and compute the others again in the backward: torch solves
            for those that cost the fewest operations. Source: torch._functorch.config.activation_memory_budget.

    Raises (when called):
        LayoutError: it cannot be compiled in one piece, where that is asked for.
    """
    import torch._dynamo.config
    from torch._dynamo.exc import Unsupported

    # DDP's own splitting serves models that are compiled as a whole: a block is a part already.
    torch._dynamo.config.optimize_ddp = False
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_GRAPHS)
    torch._dynamo.config.accumulated_recompile_limit = max(
        torch._dynamo.config.accumulated_recompile_limit, MOST_GRAPHS
    )
    compiled = torch.compile(forward, fullgraph=whole, backend=_within_budget if budget else BACKEND)

    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return compiled(*args, **kwargs)
        except Unsupported as error:
            reason = str(error).strip().partition("\n")[0]
            raise LayoutError(
                f"block {name} cannot be compiled in one piece ({reason}), as recompute=selective with compile=block "
                "needs it: recompute=full or budget"
            ) from error

    return call


def uncompiled() -> AbstractContextManager[object]:
    """A context in which what is compiled, by `layout.compile` or by the user, runs as it is written: for checks.

    Their batches have sizes of their own, for which no graph is worth its compilation; what counts operations sees none
    in compiled code, and what fixes draws would be compiled with it. Where torch's compiler was not loaded, nothing is
    compiled yet, and it is not loaded for this.
    """
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _within_budget(graph: Any, inputs: Any) -> Any:
    """The backend under a budget, which torch reads while it cuts a graph into forward and backward."""
    import torch._functorch.config
    from torch._dynamo import lookup_backend

    with torch._functorch.config.patch(activation_memory_budget=MEMORY_BUDGET):
        return lookup_backend(BACKEND)(graph, inputs)
