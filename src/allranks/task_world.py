"""What a Task may ask of the other ranks: their rows, for a loss over all samples of a forward (contrastive ones).

Outside a step, as at the start or in a script of the user's own, a Task is alone: its rows are all there are.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol, final

import torch


class Rows(Protocol):
    """The rows of all ranks that run a forward together."""

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """All of them, in rank order, with gradients."""
        ...

    def offset(self, rows: torch.Tensor) -> int:
        """Where this rank's begin among them."""
        ...


@final
class TaskWorld:
    """`self.world` in a Task's `loss`, `metrics` and `step`; each call is collective, and so is a gather's backward."""

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows (dim 0) of all data-parallel ranks in this forward, in rank order, with gradients.

        Each rank may bring another number of rows. The ranks' losses are added up: let each sum over its own samples.
        """
        return _ROWS.get().gather(rows)

    def offset(self, rows: torch.Tensor) -> int:
        """The number of rows before this rank's in `gather(rows)`: row i of `rows` is its row `offset + i`."""
        return _ROWS.get().offset(rows)


@final
class Alone:
    """The only rank.

    Attributes:
        asked: whether anything was gathered.
    """

    def __init__(self) -> None:
        self.asked = False

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """The same rows."""
        self.asked = True
        return rows

    def offset(self, rows: torch.Tensor) -> int:
        """0."""
        return 0


@contextmanager
def rows_of(rows: Rows) -> Iterator[None]:
    """Inside, `self.world` of every Task gathers by `rows`."""
    before = _ROWS.set(rows)
    try:
        yield
    finally:
        _ROWS.reset(before)


_ROWS: ContextVar[Rows] = ContextVar("rows", default=Alone())  # noqa: B039 (its one flag means nothing there)
