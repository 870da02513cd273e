"""What is checkpointed is computed again in the context of its first run: a model's own torch.utils.checkpoint, too.

What a layout has changed for the length of a forward (attention over whole sequences, whose rows count in a BatchNorm,
which stage of a pipeline runs) is in context variables. A backward runs after that forward has ended, and on CUDA in
another thread, so that what torch's checkpoint computes again there would find none of it: gradients of another
computation, without a word. Both variants of torch take the function to run as an argument, and get it with its
context. What a layout recomputes (recompute.py) brings its own.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from typing import Any, final

from torch.utils import checkpoint as torchs

_AGAIN: ContextVar[bool] = ContextVar("again", default=False)


@final
class Noted:
    """Whether a torch.utils.checkpoint has begun.

    Attributes:
        any: that.
    """

    def __init__(self) -> None:
        self.any = False


_NOTED: ContextVar[Noted | None] = ContextVar("noted", default=None)


def keep_contexts() -> None:
    """From now on every torch.utils.checkpoint of this process keeps its context; a second call changes nothing."""
    module: Any = torchs
    generator, function = module._checkpoint_without_reentrant_generator, module.CheckpointFunction
    if getattr(generator, "keeps_context", False):
        return
    forward = function.forward

    def begin(run: Callable[..., Any], *rest: Any, **named: Any) -> Any:
        _note()
        # The first run is made beside it: what torch gets here is only for later ones.
        kept = run if isinstance(run, InContext) else InContext(run, is_first=False)
        return generator(kept, *rest, **named)

    def begin_reentrant(ctx: Any, run: Callable[..., Any], *rest: Any) -> Any:
        _note()
        return forward(ctx, InContext(run, is_first=True), *rest)

    begin.keeps_context = True  # type: ignore[attr-defined]
    module._checkpoint_without_reentrant_generator = begin
    function.forward = staticmethod(begin_reentrant)


@contextmanager
def noted() -> Iterator[Noted]:
    """Notes whether a checkpoint begins inside; only after `keep_contexts`."""
    found = Noted()
    before = _NOTED.set(found)
    try:
        yield found
    finally:
        _NOTED.reset(before)


def runs_again() -> bool:
    """Whether what runs now is a later run of `InContext`."""
    return _AGAIN.get()


def _note() -> None:
    if (found := _NOTED.get()) is not None:
        found.any = True


@final
class InContext:
    """A function to be checkpointed, of which later runs are made in the context in which this was made.

    The first run is the caller's own.

    Args:
        is_first: whether the first run is the next call.
    """

    def __init__(self, function: Callable[..., Any], *, is_first: bool) -> None:
        self._function, self._is_first = function, is_first
        self._context = copy_context()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_first:
            self._is_first = False
            return self._function(*args, **kwargs)
        own = self._context.copy()
        own.run(_AGAIN.set, True)
        return own.run(self._function, *args, **kwargs)
