"""Which samples a step feeds, in which order, and how they are loaded: a pure function of (seed, epoch, position).

The order never depends on the number of ranks. A step is cut first into micro-steps and then over the ranks
(`cut.py`); resuming a `DataStream` is one integer; a `Loader` turns it into batches, in order. `Sampler` is the part
that stands on its own: it takes DistributedSampler's place in a loop that allranks does not run.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from allranks.data.sampler import Sampler as Sampler

__all__ = ["Sampler"]


def __getattr__(name: str) -> object:
    """Import `Sampler` at its first use: it brings torch along."""
    if name not in __all__:
        raise AttributeError(f"module 'allranks.data' has no attribute {name!r}")
    from allranks.data import sampler

    value: object = getattr(sampler, name)
    globals()[name] = value
    return value
