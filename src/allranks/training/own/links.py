"""Replicas that send each other less than their gradients in a loop of one's own: `layout.ddp_hook`, `local_sgd`.

A Task's loss is multiplied by what makes its gradient that of the global batch before its backward. A loop hands over a
sum whose number of targets the ranks agree on afterwards, so that what has to be in that unit earlier is brought to it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

import torch
import torch.distributed as dist

from allranks.data.stream import DataStream
from allranks.errors import LayoutError, TaskError
from allranks.parallel.gather import RanksRows
from allranks.parallel.spread import Spread
from allranks.stepping.agreement import Agreement
from allranks.stepping.outer import OuterOptimizer, make_outer

ORDER_OF_MAPS = "global"


@final
class Links:
    """What a world's step does about them.

    Attributes:
        outer: puts the copies of local_sgd together; None where there are none.
    """

    def __init__(self, agreement: Agreement) -> None:
        self.outer: OuterOptimizer | None = None
        self._agreement = agreement
        self._begun = self._divided = False

    def take(self, spread: Spread) -> None:
        """The model that is trained. Raises LayoutError where nobody knows which step is its copies' last."""
        self.outer = make_outer(spread, order=ORDER_OF_MAPS)

    def check_stream(self, order: DataStream, steps: int | None) -> None:
        """Refuse a loop that would end, or could end, where the copies are apart. Raises LayoutError."""
        if self.outer is None:
            return
        given, every = f"layout.local_sgd={self.outer.every}", self.outer.every
        if order.order == "sharded" or order.steps_total is None:
            who = "data that shards itself" if order.order == "sharded" else "data of unknown length without steps="
            raise LayoutError(f"{given} has to know which step is the last, and {who} does not say it")
        if steps is not None and steps % every:
            near = " or ".join(str(n) for n in (steps // every * every, (steps // every + 1) * every) if n)
            raise LayoutError(
                f"world.stream(steps={steps}): the loop ends where the copies of {given} are one, every {every} steps: "
                f"{near} fits"
            )

    def check_one(self, call: str) -> None:
        """Refuse what means one model while there are several. Raises TaskError."""
        if self.outer is not None and self.outer.apart:
            raise TaskError(
                f"{call}: the copies of layout.local_sgd={self.outer.every} are apart; they are one after every "
                f"{self.outer.every} steps, and at the end of the stream"
            )

    def check_apart(self, call: str) -> None:
        """Refuse what would have the copies speak in between. Raises LayoutError."""
        if self.outer is not None:
            raise LayoutError(
                f"{call}: layout.local_sgd={self.outer.every} lets the copies of a model train by themselves in "
                "between: leave one of them out"
            )

    def rows(self, call: str, group: dist.ProcessGroup | None, weight: int) -> RanksRows:
        """For losses that compare the samples of all ranks of `group`. Raises LayoutError where copies are apart."""
        self.check_apart(f"world.{call}()")
        return RanksRows(group, counts=weight > 0)

    def begin(self) -> None:
        """Before a step: where the copies are at the first one, each by the values that it was given, they are one."""
        if self.outer is not None and not self._begun:
            self.outer.begin()
        self._begun = True

    @contextmanager
    def reducing(self, spread: Spread, step: int, targets: int) -> Iterator[None]:
        """Around the last backward of step number `step`, from 0; this rank has `targets` in it; collective.

        What PowerSGD has not sent waits for the next step, which may have more targets: it is kept in gradients that
        are divided, so that the ranks agree on their number here, and wait for it.
        """
        if spread.hook is None:
            yield
            return
        scale = None
        if spread.hook.powersgd is not None:
            scale, self._divided = _divisor(spread, self._agreement.count(targets)), True
        with spread.hook.within(step, scale):
            yield

    def divide(self, spread: Spread, targets: torch.Tensor) -> torch.Tensor | None:
        """By what the gradients are still to be multiplied, where the step has `targets`; None: by nothing."""
        return None if self._divided else _divisor(spread, targets)

    def abandon(self, spread: Spread) -> None:
        """Forget a step that is not made. What PowerSGD had not sent before it stays, unless gradients have gone in."""
        if self._divided and spread.hook is not None and spread.hook.powersgd is not None:
            spread.hook.powersgd.begin_anew(torch.ones(()))
        self._divided = False

    def finish_step(self, step: int, steps_total: int | None) -> None:
        """After the update that makes `step` steps of `steps_total`; collective where the copies meet."""
        self._divided = False
        if self.outer is not None:
            self.outer.finish_step(step, last=step == steps_total)


def _divisor(spread: Spread, targets: torch.Tensor) -> torch.Tensor:
    """What makes a mean over the ranks, of one copy or of all, the copy's even share of the sum, or the sum (law 3)."""
    return spread.mesh.layout.sample_ranks / targets.clamp(min=1.0)
