"""The report of a Run, computed from its directory alone: a crashed run needs nothing else."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, final

from allranks.errors import AllranksError
from allranks.journal_events import latest_steps
from allranks.ordinary_file import read_ordinary
from allranks.reporting.history import (
    Attempt,
    Event,
    Events,
    LossCurve,
    find_attempts,
    find_decisions,
    find_pace,
    find_verdicts,
    loss_curve,
    number,
    numbers,
    peak_memory,
    seconds_by_cause,
    split_attempts,
    whole,
    word,
)
from allranks.reporting.plain import as_json
from allranks.reporting.predicted import Prediction, compare
from allranks.run import Run
from allranks.verdict import Decision, Verdict

State = Literal["done", "stopped", "crashed", "running"]

LOG_TAIL_BYTES = 1 << 14
ABOUT_FILES = ("manifest.json", "COMMITTED")  # of a checkpoint; they are no part of its size
SPENT = 1e-3  # of the highest rate: below, more steps change next to nothing
ERROR_LINE = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit)\b.*$", re.MULTILINE)


@final
@dataclass(frozen=True, slots=True)
class KeptCheckpoint:
    """A checkpoint by its directory; not `committed`: a save that was cut off."""

    name: str
    step: int
    committed: bool
    num_bytes: int


@final
@dataclass(frozen=True, slots=True)
class Report:
    """What a Run's directory says.

    Attributes:
        because: why `state` is what it is.
        loss: None before the first step.
        validation: the last evaluation's metrics, made at `validation_step` (0: there was none).
        step_seconds: the median step; None before the second. So is `samples_per_second`.
        seconds_by_cause: of the attempts that ended in order; `seconds_unsplit`: of the steps of the others.
        memory_bytes: the peak by rank.
        error: the last one, of a run that crashed.
        predicted: what the plan said beside what was measured; None without a plan.
        rate_spent: the learning rate has come down to next to nothing: more steps need a new schedule to learn more.
    """

    path: str
    id: str
    name: str
    task: str
    created: str
    state: State
    because: str
    attempts: tuple[Attempt, ...]
    step: int
    total_steps: int | None
    samples: int
    loss: LossCurve | None
    validation_step: int
    validation: Mapping[str, float]
    step_seconds: float | None
    samples_per_second: float | None
    seconds_by_cause: Mapping[str, float]
    seconds_unsplit: float
    memory_bytes: Mapping[int, int]
    checkpoints: tuple[KeptCheckpoint, ...]
    decisions: tuple[Decision, ...]
    verdicts: tuple[Verdict, ...]
    error: str | None
    rate_spent: bool
    predicted: Prediction | None = None

    def to_json(self) -> dict[str, Any]:
        """The same as JSON values; a number that is not finite becomes its name ("nan")."""
        plain = as_json(asdict(self))
        assert isinstance(plain, dict)
        return plain


def report(run: Run) -> Report:
    """The report of a Run, in whatever state a crash left it.

    Raises:
        RunError: a journal cannot be read.
    """
    journals = {rank: run.events(rank) for rank in run.ranks()}
    events = journals.get(0, [])
    steps = latest_steps(events)
    evaluation: Event = next((event for event in reversed(events) if event["event"] == "evaluation"), {})
    error = _last_error(run, journals)
    state, because = _state(run, journals)
    step_seconds, samples_per_second = find_pace(steps)
    causes, unsplit = seconds_by_cause(events)
    attempts, peaks = find_attempts(events), peak_memory(journals)
    return Report(
        path=str(run.path),
        id=run.id,
        name=run.name,
        task=run.task,
        created=str(run.identity["created"]),
        state=state,
        because=because,
        attempts=attempts,
        step=whole(steps[-1], "step") if steps else 0,
        total_steps=_total_steps(run, events),
        samples=whole(steps[-1], "samples") if steps else 0,
        loss=loss_curve(steps),
        validation_step=whole(evaluation, "step"),
        validation=numbers(evaluation, "metrics"),
        step_seconds=step_seconds,
        samples_per_second=samples_per_second,
        seconds_by_cause=causes,
        seconds_unsplit=unsplit,
        memory_bytes=peaks,
        checkpoints=_checkpoints(run.checkpoints),
        decisions=find_decisions(events),
        verdicts=find_verdicts(journals.values()),
        error=error if state == "crashed" else None,
        rate_spent=_is_spent([step["lr"] for step in steps if isinstance(step.get("lr"), float)]),
        predicted=compare(run, attempts[-1] if attempts else None, step_seconds, max(peaks.values(), default=None)),
    )


def _is_spent(rates: Sequence[float]) -> bool:
    return bool(rates) and rates[-1] < SPENT * max(rates)


def _state(run: Run, journals: Mapping[int, Events]) -> tuple[State, str]:
    holder, ends = run.holder(), _ends(journals)
    # The command holds the lease a little longer than its workers train: the newest attempt's own end counts.
    if holder is not None and not (0 in ends and _newest_attempt(journals) >= run.attempts):
        return "running", f"pid {holder.pid} on {holder.host} holds its lease"
    if not journals.get(0):
        return "crashed", "no process ever started here"
    failed = next((rank for rank, end in ends.items() if word(end, "reason") not in ("done", "stopped")), None)
    if failed is not None:
        return "crashed", f"rank {failed} raised an error"
    if 0 not in ends:
        return "crashed", "rank 0's journal breaks off: the process was killed, or its machine went down"
    if word(ends[0], "reason") == "done":
        return "done", "every step was made"
    return "stopped", "it was told to stop, and did so in order"


def _ends(journals: Mapping[int, Events]) -> dict[int, Event]:
    """The end events of the newest attempt, by rank, in the order of time."""
    newest = {rank: attempts[-1] for rank, events in journals.items() if (attempts := split_attempts(events))}
    last = _newest_attempt(journals)
    ends = {
        rank: event
        for rank, attempt in newest.items()
        for event in attempt
        if event["event"] == "end" and whole(attempt[0], "attempt") == last
    }
    return dict(sorted(ends.items(), key=lambda item: number(item[1], "t") or 0.0))


def _newest_attempt(journals: Mapping[int, Events]) -> int:
    starts = (event for events in journals.values() for event in events if event["event"] == "start")
    return max((whole(event, "attempt") for event in starts), default=0)


def _last_error(run: Run, journals: Mapping[int, Events]) -> str | None:
    """The error of the rank that failed first in the newest attempt, else the last one in the logs."""
    for rank, end in _ends(journals).items():
        if end.get("error"):
            return f"rank {rank}: {word(end, 'error')}"
    for rank in journals or [0]:
        try:
            tail = read_ordinary(run.log(rank), LOG_TAIL_BYTES).decode(errors="replace")
        except OSError:
            continue
        found = ERROR_LINE.findall(tail)
        if found:
            return f"rank {rank}: {found[-1]}"
    return None


def _total_steps(run: Run, events: Events) -> int | None:
    known = [
        total for event in events if event["event"] in ("start", "plan") and (total := whole(event, "total_steps"))
    ]
    if known:
        return known[-1]
    try:
        return run.config().train.steps
    except (AllranksError, OSError):
        return None


def _checkpoints(directory: Path) -> tuple[KeptCheckpoint, ...]:
    found = []
    for path in directory.glob("step-*"):
        step = re.match(r"step-(\d+)", path.name)
        if step is None:
            continue
        try:
            num_bytes = sum(file.stat().st_size for file in path.iterdir() if file.name not in ABOUT_FILES)
        except OSError:  # of a run that goes on: just renamed or pruned
            continue
        found.append(KeptCheckpoint(path.name, int(step[1]), (path / "COMMITTED").exists(), num_bytes))
    return tuple(sorted(found, key=lambda checkpoint: checkpoint.step))
