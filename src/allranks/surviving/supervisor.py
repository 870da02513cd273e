"""What the agent does besides starting workers: watches them, tells why they hang, and keeps the budget of restarts.

A restart is paid for only where nothing was gained by the attempt before: the furthest finished step did not rise. So a
run that fails every hour goes on for ever, and one that fails at the same step each time ends with 93. What ends by
itself is not paid for: forwards of half as many samples, and rollbacks behind a spike.
"""

import contextlib
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from allranks.config import Config
from allranks.config_guard import GuardConfig
from allranks.errors import AllranksError, RunError
from allranks.failure import NO_PROGRESS, PREEMPTED, STOPS, TRANSIENT, Failure
from allranks.observing.heartbeat import MARK, STEP, TIME_OVER
from allranks.observing.journal import Journal
from allranks.run import Run
from allranks.surviving.bad_link import BadLink
from allranks.surviving.evidence import Testimony, question
from allranks.surviving.hang import ALL_HERE, Absent, diagnose, never_meet
from allranks.surviving.in_hand import InHand, explain_ends
from allranks.surviving.monitor import Alarm, Monitor
from allranks.surviving.ruling import Ruling, what_follows
from allranks.surviving.slow_rank import SlowRank
from allranks.surviving.unanswered import DISK_SECONDS, within
from allranks.verdict import Verdict

DOUBT_SECONDS = 15.0  # after other hosts' ranks have shown that nothing hangs: until it is asked again


@final
@dataclass(frozen=True, slots=True)
class Supervision:
    """What `allranks train` asks of the agent.

    Attributes:
        guard: the limits, and what follows.
        tell: takes every verdict.
        next_attempt: called before workers are started again.
        halve: called when memory ran out in a step: has the next attempt make it in forwards of half as many samples,
            and says so; None where it cannot.
        config: the run's, as it is now.
    """

    guard: GuardConfig
    tell: Callable[[Verdict], None]
    next_attempt: Callable[[], object]
    halve: Callable[[], str | None] = lambda: None
    config: Callable[[], Config] = Config

    @classmethod
    def of_run(cls, run: Run, guard: GuardConfig, halve: Callable[[], str | None] = lambda: None) -> "Supervision":
        """Verdicts go to the screen and to rank 0's journal."""

        def tell(verdict: Verdict) -> None:
            print(f"\n{verdict}", file=sys.stderr, flush=True)
            line = {"t": time.time(), "event": "verdict", **verdict.to_json()}
            if missing := within(DISK_SECONDS, lambda: _write(run, line), "its disk does not answer"):
                print(f"warning: this verdict is not in the journal: {missing}", file=sys.stderr, flush=True)

        return cls(guard, tell, run.begin_attempt, halve, run.config)


