"""The sentinels of `allranks train`: when they look, the agreement of each step, and the proof of a checkpoint.

All ranks read the same agreements and hold their rounds at the same steps, so all of them tell, go on or end together.
"""

from collections.abc import Callable
from pathlib import Path
from typing import final

from allranks.checkpointing.checkpoint import Checkpoint
from allranks.data.micro_step import StepBatch
from allranks.stepping.agreement import Agreed, Pending
from allranks.stepping.alike import everyones
from allranks.stepping.pace import STEPS, explain_pace
from allranks.stepping.session import Session
from allranks.training.comparing import CHECKPOINT, Comparing, Findings
from allranks.training.proof import prove, prove_what_was_due, what_is_due
from allranks.training.snapshot import Contents
from allranks.verdict import Verdict


@final
class Sentinels:
    """Watches over a training.

    Args:
        tell: takes a verdict, and the step it is about.
    """

    def __init__(self, session: Session, tell: Callable[[Verdict, int], None]) -> None:
        self._session, self._watch = session, session.posted.watch
        self._group, self._device = session.processes.world_group, session.processes.device
        self._findings = Findings(session.config.guard, tell)
        self._comparing = Comparing(session.posted, self._findings, self._group, self._device)

    def read(self, pending: Pending, step: int) -> Agreed:
        """What was agreed in step `step` (from 1); collective where somebody has noticed something.

        Raises:
            TaskError: the ranks ran different modules.
            GuardError: a finding ends the run.
        """
        agreed = pending.read()
        if agreed.diverged:
            verdict = explain_pace(pending, step, self._group, self._device)
            self._watch.compare_no_pace()
            self._findings.conclude(STEPS, verdict, step)
        if agreed.noticed:
            self._comparing.hear(step)
        return agreed

    def due(self, step: int) -> bool:
        """Whether the ranks are compared after `step` steps; not while the copies of local_sgd are apart."""
        return self._comparing.due(step) and not self._apart

    def compare(self, step: int) -> None:
        """Compare the ranks after step `step`; collective. Raises GuardError: a finding ends the run."""
        self._comparing.compare(step)

    def compare_copies(self, step: int) -> None:
        """Compare what is saved of step `step`, as `due` and `compare`; collective. Raises GuardError."""
        if not self._apart:
            self._comparing.compare_copies(step)

    @property
    def _apart(self) -> bool:
        outer = self._session.outer
        return outer is not None and outer.apart

    def recomputes(self, step: int) -> bool:
        """Whether gradients are computed twice after step `step`."""
        recomputing = self._session.posted.recomputing
        return recomputing is not None and recomputing.due(step) and recomputing.name not in self._findings.told

    def recompute(self, batch: StepBatch, step: int) -> None:
        """Compute gradients of `batch`, of which step `step` was made, twice, and compare; collective.

        Raises:
            GuardError: a finding ends the run.
        """
        recomputing = self._session.posted.recomputing
        assert recomputing is not None
        told = everyones(recomputing.tell(batch), self._group, self._device)
        self._findings.conclude(recomputing.name, recomputing.judge(told, step), step)

    def prove(self, checkpoint: Checkpoint, contents: Contents) -> None:
        """Hold a checkpoint of `contents`, saved just now, against the run; collective.

        Raises:
            GuardError: a finding ends the run.
        """
        if CHECKPOINT not in self._findings.told:
            self._findings.conclude(CHECKPOINT, prove(checkpoint, self._session, contents), checkpoint.step)

    def expect(self, contents: Contents) -> Callable[[Path], None]:
        """Of a checkpoint of `contents` that is begun now: what holds it against the run as it is now, once it is
        committed. Both raise as `prove`; the second is collective.
        """
        due = what_is_due(self._session, contents)

        def hold(path: Path) -> None:
            if CHECKPOINT not in self._findings.told:
                verdict = prove_what_was_due(path, due, self._session.processes)
                self._findings.conclude(CHECKPOINT, verdict, int(due.state["step"]))

        return hold
