"""DDP's buckets under a loop whose forwards are the user's: given their final order without running a forward again."""

import torch
from torch.nn.parallel import DistributedDataParallel

from allranks.errors import TaskError
from allranks.parallel.spread import Spread
from allranks.stepping.passes import RANKS_WITH_ONE_ORDER


def must_settle(spread: Spread) -> bool:
    """Whether a later rebuilding of the buckets would change the order of sums."""
    module = spread.modules[""]
    if not isinstance(module, DistributedDataParallel) or module.find_unused_parameters:
        return False  # where parameters may be unused DDP keeps its first buckets
    return spread.divisor > RANKS_WITH_ONE_ORDER


def settle_buckets(spread: Spread, loss: torch.Tensor) -> None:
    """Make DDP rebuild its buckets now, by one discarded backward on the graph of `loss`, which stays; collective.

    DDP reorders its buckets after its first reducing backward. With three ranks or more that changes the order in which
    the ring adds, so a resumed run would differ from the uninterrupted one in the last bit (law 8). It is done on the
    last micro-batch of the process's first step, whose forward was prepared to reduce; what the micro-batches before
    it have accumulated is put aside meanwhile. No forward is run again: buffers and randomness are untouched.

    Raises:
        TaskError: `loss` leaves parameters out.
    """
    module = spread.modules[""]
    assert isinstance(module, DistributedDataParallel)
    kept = [(parameter, parameter.grad) for parameter in spread.trainable().values()]
    for parameter, _ in kept:
        parameter.grad = None
    loss.backward(retain_graph=True)
    check_all_reached(spread)
    module.reducer._rebuild_buckets()
    for parameter, gradient in kept:
        parameter.grad = gradient
    module.reducer.prepare_for_backward([])


def check_all_reached(spread: Spread) -> None:
    """Refuse a loss that leaves parameters out where DDP would then leave others unreduced. Raises TaskError."""
    module = spread.modules[""]
    if not isinstance(module, DistributedDataParallel) or module.find_unused_parameters:
        return
    missing = [name for name, parameter in spread.waited().items() if parameter.grad is None]
    if missing:
        raise TaskError(
            f"{len(missing)} trainable parameter(s) got no gradient, first {missing[0]!r}: freeze what is never used, "
            "or say world.parallelize(model, find_unused=True)"
        )
