"""The side from which workers are watched: their agent's process, which needs nothing of theirs to see them.

It reads the numbers that each worker keeps in shared memory (observing/heartbeat.py) and the kernel's word on its
process, on the monotonic clock alone, and tells apart

    dead       the kernel says so at once (workers.py)
    stopped    the kernel shows the process as stopped (SIGSTOP, a debugger) or frozen, for `guard.stopped_seconds`
    hung       nobody comes further for longer than steps take here
    doubtful   no step has taken as long as this one: it is looked whether ranks wait in collectives that never meet
    slow       a rank loads data for longer than that, or a checkpoint shows nothing for longer than it does here: told,
               and left in peace until `guard.input_seconds` or `guard.checkpoint_seconds`

How long a step may take is learned from this run's own steps. The first step, later compilation, evaluation and
checkpoints have limits of their own. A time in which this process did not run (a suspended machine) counts for nobody,
and neither does one in which the kernel let a worker that wanted to compute wait for a core.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, final

from allranks.config_guard import GuardConfig
from allranks.observing.heartbeat import (
    FINISHED,
    FIRST,
    LOADED,
    LONGEST,
    MARK,
    PHASE,
    PHASES,
    PULSE,
    SAVED,
    STEP,
    Phase,
)
from allranks.surviving.beats import SharedBeats
from allranks.surviving.kernel import FROZEN, STOPPED, core_seconds, is_frozen, process_state

LEAST_HANG_SECONDS = 15.0
LEAST_SAVE_SECONDS = 30.0  # without a sign of a checkpoint: until it is told
LEARNED_FACTOR = 5.0
DOUBT_FACTOR = 1.1
LOOK_SECONDS = 0.25
SUSPENDED_SECONDS = 5.0  # between two looks: then this process itself did not run
SILENT_SECONDS = 1.0  # without a sign: then it is looked whether a worker is frozen

Kind = Literal["stopped", "hung", "doubtful", "slow"]

LIMITS: Mapping[Phase, str] = {
    "start": "first_step_seconds",
    "first step": "first_step_seconds",
    "compilation": "compilation_seconds",
    "evaluation": "evaluation_seconds",
    "end": "evaluation_seconds",
    "checkpoint": "checkpoint_seconds",
}
"""The keys of `guard` that limit what is not simply a step; that limit is learned, or `hang_seconds`."""


@final
@dataclass(frozen=True, slots=True)
class Row:
    """One worker, as seen from outside.

    Attributes:
        rank, pid: which process.
        state: the kernel's letter for its main thread (R, S, D, T ...), T of a frozen one; "" where it does not tell.
        phase: what it does.
        quiet_seconds: how long since it came further.
        pulse_seconds: how long since a thread of its Python ran; None: it cannot be asked yet.
        step, mark: optimizer steps done; a number that changes whenever it comes further.
        first_seconds, longest_seconds: its first step of this attempt, and how long later ones take, without loading;
            0.0 where there is none.
        loading_seconds: how long it loads data in later steps.
        saving_seconds: how long a checkpoint shows nothing, of those that this attempt has written.
        finished: whether its work is over, and all that is left is to bring copies elsewhere.
    """

    rank: int
    pid: int
    state: str
    phase: Phase
    quiet_seconds: float
    pulse_seconds: float | None
    step: int
    first_seconds: float
    longest_seconds: float
    mark: int = 0
    loading_seconds: float = 0.0
    saving_seconds: float = 0.0
    finished: bool = False


@final
@dataclass(frozen=True, slots=True)
class Alarm:
    """Something is wrong: what, with whom first of all, and whether to act now or only to tell.

    Attributes:
        act: of `doubtful`: where the ranks' own words prove that they hang.
        phase: of `slow`: what takes long there, input or checkpoint.
    """

    kind: Kind
    ranks: tuple[int, ...]
    limit_seconds: float
    act: bool
    phase: Phase = "input"


@final
@dataclass(frozen=True, slots=True)
class _CoreTime:
    """A worker's core at its last MARK, and since when what the kernel tells of it (ran, waited) has not changed."""

    mark: int
    waited_at_mark: float
    last: tuple[float, float]
    since: float