@final
class Supervisor:
    """One run's, over all attempts.

    Attributes:
        monitor: looks at the workers.
        restarts: how often workers have been started again.
    """

    def __init__(self, supervision: Supervision, num_workers: int, logs: Path) -> None:
        self.monitor = Monitor(supervision.guard, num_workers)
        self.restarts = 0
        self._supervision, self._num_workers, self._logs = supervision, num_workers, logs
        slow = [SlowRank(self.monitor.beats, logs)] if supervision.guard.slow_rank == "warn" else []
        bad = [BadLink(self.monitor.beats, logs)] if supervision.guard.bad_link == "warn" else []
        self._watches: tuple[SlowRank | BadLink, ...] = (*slow, *bad)
        self._paid = self._furthest = 0
        self._told: Ruling | None = None
        self._doubted_at: float | None = None
        self._halved: str | None = None
        self._places: Mapping[int, int] = {}  # global rank -> local rank, as far as they have been seen
        self._ends: list[InHand | None] = []  # of the attempts that have finished no further step

    def time_is_over(self) -> bool:
        """Whether the run's time has passed (train.max_seconds), by this host's clock or as all ranks have agreed."""
        beats, now = self.monitor.beats, time.monotonic_ns()
        return any(0 < beats.slot(place)[TIME_OVER] <= now for place in range(self._num_workers))

    def begin_attempt(self, num_workers: int) -> None:
        """So many workers are about to be started, for the first time or again."""
        self.monitor.begin_attempt(num_workers)
        for watch in self._watches:
            watch.begin_attempt()
        self._told = self._doubted_at = None
        self._places = {}

    def look(self, pids: Mapping[int, int], ranks: Mapping[int, int]) -> Failure | None:
        """See how the living workers do; the failure for which all of them have to be ended now, or None.

        Args:
            pids: local rank -> process id, of those that live.
            ranks: local rank -> global rank.
        """
        alarm = self.notice(pids, ranks)
        if alarm is None:
            return None
        ruling = self.judge(self.question(pids, ranks), alarm)
        if ruling is not None and ruling.failure is not None and self.is_outdated(ruling, pids, ranks):
            ruling = None
        return self.obey(ruling)

    def notice(self, pids: Mapping[int, int], ranks: Mapping[int, int]) -> Alarm | None:
        """What is wrong with the living workers of this host, once; arguments as of `look`."""
        if self._doubted_at is not None and time.monotonic() - self._doubted_at > DOUBT_SECONDS:
            self._doubted_at = None
            self.monitor.forget()
        self._places = {rank: place for place, rank in ranks.items()}
        rows, alarm = self.monitor.look(pids, ranks)
        if alarm is None:
            if self._told is not None and (goes_on := self._told.goes_on(rows)) is not None:
                self._told = None
                self._supervision.tell(goes_on)
            for verdict in filter(None, (watch.look(rows, self._places) for watch in self._watches)):
                self._supervision.tell(verdict)
        return alarm

    def question(self, pids: Mapping[int, int], ranks: Mapping[int, int]) -> list[Testimony]:
        """Where the living workers of this host stand; arguments as of `look`. It takes up to two seconds, or
        five where the disk with their logs does not answer, and what is seen without it is all.
        """
        rows, _ = self.monitor.look(pids, ranks)
        places = {rank: place for place, rank in ranks.items()}
        seen = [Testimony(row) for row in rows]
        return within(DISK_SECONDS, lambda: question(rows, places, self.monitor.beats, self._logs), seen)

    def judge(self, found: Sequence[Testimony], alarm: Alarm, absent: Absent = ALL_HERE) -> Ruling | None:
        """What has been found, and what follows by the config; None: nothing is, of what was only doubtful.

        Args:
            found: of every rank that could be looked at.
            alarm: what the monitor saw.
            absent: of several hosts: all other ranks.
        """
        if alarm.kind == "doubtful" and not never_meet(found):
            return None
        guard, step = self._supervision.guard, max((one.row.step for one in found), default=0)
        verdict, culprits = diagnose(found, alarm, what_follows(alarm, guard), absent)
        culprits = culprits or alarm.ranks
        if not alarm.act and alarm.phase == "checkpoint":
            verdict = replace(verdict, what=f"{verdict.what}; it may take {guard.checkpoint_seconds:g} s")
            return Ruling(verdict, alarm.ranks, step, slow="checkpoint")
        if not alarm.act:
            return Ruling(verdict, alarm.ranks, step, slow="input")
        failure = None if guard.hang == "report" else _describe(culprits, found, absent, verdict)
        marks = {one.row.rank: one.row.mark for one in found if one.row.rank in alarm.ranks}
        return Ruling(verdict, culprits, step, marks, failure=failure)

    def is_outdated(self, ruling: Ruling, pids: Mapping[int, int], ranks: Mapping[int, int]) -> bool:
        """Whether the living workers of this host show that the run has gone on since they were looked at for `ruling`.

        Arguments as of `look`.
        """
        slots = {ranks[place]: self.monitor.beats.slot(place) for place in pids}
        return ruling.is_outdated((rank, slot[STEP], slot[MARK]) for rank, slot in slots.items())

    def obey(self, ruling: Ruling | None) -> Failure | None:
        """Tell what has been found, unless it was told before; the failure for which all workers have to be ended.

        Args:
            ruling: None: with a look at all hosts nothing is wrong, or nothing is any more.
        """
        if ruling is None:
            self._doubted_at = time.monotonic()
            return None
        if ruling.failure is None and self._told is not None and self._told.about == ruling.about:
            return None
        self._told = ruling
        self._supervision.tell(ruling.verdict)
        return ruling.failure

    def may_restart(self, failure: Failure) -> bool:
        """Whether workers are started again after this failure; counts it."""
        guard = self._supervision.guard
        self._halved = self._supervision.halve() if failure.divisible and guard.restarts else None
        if self._halved is not None:
            return True  # paid for by what is halved: that ends by itself
        if not _can_pass(failure, guard):
            return False
        self.monitor.note_steps()
        if self.monitor.furthest_step > self._furthest:
            self._furthest, self._paid, self._ends = self.monitor.furthest_step, 0, []
        if failure.goes_back and guard.restarts:
            return True  # paid for by the samples that are left out: guard.spike_times ends that
        self._ends.append(self._in_hand(failure))
        if self._paid >= guard.restarts:
            return False
        self._paid += 1
        return True

    def restarting(self, failure: Failure) -> None:
        """Say that workers start again, and why; before they do."""
        self.restarts += 1
        step = self.monitor.furthest_step
        what = f"restart {self.restarts}, after step {step}: {failure.brief()}"
        left = self._supervision.guard.restarts - self._paid
        if self._halved is not None:
            kept = "the global batch, the order of the samples and what is learnt from them stay as they are"
            move = f"nothing; {self._halved} from the start saves the restart"
            self._supervision.tell(Verdict("out_of_memory", f"{what}; it goes on with {self._halved}", (kept,), move))
            self._supervision.next_attempt()
            return
        evidence = (f"restarts that may still finish no further step: {left} (guard.restarts)",)
        self._supervision.tell(Verdict("restart", what, evidence, f"nothing; the logs are in {self._logs}"))
        self._supervision.next_attempt()

    def succeeding(self, failure: Failure) -> None:
        """Say that workers start again under this host's lead: the one that led is lost or has left; before they do."""
        lost = failure.exit_code != PREEMPTED
        self.restarts += lost
        kind, number = ("restart", f"restart {self.restarts}: ") if lost else ("leave", "")
        what = f"{number}{failure.brief()}; {socket.gethostname()} leads from now on"
        self._supervision.tell(Verdict(kind, what, (), "nothing; another host may take its place"))

    def tell(self, verdict: Verdict) -> None:
        """Say what somebody else has found."""
        self._supervision.tell(verdict)

    def admitting(self, hosts: Sequence[str]) -> None:
        """Say that workers have saved and start again because hosts join; before they do. It costs no restart."""
        self._change_hosts("join", f"{', '.join(hosts)} joins")

    def leaving(self, hosts: Sequence[str]) -> None:
        """Say that workers have saved and start again without hosts that were asked to stop; as `admitting`."""
        self._change_hosts("leave", f"{', '.join(hosts)} leaves, asked to stop")

    def _change_hosts(self, kind: str, change: str) -> None:
        self.monitor.note_steps()
        what = f"after step {self.monitor.furthest_step}, which is saved, {change}"
        kept = "the global batch and the order of the samples stay as they are"
        self._supervision.tell(Verdict(kind, what, (kept,), "nothing; no step is made twice"))
        self._supervision.next_attempt()

    def conclude(self, failure: Failure) -> Failure:
        """The failure that ends the run: a crash or hang that came again and again without progress ends it with 93."""
        if not _can_pass(failure, self._supervision.guard) or self.restarts == 0:
            return failure
        step, number = self.monitor.furthest_step, self._paid + 1
        words = [failure.message, f"no progress: {number} attempts in a row ended without a step after step {step}"]
        with contextlib.suppress(AllranksError):  # a config that cannot be read keeps nobody from the end
            words += [f"  {line}" for line in explain_ends(self._ends, self._supervision.config()).splitlines()]
        return replace(failure, exit_code=NO_PROGRESS, message="\n".join(words))

    def _in_hand(self, failure: Failure) -> InHand | None:
        """What who failed had in hand; where that is a rank of another host, what those here had."""
        beats = self.monitor.beats
        if failure.rank in self._places:
            return InHand.read(beats.slot(self._places[failure.rank]))
        held = (InHand.read(beats.slot(place)) for place in range(self._num_workers))
        return max((one for one in held if one is not None), key=lambda one: one.step, default=None)


