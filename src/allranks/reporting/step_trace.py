"""The predicted step as a trace that Perfetto and chrome://tracing open.

A process for each rehearsed rank (`step_order`), and one for each stage of a pipeline of which none was rehearsed, with
the work of the nearest that was (`stage_works`).

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
from allranks.reporting.stage_works import draw_others
from allranks.reporting.step_order import COMPUTE, order_rank

NANOSECONDS = 1e9
FIRST = 1
"""The lowest id of a process, and of a thread."""
STAGES_FROM = 1_000_000
"""The process ids of stages that were not rehearsed begin here; below are ranks."""
Event = dict[str, Any]


def make_trace(told: Rehearsal, estimate: Estimate) -> dict[str, Any]:
    """The trace as one JSON value."""
    events: list[Event] = []
    shortened: dict[str, float] = {}
    for rank in told.ranks.values():
        name = f"rank {rank.rank}, stage {rank.stage}"
        events += _rank_events(rank, estimate, shortened, str(rank.rank), FIRST + rank.rank, name)
    for one in draw_others(told, estimate):
        name = f"stage {one.place}: not rehearsed, with the work of rank {one.source}"
        events += _rank_events(one.told, estimate, shortened, f"stage {one.place}", STAGES_FROM + one.place, name)
    about = {
        "model": told.model,
        "layout": told.layout,
        "cluster": told.cluster,
        "source": "allranks dryrun",
        "step_seconds": estimate.step_seconds.expected,
        "data_messages_shortened": shortened,
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _rank_events(
    rank: RankRehearsal, estimate: Estimate, shortened: dict[str, float], key: str, pid: int, name: str
) -> Iterator[Event]:
    step = order_rank(rank, estimate)
    shortened[key] = step.shortened
    tracks = {
        name: FIRST + place for place, name in enumerate(dict.fromkeys([COMPUTE, *(s.track for s in step.spans)]))
    }
    yield _name("process_name", pid, FIRST, name)
    for track, tid in tracks.items():
        yield _name("thread_name", pid, tid, track)
    for span in step.spans:
        yield _bar(pid, tracks[span.track], span.name, span.start, span.end, span.args)


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
