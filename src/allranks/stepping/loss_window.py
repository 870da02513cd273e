"""The losses of the last steps, which all ranks hold alike and a checkpoint keeps: is the next one a spike?

A loss is agreed by all ranks in the step itself, so that all of them judge the same number and nobody has to be asked.
"""

import math
from typing import final

import torch

from allranks.config import Config
from allranks.errors import ConfigError
from allranks.parameter_map import Entry
from allranks.stepping.spikes import ABOVE, STORED, Window, entry_of
from allranks.stepping.world import Processes
from allranks.task import Task, has_step


@final
class LossWindow:
    """The window of a run that goes back behind spikes.

    Args:
        size: losses that a new one is compared with.
        threshold: robust deviations, as of a Window.
        num_ranks: which hold it, all alike.

    Attributes:
        prefix: how its names in a checkpoint begin: a resumed run judges as the uninterrupted one.
    """

    prefix = "losses."

    def __init__(self, size: int, threshold: float, num_ranks: int) -> None:
        self._size, self._threshold, self._num_ranks = size, threshold, num_ranks
        self._losses = torch.full((STORED,), math.nan, dtype=torch.float64)
        self._window: Window | None = None

    def add(self, loss: float) -> float | None:
        """Take the loss of a step in, per target; the median that it lies far above, if it is a spike."""
        if self._window is None:  # only now: what a checkpoint held has been read
            self._window = Window(self._size, self._threshold, ABOVE["loss"])
            for other in self._losses[-self._size :].tolist():
                self._window.add(other)
        if math.isfinite(loss):
            self._losses.copy_(self._losses.roll(-1))
            self._losses[-1] = loss
        return self._window.add(loss)

    def parts(self) -> list[tuple[Entry, torch.Tensor]]:
        """Its tensor, by its name in the checkpoint; every rank holds it."""
        name = f"{self.prefix}window"
        return [(entry_of(name, self._losses, tuple(range(self._num_ranks))), self._losses)]

    def aliases(self) -> dict[str, str]:
        """It is not tied."""
        return {}

    def begin(self) -> None:
        """Begin with an empty window, which it has."""


def make_window(task: Task, config: Config, processes: Processes) -> LossWindow | None:
    """The window of a run whose config asks for rollbacks. Raises ConfigError where one loss does not tell enough."""
    guard = config.guard
    if guard.spike != "rollback":
        return None
    check_window(task, config)
    return LossWindow(guard.spike_window, guard.spike_threshold, processes.size)


def check_window(task: Task, config: Config) -> None:
    """See that the losses of a Task can be judged where its config asks for it. Raises ConfigError."""
    if config.guard.spike == "rollback" and has_step(task):
        raise ConfigError(
            f"guard.spike=rollback watches one loss a step, and {type(task).__name__} has a step() of its own: "
            "use guard.spike=log"
        )
