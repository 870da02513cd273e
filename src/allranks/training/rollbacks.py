"""Back behind a spike of the loss, and around the samples that led there.

All ranks judge the loss that they have agreed on, so all of them go back together. Rank 0 writes the range of positions
into the run's config, whole or not at all, and every worker ends with an error that means: start again. Who starts them
(the command, torchrun, a scheduler) gets a run that goes on from its newest good checkpoint, as after any fault, and
whose order of samples has that range no more. So a run that is killed on the way has either not gone back yet, and will
meet the spike again, or goes around it; a range cannot be left out twice.

No step is saved before its loss was judged: the newest checkpoint always lies before the spike.
"""

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, NoReturn, final

from allranks.data.micro_step import StepBatch
from allranks.data.stream import DataStream
from allranks.digest import ledger_sum
from allranks.errors import ConfigError, RollbackError, RunError, SpikeError
from allranks.run import Run
from allranks.stepping.agreement import Pending
from allranks.stepping.session import Session
from allranks.training.saves import Saves
from allranks.training.skips import APPLIED, explain_spike
from allranks.verdict import Verdict

KIND = "rollback"
BLOCK = 1 << 16  # positions whose samples are looked up at once


@final
class Rollbacks:
    """Judges the loss of every step of a training, where the config asks for it, before the next one begins.

    Args:
        saves: of this training; knows where its newest checkpoint stands.
        leave_out: writes down, for all attempts to come, that a range of positions (first, past) is not fed; rank 0's.
        tell: takes a verdict, and the step it is about.

    Raises:
        ConfigError: the dataset has no positions that could be left out.
    """

    def __init__(
        self,
        session: Session,
        saves: Saves,
        leave_out: Callable[[int, int], None],
        tell: Callable[[Verdict, int], None],
    ) -> None:
        if session.losses is not None and session.stream.order == "sharded":
            raise ConfigError(
                f"guard.spike=rollback leaves out positions, and {type(session.stream.dataset).__name__} declares "
                'order="sharded", so that nobody knows which sample stands where: use guard.spike=skip or log'
            )
        self._session, self._window = session, session.losses
        self._saves, self._leave_out, self._tell = saves, leave_out, tell
        self._heard: Pending | None = None
        self._targets = 0
        self._begun = 0, 0  # the step that was begun last, and the position after it
        self._told = False

    def remember(self, batch: StepBatch) -> None:
        """The step of `batch` begins."""
        self._begun = batch.step + 1, batch.position + batch.size

    def hear(self, pending: Pending) -> None:
        """Judge the step that `pending` was agreed in, on all ranks alike; each in its turn, a second time for nothing.

        Collective where it is a spike.

        Raises:
            RollbackError: the run goes back when it is started again.
            SpikeError: it has gone back so often already.
        """
        if self._window is None or pending is self._heard:
            return
        begins, self._heard = self._heard is None, pending
        agreed = pending.read()
        targets, self._targets = self._targets, agreed.next_targets
        if begins:  # what goes before the first step has no loss
            return
        loss = agreed.loss / max(1, targets)
        middle = self._window.add(loss)
        if middle is not None:
            self._follow(loss, middle)

    def _follow(self, loss: float, middle: float) -> None:
        step, past = self._begun
        guard = self._session.config.guard
        if len(self._session.stream.left_out.ranges) < guard.spike_times:
            self._go_back(step, past, loss, middle)
        spent = f"{guard.spike_times} ranges are left out already (guard.spike_times)"
        if guard.spike_after == "stop":
            ends = f"{spent}, and the run ends (guard.spike_after=stop)"
            verdict = explain_spike("loss", step, loss, middle, ends)
            self._tell(verdict, step)
            raise SpikeError(f"{verdict.what}; {verdict.next}")
        if not self._told:
            self._told = True
            self._tell(explain_spike("loss", step, loss, middle, f"{spent}, and the step {APPLIED}"), step)

    def _go_back(self, step: int, past: int, loss: float, middle: float) -> NoReturn:
        processes = self._session.processes
        self._saves.wait()
        saved, first = self._saves.newest
        where = f"step {saved}" if saved else "its beginning, as there is no checkpoint"
        follows = f"the run goes back to {where}, and leaves out positions {first} to {past - 1} (data.skip)"
        verdict = replace(explain_spike("loss", step, loss, middle, follows), kind=KIND)
        if processes.rank == 0:
            self._leave_out(first, past)
        self._tell(verdict, step)
        with suppress(RunError):  # the range is written: lines that wait for their disk keep no rank from going back
            self._saves.flush()
        processes.barrier()  # else another rank's end could have the workers killed before it is written and told
        raise RollbackError(f"{verdict.what}; started again, or with --resume, it goes on from there")


def add_range(run: Run, first: int, past: int) -> None:
    """Have every attempt of `run` from now on leave out the positions `first` to `past` - 1.

    Raises:
        RunError: the directory cannot be written.
    """
    config = run.config()
    skip = str(config.data.left_out.and_also(first, past))
    run.write_config(config.model_copy(update={"data": config.data.model_copy(update={"skip": skip})}))


def told_at_start(run: Run, stream: DataStream) -> list[dict[str, Any]]:
    """What the journal says of each range that `stream` leaves out: first, past and ledger.

    A ledger that the journal has is taken from there: a long range takes a while to be looked up. An event that is
    damaged is left out, and what it told is computed again.
    """
    ranges = stream.left_out.ranges
    before = [event for event in run.events() if event["event"] == "left_out"] if ranges else []
    known = {
        (event["first"], event["past"]): ledger
        for event in before
        if type(event.get("first")) is type(event.get("past")) is int
        and isinstance(ledger := event.get("ledger"), str)
        and re.fullmatch("[0-9a-f]{16}", ledger)
    }
    return [
        {"first": first, "past": past, "ledger": known.get((first, past)) or ledger_between(stream, first, past)}
        for first, past in ranges
    ]


def ledger_between(stream: DataStream, first: int, past: int) -> str | None:
    """The ledger that the positions `first` to `past` - 1 would have, 16 hex digits; None where only reading tells.

    With it and the ledgers of the steps every sample of the order is accounted for once.
    """
    import numpy as np

    if stream.order != "map":
        return None
    total = 0
    for begin in range(first, past, BLOCK):
        positions = np.arange(begin, min(begin + BLOCK, past))
        total += ledger_sum(positions, stream.samples_at(positions))  # type: ignore[arg-type]
    return f"{total % (1 << 64):016x}"
