"""The rounds of a training: how the ranks are compared, how all of them hear of a finding, and what follows it.

All ranks hold their rounds at the same steps, so all of them tell, go on or end together.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, final

import torch
import torch.distributed as dist

from allranks.config import GuardConfig
from allranks.errors import GuardError
from allranks.stepping.alike import everyones
from allranks.stepping.pace import STEPS
from allranks.stepping.posting import Posted
from allranks.stepping.recomputing import Recomputing
from allranks.stepping.sentinel import RoundSentinel
from allranks.verdict import Verdict

CHECKPOINT: Final = "checkpoint"
DAMAGED = frozenset(("replicas", "shards", STEPS, CHECKPOINT, Recomputing.name))
"""What these find is in the parameters, or in the checkpoint, already: nothing of it may be saved.

Those of them that compare ranks do so before each save, too: what was saved was alike, so a run can go back to it.
"""


@final
class Findings:
    """What sentinels have found: told of once, by name.

    Args:
        tell: takes a verdict, and the step it is about.
        muting: how a user mutes the sentinel `{name}`.
    """

    def __init__(
        self, guard: GuardConfig, tell: Callable[[Verdict, int], None], muting: str = "guard.mute={name}"
    ) -> None:
        self._guard, self._tell, self._muting = guard, tell, muting
        self.told = set(guard.muted)

    def conclude(self, name: str, verdict: Verdict | None, step: int) -> None:
        """Tell of what the sentinel `name` has found, once. Raises GuardError, on every rank, where it ends the run."""
        if verdict is None or name in self.told:
            return
        self.told.add(name)
        stops = name in DAMAGED if self._guard.on_finding is None else self._guard.on_finding == "stop"
        ending = "the run ends, and nothing more is saved" if stops else "the run goes on"
        remedy = f"{verdict.next}; {self._muting.format(name=name)} silences this sentinel"
        told = Verdict(verdict.kind, f"{verdict.what}; {ending}", verdict.evidence, remedy)
        self._tell(told, step)
        if stops:
            raise GuardError(f"{told.what}; {told.next}")


@final
class Comparing:
    """Has the ranks of a group compare what they hold, and hear of what each of them has noticed."""

    def __init__(
        self, posted: Posted, findings: Findings, group: dist.ProcessGroup | None, device: torch.device
    ) -> None:
        self._posted, self._findings = posted, findings
        self._group, self._device = group, device
        self._left = list(posted.comparing)
        self._compared: int | None = None

    def due(self, step: int) -> bool:
        """Whether the ranks are compared after `step` steps."""
        return self._posted.rounds.due(step) and bool(self._left)

    def compare(self, step: int) -> None:
        """Compare the ranks after step `step`, in one exchange for all sentinels; collective.

        Raises:
            GuardError: a finding ends the run.
        """
        self._compare(self._left, step)

    def compare_copies(self, step: int) -> None:
        """Compare what is saved of step `step`, but for what was compared after it already; collective.

        Samples and random numbers are left to the rounds, which their sentinels prepare for while the step is made.

        Raises:
            GuardError: a finding ends the run.
        """
        if step != self._compared and not self._posted.rounds.off:
            self._compare([one for one in self._left if one.name in DAMAGED], step)

    def _compare(self, sentinels: Sequence[RoundSentinel], step: int) -> None:
        self._compared = step
        if not sentinels:
            return
        told = everyones({one.name: one.tell() for one in sentinels}, self._group, self._device)
        verdicts = {one.name: one.judge([rank[one.name] for rank in told], step) for one in sentinels}
        # One that has found something would find it again in every round.
        self._left = [one for one in self._left if verdicts.get(one.name) is None]
        for name, verdict in verdicts.items():
            self._findings.conclude(name, verdict, step)

    def hear(self, step: int) -> None:
        """Have all ranks hear of what some have noticed; collective. Raises GuardError: a finding ends the run."""
        noticed = {name: verdict.to_json() for name, verdict in self._posted.watch.noticed.items()}
        heard = everyones(noticed, self._group, self._device)
        names = list(dict.fromkeys(name for one in heard for name in one))
        self._posted.watch.heard(names)
        for name in names:
            self._findings.conclude(name, _of_ranks(name, heard), step)


def _of_ranks(name: str, heard: Sequence[Any]) -> Verdict:
    """What the first rank says that has noticed it, and which ranks have."""
    ranks = [rank for rank, one in enumerate(heard) if name in one]
    first = heard[ranks[0]][name]
    where = () if len(heard) == 1 else (f"on rank {', '.join(map(str, ranks))}",)
    return Verdict(first["kind"], first["what"], (*first["evidence"], *where), first["next"])
