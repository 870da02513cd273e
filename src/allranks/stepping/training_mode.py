"""A forward as in training that counts as none: for the checks before the first step."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from torch import nn

from allranks.parallel.batchnorm import BATCH_STATISTICS, statistics_fixed
from allranks.stepping.fixed_draws import FixedDraws

# What torch's own kinds do in training alone is drop, which some do inside of a kernel, or take the statistics of their
# batch, which layout.batchnorm decides on.
_KNOWN = (
    BATCH_STATISTICS,
    nn.modules.dropout._DropoutNd,
    nn.RReLU,
    nn.MultiheadAttention,
    nn.RNNBase,
)
_CONTAINERS = (list, dict, set)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


@contextmanager
def as_in_training(module: nn.Module) -> Iterator[None]:
    """Inside, `module` in its own modes, but what it draws is fixed and no BatchNorm looks at its batch.

    Modes, buffers and attributes are afterwards as before; generators are not.
    """
    with state_kept(module), statistics_fixed(module), FixedDraws(), torch.enable_grad():
        for part in module.modules():
            if isinstance(part, _KNOWN):
                part.training = False
        yield


@contextmanager
def state_kept(module: nn.Module) -> Iterator[None]:
    """Copies of the buffers inside, afterwards the buffers themselves; attributes are as before, too.

    A forward may write into a buffer, put another in its place, or leave a gradient's history in it: to copies only.
    Of an attribute a list, a dict or a set is copied, and what it holds is not.
    """
    parts = list(module.modules())
    buffers = [dict(part._buffers) for part in parts]
    attributes = [dict(vars(part)) for part in parts]
    # one copy each: a buffer may belong to several modules
    copies = {id(b): b.detach().clone() for own in buffers for b in own.values() if b is not None}
    containers: dict[int, Any] = {}
    for part, own, values in zip(parts, buffers, attributes, strict=True):
        part._buffers.update({leaf: copies[id(b)] for leaf, b in own.items() if b is not None})
        for name, value in values.items():
            if type(value) in _CONTAINERS and name not in _OF_EVERY_MODULE:
                vars(part)[name] = containers.setdefault(id(value), copy(value))
    try:
        yield
    finally:
        for part, own, values in zip(parts, buffers, attributes, strict=True):
            part._buffers.clear()
            part._buffers.update(own)
            vars(part).clear()
            vars(part).update(values)
