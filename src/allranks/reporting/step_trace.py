"""The predicted step as a trace that Perfetto and chrome://tracing open.

What is done in which order, and how much, is the dry run's; how long it takes is the Estimate's: of each axis its
seconds are shared out by bytes, and the seconds of computation by FLOPs. Messages of the data axes go on behind
computation, all others stop it. Of a pipeline every stage is drawn from its schedule, with the bubbles between.

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (Trace Event Format), which
https://perfetto.dev/docs/getting-started/other-formats lists.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from allranks.plan import Estimate
from allranks.rehearsal import RankRehearsal, Rehearsal, Work
from allranks.rehearsed_messages import COPIES_OF_EXPERTS
from allranks.reporting.timeline import Timeline, make_timeline

MICROSECONDS = 1e6
DATA = ("dp_replicate", "dp_shard", "all", COPIES_OF_EXPERTS)
"""How the names of the data axes begin: what an Estimate has as dp."""
STAGES_FROM = 1_000_000
"""The process ids of the stages begin here; below are ranks."""
Event = dict[str, Any]


def make_trace(told: Rehearsal, estimate: Estimate) -> dict[str, Any]:
    """The trace as one JSON value: a process for each rehearsed rank, and one for each stage of a pipeline."""
    events: list[Event] = []
    for rank in told.ranks.values():
        events += _rank_events(rank, estimate)
    timeline = make_timeline(estimate.choice, estimate.time) if estimate.choice.layout.pp > 1 else None
    if timeline is not None:
        events += _stage_events(timeline, estimate.choice.layout.pp)
    about = {"model": told.model, "layout": told.layout, "cluster": told.cluster, "source": "allranks dryrun"}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _rank_events(rank: RankRehearsal, estimate: Estimate) -> list[Event]:
    per_byte, per_flop = _rates(rank, estimate)
    tracks = ["compute", *dict.fromkeys(axis for work in rank.works for axis, _, _ in work.messages)]
    events = [_name("process_name", rank.rank, 0, f"rank {rank.rank}, stage {rank.stage}")]
    events += [_name("thread_name", rank.rank, place, track) for place, track in enumerate(tracks)]
    free: defaultdict[str, float] = defaultdict(float)
    for number, work in _spread(rank.works):
        what = f"{work.phase} {work.block or 'of the model'}"
        if number:
            what += f" (+{number})"
        seconds = work.flops * per_flop
        if seconds:
            events.append(_bar(rank.rank, 0, what, free["compute"], seconds, {"flops": work.flops}))
            free["compute"] += seconds
        for axis, op, num_bytes in work.messages:
            behind = axis.startswith(DATA)
            start, seconds = max(free["compute"], free[axis]), num_bytes * per_byte[axis]
            events.append(_bar(rank.rank, tracks.index(axis), op, start, seconds, {"bytes": num_bytes, "for": what}))
            free[axis] = start + seconds
            if not behind:
                free["compute"] = free[axis]
    end = max(free.values(), default=0.0)
    if estimate.time.optimizer:
        events.append(_bar(rank.rank, 0, "optimizer", end, estimate.time.optimizer, {}))
    return events


def _rates(rank: RankRehearsal, estimate: Estimate) -> tuple[dict[str, float], float]:
    """(axis -> seconds a byte, seconds a FLOP); an axis that the Estimate does not know takes no time."""
    moved: Counter[str] = Counter()
    for _, work in _spread(rank.works):
        for axis, _, num_bytes in work.messages:
            moved[axis] += num_bytes
    data = sum(num_bytes for axis, num_bytes in moved.items() if axis.startswith(DATA))
    per_byte = dict.fromkeys(moved, 0.0)
    for row in estimate.traffic:
        for axis, num_bytes in moved.items():
            if row.axis == "dp" and axis.startswith(DATA):
                per_byte[axis] = row.seconds / data if data else 0.0
            elif row.axis == axis and num_bytes:
                per_byte[axis] = row.seconds / num_bytes
    seconds = estimate.time.compute + estimate.time.recompute
    return per_byte, seconds / rank.flops if rank.flops else 0.0


def _spread(works: tuple[Work, ...]) -> Iterator[tuple[int, Work]]:
    """Every stretch as often as it happens, each with its turn."""
    for work in works:
        for number in range(work.times):
            yield number, work


def _stage_events(timeline: Timeline, pp: int) -> Iterator[Event]:
    for stage in range(pp):
        pid = STAGES_FROM + stage
        yield _name(
            "process_name", pid, 0, f"pipeline rank {stage}: {timeline.shown} of {timeline.micro_steps} micro-steps"
        )
        yield _name("thread_name", pid, 0, "micro-steps")
        done = 0.0
        for bar in sorted((bar for bar in timeline.bars if bar.rank == stage), key=lambda bar: bar.start):
            if bar.start - done > 0:
                yield _bar(pid, 0, "bubble", done, bar.start - done, {})
            what = f"{bar.action.kind} {bar.action.micro_step}"
            yield _bar(pid, 0, what, bar.start, bar.end - bar.start, {"stage": bar.action.stage})
            done = bar.end
        if timeline.seconds - done > 0:
            yield _bar(pid, 0, "bubble", done, timeline.seconds - done, {})


def _bar(pid: int, tid: int, name: str, start: float, seconds: float, args: dict[str, Any]) -> Event:
    times = {"ts": round(start * MICROSECONDS, 3), "dur": round(seconds * MICROSECONDS, 3)}
    return {"name": name, "cat": "predicted", "ph": "X", "pid": pid, "tid": tid, **times, "args": args}


def _name(kind: str, pid: int, tid: int, name: str) -> Event:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
