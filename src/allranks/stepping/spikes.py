"""Spikes of the loss and of the gradient norm, by statistics that a spike does not move: median and MAD of a window.

A value is a spike where it lies more than `threshold` robust deviations (1.4826 times the median absolute deviation,
which is a standard deviation where values are normal) above the window's median, and a multiple of the median too: a
loss that hardly moves has a small deviation, and 2% more is no spike. Of a loss that is twice the median. Gradient
norms have a long tail in runs in which nothing is wrong (the demo's reach three times their median once in a thousand
steps, its loss one and a half times): of a norm it is five times the median.

Source: Leys et al., "Detecting outliers: Do not use standard deviation around the mean, use absolute deviation around
the median" (2013).
"""

import bisect
import math
from collections import deque
from statistics import median
from typing import final

import torch
import torch.distributed as dist

from allranks.config import Config
from allranks.errors import ConfigError
from allranks.parameter_map import Box, Entry
from allranks.stepping.alike import on_any_rank
from allranks.stepping.world import Processes
from allranks.task import Task, has_step

TO_DEVIATIONS = 1.4826
FEWEST = 20
"""Values that a window must have before anything is called a spike (all of a smaller window)."""
ABOVE = {"loss": 1.0, "grad_norm": 4.0}
"""How many times its distance from zero a spike lies above the median, at least."""
STORED = 1000
"""Norms that a checkpoint keeps, whatever the window: the most that a window may have."""


@final
class Window:
    """The newest values, at most `size`; a spike lies `above` times the median's size above the median, or farther."""

    def __init__(self, size: int, threshold: float, above: float) -> None:
        self._threshold, self._above = threshold, above
        self._fewest = min(size, FEWEST)
        self._values: deque[float] = deque(maxlen=size)
        self._sorted: list[float] = []

    def add(self, value: float) -> float | None:
        """Take a value in; the median that it lies far above, if it is a spike. One that is not finite is passed over.

        A spike is taken in, too: a level that stays becomes the median in time.
        """
        if not math.isfinite(value):
            return None
        found = self._judge(value)
        if len(self._values) == self._values.maxlen:
            self._sorted.pop(bisect.bisect_left(self._sorted, self._values[0]))
        self._values.append(value)
        bisect.insort(self._sorted, value)
        return found

    def _judge(self, value: float) -> float | None:
        if len(self._values) < self._fewest:
            return None
        middle = self._sorted[len(self._sorted) // 2]
        if value <= middle + self._above * abs(middle):  # nearly always: the deviation is not asked for
            return None
        deviation = TO_DEVIATIONS * median(abs(other - middle) for other in self._sorted)
        return middle if value > middle + self._threshold * deviation else None


@final
class SpikeJudge:
    """Has the ranks leave out a step whose gradient norm is a spike, at most `times` in a run.

    Args:
        group: all ranks, which agree by one small reduction more; None for one.

    Attributes:
        prefix: how its names in a checkpoint begin: a resumed run judges as the uninterrupted one.
        found: step (from 1) -> (norm, median) of those that were left out.
    """

    prefix = "spikes."

    def __init__(
        self, size: int, threshold: float, times: int, device: torch.device, group: dist.ProcessGroup | None
    ) -> None:
        self._size, self._threshold, self._times = size, threshold, times
        self._device, self._group = device, group
        self._num_ranks = 1 if group is None else dist.get_world_size(group)
        self._norms = torch.full((STORED,), math.nan, dtype=torch.float64)
        self._skipped = torch.zeros((), dtype=torch.int64)
        self.found: dict[int, tuple[float, float]] = {}

    def judge(self, norm: float, step: int) -> bool:
        """Whether step `step` (from 1) is left out for its norm, on all ranks alike; collective."""
        window = Window(self._size, self._threshold, ABOVE["grad_norm"])
        for other in self._norms[-self._size :].tolist():
            window.add(other)
        middle = window.add(norm)
        if math.isfinite(norm):
            self._norms.copy_(self._norms.roll(-1))
            self._norms[-1] = norm
        spike = on_any_rank(middle is not None and int(self._skipped) < self._times, self._device, self._group)
        if spike:
            self._skipped += 1
            self.found[step] = (norm, math.nan if middle is None else middle)
        return spike

    def parts(self) -> list[tuple[Entry, torch.Tensor]]:
        """Its tensors, by their names in the checkpoint; every rank holds them."""
        everyone = tuple(range(self._num_ranks))
        return [
            (entry_of(f"{self.prefix}{name}", value, everyone), value)
            for name, value in (("norms", self._norms), ("skipped", self._skipped))
        ]

    def aliases(self) -> dict[str, str]:
        """None of them is tied."""
        return {}

    def begin(self) -> None:
        """Begin with an empty window, which it has."""


def make_judge(task: Task, config: Config, processes: Processes) -> SpikeJudge | None:
    """The judge of a run whose config asks for one. Raises ConfigError where one norm a step does not tell enough."""
    guard, device = config.guard, processes.device
    if guard.spike != "skip":
        return None
    if has_step(task):
        raise ConfigError(
            f"guard.spike=skip watches one gradient norm a step, and {type(task).__name__} has a step() of its own: "
            "use guard.spike=log"
        )
    if config.train.precision == "float16":
        raise ConfigError(
            "guard.spike=skip does not go with the scale of train.precision=float16: use bfloat16, or log"
        )
    return SpikeJudge(guard.spike_window, guard.spike_threshold, guard.spike_times, device, processes.world_group)


def entry_of(name: str, value: torch.Tensor, holders: tuple[int, ...]) -> Entry:
    """Who a tensor of a judge is that all of `holders` have alike."""
    shape = tuple(value.shape)
    return Entry(name, shape, str(value.dtype).removeprefix("torch."), Box.whole(shape), holders)
