"""The sentinels of a training: when they look, how all ranks hear of a finding, and what follows it.

All ranks read the same agreements and hold their rounds at the same steps, so all of them tell, go on or end together.
"""

from collections.abc import Callable
from typing import final

from allranks.checkpointing.checkpoint import Checkpoint
from allranks.checkpointing.parts import Parts
from allranks.errors import GuardError
from allranks.stepping.agreement import Agreed, Pending
from allranks.stepping.alike import everyones
from allranks.stepping.pace import STEPS, explain_pace
from allranks.stepping.session import Session
from allranks.training.proof import prove
from allranks.verdict import Verdict

CHECKPOINT = "checkpoint"
DAMAGED = frozenset(("replicas", "shards", STEPS, CHECKPOINT))
"""What these find is in the parameters, or in the checkpoint, already: nothing of it may be saved."""


@final
class Sentinels:
    """Watches over a training.

    Args:
        tell: takes a verdict, and the step it is about.
    """

    def __init__(self, session: Session, tell: Callable[[Verdict, int], None]) -> None:
        self._session, self._watch, self._tell = session, session.posted.watch, tell
        self._guard = session.config.guard
        self._group, self._device = session.processes.world_group, session.processes.device
        self._comparing = list(session.posted.comparing)
        self._told = set(self._guard.muted)

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
            self.conclude(STEPS, verdict, step)
        if agreed.noticed:
            self._hear(step)
        return agreed

    def due(self, step: int) -> bool:
        """Whether the ranks are compared after `step` steps; not while the copies of local_sgd are apart."""
        outer = self._session.outer
        due = self._session.posted.rounds.due(step) and bool(self._comparing)
        return due and (outer is None or not outer.apart)

    def compare(self, step: int) -> None:
        """Compare the ranks after step `step`, in one exchange for all sentinels; collective.

        Raises:
            GuardError: a finding ends the run.
        """
        told = everyones({one.name: one.tell() for one in self._comparing}, self._group, self._device)
        verdicts = {one.name: one.judge([rank[one.name] for rank in told], step) for one in self._comparing}
        # One that has found something would find it again in every round.
        self._comparing = [one for one in self._comparing if verdicts[one.name] is None]
        for name, verdict in verdicts.items():
            self.conclude(name, verdict, step)

    def prove(self, checkpoint: Checkpoint, parts: Callable[[], Parts]) -> None:
        """Hold a checkpoint that was saved just now against the run; collective.

        Raises:
            GuardError: a finding ends the run.
        """
        if CHECKPOINT not in self._told:
            self.conclude(CHECKPOINT, prove(checkpoint, self._session, parts), checkpoint.step)

    def conclude(self, name: str, verdict: Verdict | None, step: int) -> None:
        """Tell of what the sentinel `name` has found, once. Raises GuardError, on every rank, where it ends the run."""
        if verdict is None or name in self._told:
            return
        self._told.add(name)
        stops = name in DAMAGED if self._guard.on_finding is None else self._guard.on_finding == "stop"
        ending = "the run ends, and nothing more is saved" if stops else "the run goes on"
        remedy = f"{verdict.next}; guard.mute={name} silences this sentinel"
        told = Verdict(verdict.kind, f"{verdict.what}; {ending}", verdict.evidence, remedy)
        self._tell(told, step)
        if stops:
            raise GuardError(f"{told.what}; {told.next}")

    def _hear(self, step: int) -> None:
        """Have all ranks hear of what some have noticed; collective."""
        noticed = {name: verdict.to_json() for name, verdict in self._watch.noticed.items()}
        heard = everyones(noticed, self._group, self._device)
        names = list(dict.fromkeys(name for one in heard for name in one))
        self._watch.heard(names)
        for name in names:
            ranks = [rank for rank, one in enumerate(heard) if name in one]
            first = heard[ranks[0]][name]
            where = () if len(heard) == 1 else (f"on rank {', '.join(map(str, ranks))}",)
            verdict = Verdict(first["kind"], first["what"], (*first["evidence"], *where), first["next"])
            self.conclude(name, verdict, step)