def _write(run: Run, line: Mapping[str, object]) -> str:
    """Append to rank 0's journal; why it could not be: what the verdict is about ends the run, not this."""
    try:
        with contextlib.closing(Journal(run.journal())) as journal:
            journal.append([line])
    except RunError as error:
        return str(error)
    return ""


def _describe(culprits: Sequence[int], found: Sequence[Testimony], absent: Absent, verdict: Verdict) -> Failure:
    """The verdict as the end of who is in the way; where that is a process of this host that has gone, of another."""
    words = f"{verdict.what}\n  next: {verdict.next}"
    away = next((rank for rank in culprits if rank in absent), None)
    seen = next((one for one in found if one.row.rank in culprits), None if away is not None else found[0])
    if seen is not None:
        rank, host, pid = seen.row.rank, seen.host or socket.gethostname(), seen.row.pid
    else:
        assert away is not None
        rank, host, pid = away, absent[away].host, absent[away].pid
    return Failure(rank, host, pid, time.time(), NO_PROGRESS, words, hung=True)


def _can_pass(failure: Failure, guard: GuardConfig) -> bool:
    """Whether the same workers, started again, may not meet it: no error of the user's, no refusal, no request."""
    if failure.exit_code in STOPS:
        return False
    if failure.hung:
        return guard.hang == "restart"
    return failure.exit_code == TRANSIENT or bool(failure.signal)
