"""The forward of one stage of a pipeline on one micro-step, as a model's own checkpoint finds it again in the backward.

A model that checkpoints its blocks puts torch.utils.checkpoint around the call at which a stage begins. What torch then
keeps for the second run are the zeros in place of what was received. So the run stays known as long as that needs it
(own_checkpoints.py), and its zeros are answered again with what was received for them.

torch's reentrant checkpoint runs a block inside of an autograd function whose inputs are those zeros: what was received
gets no gradient there, whatever is put in. That is refused.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any, final

import torch
from torch.autograd.function import FunctionCtx
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from allranks.errors import LayoutError
from allranks.parallel.dependence import Dependence

Payload = tuple[torch.Tensor, ...]


@final
class StageRun:
    """What is known of it.

    Args:
        stage: which one.
        received: what the stage before has sent; () for the first.
        dependence: what follows this forward, if it is followed.

    Attributes:
        live: whether what runs is this stage's.
        left: whether the next stage's first module has been called.
        over: whether the forward has ended, so that what runs is computed again.
    """

    def __init__(self, stage: int, received: Payload, dependence: Dependence | None) -> None:
        self.stage, self.received, self.dependence = stage, received, dependence
        self.live = stage == 0
        self.left = self.over = False
        self._learns = torch.is_grad_enabled()
        self._instead: Any = WeakTensorKeyDictionary()  # zeros that the forward has -> what was received for them

    def put(self, name: str, zeros: torch.Tensor, received: torch.Tensor) -> None:
        """Module `name` gets `received`, and so do all that are called with these zeros. Raises LayoutError."""
        self._check_learns(name)
        self._instead[zeros] = received

    def replace(self, name: str, args: Any, kwargs: Any) -> Any:
        """The arguments of module `name` with what was received in place of the zeros. Raises LayoutError."""
        leaves, spec = pytree.tree_flatten((args, kwargs)) if len(self._instead) else ([], None)
        if spec is None or not any(map(self._is_known, leaves)):
            return args, kwargs  # the very objects: a block may change them
        self._check_learns(name)
        found = [self._instead[leaf] if self._is_known(leaf) else leaf for leaf in leaves]
        return pytree.tree_unflatten(found, spec)

    def _is_known(self, leaf: object) -> bool:
        return isinstance(leaf, torch.Tensor) and leaf in self._instead

    def _check_learns(self, name: str) -> None:
        if self._learns and not torch.is_grad_enabled() and _in_function():
            raise LayoutError(
                f"{name} is checkpointed by the model with use_reentrant=True, where what another stage has sent to it "
                "gets no gradient: say use_reentrant=False there, or leave it to layout.recompute=full"
            )


_RUN: ContextVar[StageRun | None] = ContextVar("run", default=None)


def current_run() -> StageRun | None:
    """The run to which what runs now belongs, in a forward, or again in a backward; None outside of all."""
    return _RUN.get()


@contextmanager
def running(run: StageRun) -> Iterator[None]:
    """Inside is the forward of `run`."""
    before = _RUN.set(run)
    try:
        yield
    finally:
        run.over = True
        _RUN.reset(before)


def _in_function() -> bool:
    """Whether a forward of an autograd function runs, which takes its context first."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        first = frame.f_code.co_varnames[:1]
        if first and isinstance(frame.f_locals.get(first[0]), FunctionCtx):
            return True
        frame = frame.f_back
    return False