@final
class Monitor:
    """Looks at the workers of one attempt after the other.

    Attributes:
        beats: where they show themselves.
        furthest_step: the last step that all workers of one attempt have finished.
        stopped: the ranks that were stopped for too long at the last look.
        delayed_seconds: what that look left out of everybody's silence, because a worker had no core.
    """

    def __init__(self, guard: GuardConfig, num_workers: int) -> None:
        """`num_workers`: that this host has at most."""
        self.beats = SharedBeats(num_workers)
        self._num_workers = num_workers
        self.furthest_step = 0
        self.stopped: tuple[int, ...] = ()
        self.delayed_seconds = 0.0
        self._guard = guard
        self._last_look = self._awake_since = time.monotonic()
        self._stopped_since: dict[int, tuple[int, float]] = {}  # by rank: its mark, and since when
        self._told: tuple[int, Kind, bool] | None = None  # what was told of already: rank, kind, whether to act
        self._delays: dict[int, _CoreTime] = {}  # by local rank

    def begin_attempt(self, num_workers: int) -> None:
        """So many workers are about to start."""
        self.beats.clear()
        self._num_workers = num_workers
        self._last_look = self._awake_since = time.monotonic()
        self._stopped_since, self._told, self._delays = {}, None, {}

    def look(self, pids: Mapping[int, int], ranks: Mapping[int, int]) -> tuple[list[Row], Alarm | None]:
        """See how the living workers do.

        Args:
            pids: local rank -> process id, of those that live.
            ranks: local rank -> global rank.

        Returns:
            The workers by local rank, and what is wrong, once: the same silence is told of again only to act.
        """
        now = time.monotonic()
        if now - self._last_look > SUSPENDED_SECONDS:
            self._awake_since = now
            self._stopped_since = {}
        self._last_look = now
        # Who waits for a worker that gets no core is not in the way either: the longest wait counts for all.
        delays = (self._delayed_seconds(place, pid, now) for place, pid in pids.items())
        self.delayed_seconds = max(delays, default=0.0)
        awake = now - self.delayed_seconds
        rows = [self._row(place, pid, ranks[place], awake) for place, pid in sorted(pids.items())]
        self.note_steps()
        alarm = self._find_stopped(rows, now) or find_silent(rows, self._guard)
        before, self._told = self._told, None if alarm is None else (alarm.ranks[0], alarm.kind, alarm.act)
        return rows, None if self._told == before else alarm

    def forget(self) -> None:
        """Tell again of what is still wrong."""
        self._told = None

    def _delayed_seconds(self, place: int, pid: int, now: float) -> float:
        """How long a worker has waited for a core since it came further."""
        mark, told = self.beats.slot(place)[MARK], core_seconds(pid)
        if told is None:
            return 0.0  # nothing is known of waits: who computes for too long hangs
        ran, waited = told
        before = self._delays.get(place)
        if before is None or before.mark != mark:
            before = self._delays[place] = _CoreTime(mark, waited, (ran, waited), now)
        elif before.last != (ran, waited):
            before = self._delays[place] = replace(before, last=(ran, waited), since=now)
        # The kernel adds a wait when it ends: one that lasts shows as a worker that would run and does not.
        lasting = now - before.since if process_state(pid) == "R" else 0.0
        return max(0.0, waited - before.waited_at_mark) + lasting

    def note_steps(self) -> None:
        """See how far the workers came, also those that have ended."""
        self.furthest_step = max(self.furthest_step, self._least_step())

    @property
    def all_have_made_a_step(self) -> bool:
        """Whether every worker of this attempt has finished one."""
        return self._least_step() > 0

    def _least_step(self) -> int:
        return min(self.beats.slot(place)[STEP] for place in range(self._num_workers))

    def _row(self, place: int, pid: int, rank: int, now: float) -> Row:
        slot = self.beats.slot(place)
        mark, pulse = max(slot[MARK] / 1e9, self._awake_since), slot[PULSE] / 1e9
        quiet = max(0.0, now - mark)
        return Row(
            rank=rank,
            pid=pid,
            state=FROZEN if quiet > SILENT_SECONDS and is_frozen(pid) else process_state(pid),
            phase=PHASES[slot[PHASE]],
            quiet_seconds=quiet,
            pulse_seconds=max(0.0, now - max(pulse, self._awake_since)) if pulse else None,
            step=slot[STEP],
            first_seconds=slot[FIRST] / 1e9,
            longest_seconds=slot[LONGEST] / 1e9,
            mark=slot[MARK],
            loading_seconds=slot[LOADED] / 1e9,
            saving_seconds=slot[SAVED] / 1e9,
            finished=slot[FINISHED] > 0,
        )

    def _find_stopped(self, rows: Sequence[Row], now: float) -> Alarm | None:
        before, stopped = self._stopped_since, [row for row in rows if row.state in STOPPED]
        # Who comes further was only seen between two stops, as under strace.
        self._stopped_since = {
            row.rank: before[row.rank] if before.get(row.rank, (None, now))[0] == row.mark else (row.mark, now)
            for row in stopped
        }
        limit = self._guard.stopped_seconds
        self.stopped = tuple(rank for rank, (_, since) in self._stopped_since.items() if now - since >= limit)
        return Alarm("stopped", self.stopped, limit, act=True) if self.stopped else None


