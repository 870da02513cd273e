"""The predicted step as a trace that Perfetto and chrome://tracing open.

A process for each rehearsed rank (`step_order`), and one for each stage of a pipeline, drawn from its schedule, with
the bubbles between.

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (Trace Event Format), which
https://perfetto.dev/docs/getting-started/other-formats lists. Perfetto drops a bar that begins before another one of
its track has ended, and ends behind it: so begin and end of each are rounded to nanoseconds, which is what Perfetto
counts in, and never a length. Its process and thread 0 are the kernel's.
"""

import math
from collections.abc import Iterator
from typing import Any

from allranks.plan import Estimate
from allranks.rehearsal import RankRehearsal, Rehearsal
from allranks.reporting.step_order import COMPUTE, order_rank
from allranks.reporting.timeline import Timeline, make_timeline

NANOSECONDS = 1e9
FIRST = 1
"""The lowest id of a process, and of a thread."""
STAGES_FROM = 1_000_000
"""The process ids of the stages begin here; below are ranks."""
Event = dict[str, Any]


def make_trace(told: Rehearsal, estimate: Estimate) -> dict[str, Any]:
    """The trace as one JSON value."""
    events: list[Event] = []
    shortened: dict[str, float] = {}
    for rank in told.ranks.values():
        events += _rank_events(rank, estimate, shortened)
    if estimate.choice.layout.pp > 1:
        events += _stage_events(make_timeline(estimate.choice, estimate.time), estimate.choice.layout.pp)
    about = {
        "model": told.model,
        "layout": told.layout,
        "cluster": told.cluster,
        "source": "allranks dryrun",
        "step_seconds": estimate.step_seconds.expected,
        "data_messages_shortened": shortened,
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _rank_events(rank: RankRehearsal, estimate: Estimate, shortened: dict[str, float]) -> Iterator[Event]:
    step, pid = order_rank(rank, estimate), FIRST + rank.rank
    shortened[str(rank.rank)] = step.shortened
    tracks = {
        name: FIRST + place for place, name in enumerate(dict.fromkeys([COMPUTE, *(s.track for s in step.spans)]))
    }
    yield _name("process_name", pid, FIRST, f"rank {rank.rank}, stage {rank.stage}")
    for track, tid in tracks.items():
        yield _name("thread_name", pid, tid, track)
    for span in step.spans:
        yield _bar(pid, tracks[span.track], span.name, span.start, span.end, span.args)


def _stage_events(timeline: Timeline, pp: int) -> Iterator[Event]:
    for stage in range(pp):
        pid = STAGES_FROM + stage
        what = f"pipeline rank {stage}: {timeline.shown} of {timeline.micro_steps} micro-steps"
        yield _name("process_name", pid, FIRST, what)
        yield _name("thread_name", pid, FIRST, "micro-steps")
        done = 0.0
        for bar in sorted((bar for bar in timeline.bars if bar.rank == stage), key=lambda bar: bar.start):
            if bar.start - done > 0:
                yield _bar(pid, FIRST, "bubble", done, bar.start, {})
            what = f"{bar.action.kind} {bar.action.micro_step}"
            yield _bar(pid, FIRST, what, bar.start, bar.end, {"stage": bar.action.stage})
            done = bar.end
        if timeline.seconds - done > 0:
            yield _bar(pid, FIRST, "bubble", done, timeline.seconds, {})


def _bar(pid: int, tid: int, name: str, start: float, end: float, args: dict[str, Any]) -> Event:
    first, past = round(start * NANOSECONDS), round(end * NANOSECONDS)
    times = {"ts": microseconds(first), "dur": microseconds(past - first)}
    return {"name": name, "cat": "predicted", "ph": "X", "pid": pid, "tid": tid, **times, "args": args}


def microseconds(nanoseconds: int) -> float:
    """What a reader takes for so many, whether it rounds its thousandfold, as Perfetto does, or cuts it, as it did."""
    found = nanoseconds / 1000
    return found if int(found * 1000) == nanoseconds else math.nextafter(found, math.inf)


def _name(kind: str, pid: int, tid: int, name: str) -> Event:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
