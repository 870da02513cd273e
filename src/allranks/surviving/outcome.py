"""From how each worker ended to how the run ended: a pure function."""

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import final

from allranks.failure import (
    CLAIMS,
    CRASHES,
    DONE,
    INTERRUPTED,
    PREEMPTED,
    STOPS,
    TRANSIENT,
    Failure,
    describe_exit,
    describe_signal,
    first_failure,
)
from allranks.surviving.interrupts import SIGNALS

UNKNOWN_CODE = 256  # no process's: the fork server that knew the code is gone


@final
@dataclass(frozen=True, slots=True)
class Ended:
    """One worker's end.

    Attributes:
        code: its exit code (negative: the signal that killed it).
        when: in Unix seconds.
        killed: whether by our own kill.
        finished: whether it had said that its work has come to an end with this code; also where nobody could tell.
        step: the last one that it has done, where that is known.
        said: the code that it had said its work would end with, whether or not it came to that; None: it had not.
    """

    rank: int
    pid: int
    code: int
    when: float
    killed: bool = False
    finished: bool = True
    step: int | None = None
    said: int | None = None

    @property
    def failed(self) -> bool:
        """Whether it neither did its work nor saved and stopped."""
        return self.code not in CLAIMS or not self.finished

    def stopped(self, stop: signal.Signals | None) -> int | None:
        """The code of the stop for which it has saved; None: it has not.

        Who is killed while what it has saved is on its way to a mirror has, too: a resume brings it there. One whose
        training was done by then has stopped only where somebody asked for it.
        """
        if self.code == -signal.SIGKILL:
            asked = INTERRUPTED if stop == signal.SIGINT else PREEMPTED
            code = asked if self.said == DONE and stop is not None else self.said
        else:
            code = self.code if self.finished else None
        return code if code in STOPS else None


@final
@dataclass(frozen=True, slots=True)
class Outcome:
    """How all workers ended.

    Attributes:
        exit_code: the run's, by docs/reference/errors.md: the first failing rank's, or that of the agreed stop.
        first_failure: the failure that came first and is no consequence of another; None where none failed.
        replies: global rank -> what the worker sent.
        others: the ranks that failed besides it, mostly as a consequence.
    """

    exit_code: int
    first_failure: Failure | None = None
    replies: Mapping[int, bytes] = field(default_factory=dict)
    others: tuple[int, ...] = ()


def conclude(
    ended: Sequence[Ended], records: Sequence[Failure], stop: signal.Signals | None, replies: Mapping[int, bytes]
) -> Outcome:
    """The Outcome of these ends.

    Args:
        records: what the workers wrote down about their failures.
        stop: the request to stop that was passed on to them, if there was one.
    """
    by_process: dict[tuple[int, int], Failure] = {}
    for record in records:
        before = by_process.get((record.rank, record.pid))
        if before is None or not before.noted or before.consequence:  # who hangs after an error hangs because of it
            by_process[record.rank, record.pid] = record
    failures = [_failure_of(one, by_process.get((one.rank, one.pid)), stop) for one in ended]
    failure = first_failure(one for one in failures if one is not None)
    if failure is not None and not (stop is not None and failure.consequence):
        others = sorted(one.rank for one in failures if one is not None and one.rank != failure.rank)
        return Outcome(failure.exit_code, failure, replies, tuple(others))
    stopped = [one.stopped(stop) for one in sorted(ended, key=lambda one: one.when)]
    agreed = [code for code in stopped if code is not None]
    if agreed:
        return Outcome(agreed[0], None, replies)
    if stop is not None and any(one.code for one in ended):  # it ended without having saved
        return Outcome(INTERRUPTED if stop == signal.SIGINT else TRANSIENT, None, replies)
    return Outcome(DONE, None, replies)


def conclude_left(outcome: Outcome, left: Failure) -> Outcome:
    """The Outcome where a worker that was killed has not ended: workers cannot start again on this host.

    Args:
        left: says so, of that worker.
    """
    first = outcome.first_failure
    if first is None:
        return outcome if outcome.exit_code in STOPS else replace(outcome, exit_code=TRANSIENT, first_failure=left)
    code = TRANSIENT if first.hung else first.exit_code
    told = replace(first, exit_code=code, message=f"{first.message}\n{left.brief()}")
    return replace(outcome, exit_code=code, first_failure=told)


def _failure_of(one: Ended, record: Failure | None, stop: signal.Signals | None) -> Failure | None:
    """What ended a worker, by its record and its exit; None where it did as it was told.

    A note says what was on its way out of the worker when something else ended it. It is the cause of a crash that
    follows: NCCL's watchdog aborts what has met an error of the device, and a lost peer alike. It is also the cause
    where a kill from outside, or our own, has come before it was out: started again, the worker would meet it again.
    But a kill does not follow from the loss of a peer; and the kernel kills for want of memory, which is not noted.
    """
    if record is None or not record.noted:
        return record or _unrecorded(one, stop)
    exited = _unrecorded(one, stop)
    if not record.consequence:
        return record if one.failed else exited
    return record if exited is not None and exited.signal in ("", *CRASHES) else exited


def _unrecorded(one: Ended, stop: signal.Signals | None) -> Failure | None:
    """What the exit of a worker without a record tells; None where it did as it was told."""
    told = one.killed and one.code == -signal.SIGKILL
    # It died of a request, before it could handle it, or of the second one, without saving.
    obeyed = stop is not None and (-one.code in SIGNALS or one.code == INTERRUPTED)
    if told or obeyed or not one.failed or one.stopped(stop) is not None:
        return None
    if one.code < 0:
        return describe_signal(-one.code, rank=one.rank, pid=one.pid, when=one.when)
    if one.code == UNKNOWN_CODE:  # the end of the server is sent to its workers as a kill
        return describe_signal(signal.SIGKILL, rank=one.rank, pid=one.pid, when=one.when)
    return describe_exit(one.code, rank=one.rank, pid=one.pid, when=one.when, step=one.step)
