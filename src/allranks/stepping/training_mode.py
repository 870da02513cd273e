"""A forward as in training that counts as none: for the checks before the first step."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from allranks.parallel.batchnorm import BATCH_STATISTICS, statistics_fixed
from allranks.stepping.fixed_draws import FixedDraws
from allranks.stepping.kept_state import KeptState

# What torch's own kinds do in training alone is drop, which some do inside of a kernel, or take the statistics of their
# batch, which layout.batchnorm decides on.
_KNOWN = (
    BATCH_STATISTICS,
    nn.modules.dropout._DropoutNd,
    nn.RReLU,
    nn.MultiheadAttention,
    nn.RNNBase,
)


@contextmanager
def as_in_training(
    module: nn.Module, state: KeptState | None = None, draws: FixedDraws | None = None
) -> Iterator[None]:
    """Inside, `module` in its own modes, but what it draws is fixed and no BatchNorm looks at its batch.

    Modes, buffers and attributes are afterwards as before; generators are not.

    Args:
        state: of the module, and what else is put back; made here where it is None.
        draws: how numbers are drawn; as usual where it is None.
    """
    kept = (state or KeptState(module)).kept()
    with kept, statistics_fixed(module), draws or FixedDraws(), torch.enable_grad():
        for part in module.modules():
            if isinstance(part, _KNOWN):
                part.training = False
        yield
