"""The sentinels of a loop of one's own: the ranks are compared after its first step, and every so many.

What `allranks train` hears in the agreement of every step is told in these rounds. The learning rate and the steps are
the user's: nobody watches them.
"""

from collections.abc import Callable
from typing import final

from allranks.data.micro_step import StepBatch
from allranks.parallel.spread import Spread
from allranks.stepping.linkage import Linkage
from allranks.stepping.optimizer import Optimizers
from allranks.stepping.posting import Posted, post_sentinels
from allranks.training.comparing import Comparing, Findings
from allranks.training.own.ground import Ground
from allranks.training.own.loop import OwnLoop
from allranks.training.own.step import OwnStep
from allranks.verdict import Verdict


@final
class OwnWatch:
    """Watches over a model and the optimizer that steps it.

    Args:
        step: what it looks at, with all that follows the parameters.
        loop: the loop that is under way.
    """

    def __init__(self, ground: Ground, step: OwnStep, loop: Callable[[], OwnLoop]) -> None:
        self._guard, self._processes, self._step, self._loop = ground.config.guard, ground.processes, step, loop
        step.look = self._look
        self._findings = Findings(self._guard, self._tell)
        self._linked: tuple[Spread, Optimizers, Linkage] | None = None
        self._posted: Posted | None = None
        self._comparing: Comparing | None = None

    def link(self, spread: Spread, optimizers: Optimizers) -> None:
        """From here on `optimizers` hold the parameters of `spread`."""
        self._linked = (spread, optimizers, Linkage(spread, optimizers))
        self._posted = self._comparing = None

    def finish_step(self, step: int) -> None:
        """Compare the ranks, where that is due after step `step` (from 1); collective then.

        Raises:
            GuardError: on every rank: a finding ends the run.
        """
        outer = self._step.links.outer
        if self._comparing is None or not self._comparing.due(step) or (outer is not None and outer.apart):
            return
        self._comparing.hear(step)  # first: what a rank has noticed by itself says more than a comparison
        self._comparing.compare(step)

    def _look(self, batch: StepBatch) -> None:
        """Right after the last backward in the step of `batch`, before the user's next line."""
        if self._linked is None:
            return
        if self._posted is None:
            spread, optimizers, linkage = self._linked
            order, averages = self._loop().order, self._step.averages
            given = self._guard, self._processes, spread, optimizers, None, order, averages
            self._posted = post_sentinels(*given, linkage=linkage)
            group, device = self._processes.world_group, self._processes.device
            self._comparing = Comparing(self._posted, self._findings, group, device)
        self._posted.watch.look("", batch)

    def _tell(self, verdict: Verdict, step: int) -> None:
        self._loop().open().write("verdict", step=step, **verdict.to_json())
        self._loop().say(f"warning: {verdict}")