def find_silent(rows: Sequence[Row], guard: GuardConfig) -> Alarm | None:
    """Who hangs, or else whose checkpoint or step takes longer than any here; None: nobody's."""
    return find_hung(rows, guard) or find_slow_save(rows, guard) or find_doubtful(rows, guard)


def find_slow_save(rows: Sequence[Row], guard: GuardConfig) -> Alarm | None:
    """Whose checkpoint has shown nothing for longer than it does here, and not for so long that it hangs.

    A disk that is slow and one that is gone look alike from here, so that only the limit ends the wait. A mirror has
    limits of its own, and says so itself.
    """
    limit = max(LEAST_SAVE_SECONDS, LEARNED_FACTOR * max((row.saving_seconds for row in rows), default=0.0))
    silent = [row for row in rows if row.quiet_seconds > limit and not row.finished]
    saving = tuple(row.rank for row in silent if row.phase == "checkpoint")
    if not saving or limit >= guard.checkpoint_seconds:
        return None
    return Alarm("slow", saving, limit, act=False, phase="checkpoint")


def find_doubtful(rows: Sequence[Row], guard: GuardConfig) -> Alarm | None:
    """Whether all are in a step that takes longer than any before, where that alone is no hang for a while yet."""
    longest = max((max(row.longest_seconds, row.loading_seconds) for row in rows), default=0.0)
    limit = max(LEAST_HANG_SECONDS, DOUBT_FACTOR * longest)
    learned = guard.hang_seconds is None and max((row.longest_seconds for row in rows), default=0.0) > 0.0
    if not learned or any(row.phase != "step" or row.quiet_seconds <= limit for row in rows):
        return None
    return Alarm("doubtful", tuple(row.rank for row in rows), limit, act=True)


def find_hung(rows: Sequence[Row], guard: GuardConfig) -> Alarm | None:
    """Who has not come further for too long; None: all is well, or somebody does what may take longer."""
    limits = {row.rank: allowed_seconds(row, rows, guard) for row in rows}
    late = [row for row in rows if row.quiet_seconds > limits[row.rank]]
    patient = [row for row in rows if row.phase != "step" and row not in late]
    if not late or (patient and all(row.phase in ("step", "input") for row in late)):
        return None
    # The first of all is who is in the way of the others: who waits in a step waits for somebody.
    loading = tuple(row.rank for row in late if row.phase == "input")
    limit = min(limits[row.rank] for row in late)
    if loading:
        act = any(row.quiet_seconds > guard.input_seconds for row in late if row.phase == "input")
        return Alarm("hung" if act else "slow", loading, guard.input_seconds if act else limit, act)
    return Alarm("hung", tuple(row.rank for row in late), limit, act=True)


def allowed_seconds(row: Row, rows: Sequence[Row], guard: GuardConfig) -> float:
    """How long this worker may take without coming further, in what it does now."""
    if row.phase in LIMITS:
        return float(getattr(guard, LIMITS[row.phase]))
    if guard.hang_seconds is not None:
        return guard.hang_seconds
    longest = max(other.longest_seconds for other in rows)
    if longest == 0.0:  # nothing is learned yet, and the first step is all that is known
        longest = max(other.first_seconds for other in rows)
    # Where loading always takes long, it may; and who is in a step may have waited for another that loads.
    loads = [other.loading_seconds for other in rows if row.phase == "input" or other is not row]
    longest = max([longest, *loads])
    return max(LEAST_HANG_SECONDS, LEARNED_FACTOR * longest)
