"""Forwards whose backward never comes, run in the memory of inference though autograd watches them.

What is looked at before training (is the loss a sum, which buffers follow the samples) needs gradients to be recorded,
because a loss without one is refused, and takes several samples at once. What autograd would save for a backward of
them may not fit where one micro-batch does, and is dropped.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import torch
from torch.autograd.graph import saved_tensors_hooks

Found = TypeVar("Found")

REFUSED = "saved tensor hooks"
"""What torch.func's transforms say of a context that drops them (torch/_functorch/vmap.py)."""


def forward_only(compute: Callable[[], Found]) -> Found:
    """What `compute` returns, with nothing saved for a backward.

    It is called again with everything saved where it takes gradients itself (a penalty on them, torch.func), and so has
    to leave nothing behind. Every rank finds the same, as all run the same code.
    """
    dropped = _Dropped()
    try:
        with dropped.saving_nothing():
            found = compute()
    except Exception as error:
        if not dropped.missed and REFUSED not in str(error):
            raise
    else:
        # What misses a tensor may have been caught on the way, and taken for a fault of the model.
        if not dropped.missed:
            return found
    return compute()


class _Dropped:
    """Whether anybody has missed what was dropped."""

    def __init__(self) -> None:
        self.missed = False

    @contextmanager
    def saving_nothing(self) -> Iterator[None]:
        with saved_tensors_hooks(_drop, self._miss):
            yield

    def _miss(self, nothing: Any) -> NoReturn:
        self.missed = True
        raise RuntimeError("a gradient is taken of a forward that has saved nothing")


def _drop(tensor: torch.Tensor) -> None:
    """In place of the tensor, nothing is kept."""
