"""Whether BatchNorm has samples enough in a short last step of a loop, of which nobody knows before what it calls.

A Task's BatchNorms are shown one sample before the first step (stepping/last_step.py). A loop's are watched in its
first one: where the last step is too short for a BatchNorm of rows, one that gets no more values than its forward has
samples would have a single one there.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import final

from torch import nn

from allranks.data.micro_step import StepBatch
from allranks.parallel.batchnorm import uses_batch_statistics
from allranks.parallel.compiled import uncompiled
from allranks.parallel.spread import Spread
from allranks.stepping.alike import everyones
from allranks.stepping.last_step import ShortStep, watch_batch_norms
from allranks.stepping.world import Processes


@final
class FirstStep:
    """The first step of a loop whose last one is `short`.

    Args:
        spreads: of the models that the loop calls.
        is_evaluating: whether a forward is one of an evaluation.
    """

    def __init__(
        self, short: ShortStep, spreads: Sequence[Spread], processes: Processes, is_evaluating: Callable[[], bool]
    ) -> None:
        self._short, self._spreads, self._processes = short, spreads, processes
        self._is_evaluating = is_evaluating
        self._fewest, self._found = 1, ""

    def begin(self, batch: StepBatch) -> None:
        """The step of `batch` begins, which may be made anew after a break."""
        self._fewest = max(1, min(len(micro_step.positions) for micro_step in batch.micro_steps))
        self._found = ""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, the forwards of a micro-batch are watched; not compiled, for who looks on cannot be compiled."""
        with ExitStack() as entered:
            entered.enter_context(uncompiled())
            for spread in self._spreads:
                for handle in watch_batch_norms(spread.bare(), self._look):
                    entered.callback(handle.remove)
            yield

    def _look(self, name: str, part: nn.Module, values: int) -> None:
        if values <= self._fewest and uses_batch_statistics(part) and not self._is_evaluating():
            self._found = self._found or name

    def finish(self) -> None:
        """Its last backward is made, and no update; collective.

        Raises:
            ConfigError: on every rank: the last step would have too few samples.
        """
        names = everyones(self._found, self._processes.world_group, self._processes.device)
        if name := next(filter(None, names), ""):
            raise self._short.refusal(name, f"world.stream(steps={self._short.steps_total - 1})")
