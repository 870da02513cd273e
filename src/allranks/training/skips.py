"""Steps that were left out because their gradients were not finite: where that came from, and when it is enough.

All ranks read the same agreement, so all of them search, go on or end together.
"""

from collections import deque
from collections.abc import Callable
from typing import final

from allranks.data.micro_step import StepBatch
from allranks.stepping.agreement import Agreed, Pending
from allranks.stepping.origin import Origin
from allranks.stepping.session import Session
from allranks.verdict import Verdict

SEARCHES = 5
"""So often in one attempt is a step made once more to find the origin: it costs as much as a step, or more."""
HALVINGS = 16
"""So many steps in a row float16 may skip before its scale, 65536 at first, is 1 and no longer the reason."""
KEPT = 4
"""Steps whose batches are at hand: an agreement tells of a step that lies up to three back."""
SHOWN = 8

LEFT_OUT = "changed nothing (guard.spike=skip)"
APPLIED = "was applied all the same"

ORDER = ("input", "output", "loss", "parameter_gradient", "output_gradient")
KIND = "not_finite"


@final
class Skips:
    """Looks at every agreement of a training.

    Args:
        tell: takes a verdict after which the training goes on, and the step it is about.
    """

    def __init__(self, session: Session, tell: Callable[[Verdict, int], None]) -> None:
        self._session = session
        self._tell = tell
        self._guard = session.config.guard
        self._scaled = session.spread.precision.scales
        self._recent: deque[tuple[StepBatch, Pending]] = deque(maxlen=KEPT)
        self._row = self._searches = 0
        self._all = True  # whether every rank has left out all steps of the row

    def remember(self, batch: StepBatch, before: Pending) -> None:
        """The step of `batch` begins; `before` carries its targets."""
        self._recent.append((batch, before))

    def see(self, agreed: Agreed, step: int) -> Verdict | None:
        """What ends the run, if the agreement says that step `step` (from 1) was one too many; collective then."""
        spikes = self._session.spikes
        spike = None if spikes is None else spikes.found.pop(step, None)
        if not agreed.skipped or spike is not None:
            self._row, self._all = 0, True
            if spike is not None:
                self._tell(explain_spike("gradient norm", step, *spike, f"the step {LEFT_OUT}"), step)
            return None
        if agreed.skipped < agreed.num_ranks and self._session.outer is None:
            return _not_alike(agreed, step)
        self._row += 1
        self._all = self._all and agreed.skipped == agreed.num_ranks
        limit = self._guard.nonfinite_limit + (HALVINGS if self._scaled else 0)
        ends = self._row >= limit or (self._guard.nonfinite == "stop" and not self._scaled)
        searches = not self._scaled and (ends or self._row == 1) and self._searches < SEARCHES
        found = self._search(step) if searches else None
        if ends:
            return self._end(agreed, step, found)
        if found is not None:
            self._tell(_skipped(agreed, step, found), step)
        return None

    def _search(self, step: int) -> tuple[Origin, ...] | None:
        """What is found where step `step` is made once more; None where its samples are no longer at hand."""
        self._searches += 1
        for batch, before in self._recent:
            if batch.step + 1 == step:
                origins = self._session.step.find_origin(batch, before, self._session.processes.world_group)
                return tuple(sorted(origins, key=lambda one: (ORDER.index(one.kind), one.rank)))
        return None

    def _end(self, agreed: Agreed, step: int, found: tuple[Origin, ...] | None) -> Verdict:
        if self._row < 2:
            where = "" if self._all else f" on {agreed.skipped} of {agreed.num_ranks} ranks"
            what, why = f"the gradients of step {step} are not finite{where}", "guard.nonfinite=stop"
        else:
            where = "" if self._all else " on some ranks"
            what = f"the gradients of {self._row} steps in a row, the last of them step {step}, are not finite{where}"
            why = f"guard.nonfinite_limit={self._guard.nonfinite_limit}"
        move = "train.precision=bfloat16" if self._scaled else "a lower optimizer.lr, or train.max_norm"
        left = "the parameters are as before them, and" if self._all else "the other copies have made them, and all is"
        what += f": the run ends ({why}); {left} saved"
        return Verdict(KIND, what, _evidence(found), f"{_look(found)}; a resume goes on after them: take {move}")


def explain_spike(what: str, step: int, value: float, middle: float, follows: str) -> Verdict:
    """A loss or gradient norm `value` far above the window's median `middle`, and what follows in words."""
    words = f"the {what} of step {step} is a spike: {value:.4g}, where the median is {middle:.4g}; {follows}"
    move = "look at the samples of this step; train.max_norm or a lower optimizer.lr makes spikes smaller"
    return Verdict("spike", words, (), move)


def _skipped(agreed: Agreed, step: int, found: tuple[Origin, ...]) -> Verdict:
    what = f"step {step} changed nothing: its gradients are not finite"
    if agreed.skipped < agreed.num_ranks:  # of copies that train by themselves
        what = f"{agreed.skipped} of {agreed.num_ranks} ranks left step {step} out: their gradients are not finite"
    return Verdict(KIND, what, _evidence(found), f"{_look(found)}; guard.nonfinite=stop ends a run there")


def _look(found: tuple[Origin, ...] | None) -> str:
    if not found:
        return "look at the samples of these steps"
    first = found[0]
    return f"look at {first.name or 'the loss' if first.kind != 'input' else 'the samples'} on rank {first.rank}"


def _evidence(found: tuple[Origin, ...] | None) -> tuple[str, ...]:
    if found is None:
        return ()
    if not found:
        once = "it does not show again where the step is made once more with the parameters of now"
        return (f"{once}: a fault that passes, or a sum that overflows only where gradients meet",)
    return tuple(str(origin) for origin in found[:SHOWN])


def _not_alike(agreed: Agreed, step: int) -> Verdict:
    what = (
        f"{agreed.skipped} of {agreed.num_ranks} ranks found gradients in step {step} that are not finite, the others "
        "did not, and have changed their parameters: copies differ, and nothing more is saved"
    )
    move = "resume from the newest checkpoint; if it comes again, look for the host whose memory or device is at fault"
    return Verdict("ranks_differ", what, (), move)
