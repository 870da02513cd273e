"""The predicted step in the published trace format: every event is one of its kinds, with what that kind needs."""

import io
import json
import random
import subprocess
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from allranks.layout import Layout
from allranks.plan import Estimate
from allranks.reporting.step_trace import FIRST, STAGES_FROM, make_trace, microseconds
from tests.reporting.test_step_order import done, fsdp, planned, turns_of
from tests.test_rehearsal import rehearsal

READERS: tuple[Callable[[float], int], ...] = (round, int)
"""How Perfetto makes nanoseconds of the thousandfold of a time: it rounds it, and cut it once."""


def trace(layout: Layout, layers: int = 4, batch: int = 64) -> tuple[dict[str, Any], Estimate]:
    """(a trace, the estimate that its seconds are from)."""
    found = planned(layout, batch)
    works = turns_of(found, 0) if layout.pp > 1 else fsdp(layers, found.choice.micro_steps)
    return json.loads(json.dumps(make_trace(rehearsal(done(works)), found), allow_nan=False)), found


def check_format(document: dict[str, Any]) -> None:
    """Trace Event Format: an object with traceEvents; complete events (X) have ts and dur, metadata (M) a name.

    And what Perfetto asks for besides: no process and no thread 0, and bars of a track follow one another in the whole
    nanoseconds that it reads.
    """
    assert document["displayTimeUnit"] in ("ms", "ns")
    assert isinstance(document["otherData"], dict)
    named = {(e["pid"], e["tid"]) for e in document["traceEvents"] if e["ph"] == "M" and e["name"] == "thread_name"}
    for event in document["traceEvents"]:
        assert event["ph"] in ("X", "M")
        assert isinstance(event["name"], str) and event["name"]
        assert type(event["pid"]) is type(event["tid"]) is int and isinstance(event["args"], dict)
        assert event["pid"] >= 1 and event["tid"] >= 1
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name") and isinstance(event["args"]["name"], str)
        else:
            assert event["ts"] >= 0 and event["dur"] >= 0 and (event["pid"], event["tid"]) in named
    for read in READERS:
        ended: defaultdict[tuple[int, int], int] = defaultdict(int)
        for event in (e for e in document["traceEvents"] if e["ph"] == "X"):
            track, start = (event["pid"], event["tid"]), read(event["ts"] * 1000)
            assert start >= ended[track], event
            ended[track] = start + read(event["dur"] * 1000)


def test_a_long_trace_has_no_bars_that_overlap() -> None:
    document, found = trace(Layout(dp_shard=8, tp=8), layers=32, batch=16 * 8)
    check_format(document)
    bars = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert len(bars) > 3000
    end = max(bar["ts"] + bar["dur"] for bar in bars)
    assert end / 1e6 == pytest.approx(found.step_seconds.expected, abs=2e-9)


def test_a_trace_of_a_pipeline_has_none_either() -> None:
    """Nor have the stages that were not rehearsed: each has all its micro-steps, and ends with the step."""
    document, found = trace(Layout(pp=4, dp_shard=2, tp=8), batch=256)
    check_format(document)
    for pid in (FIRST, *(STAGES_FROM + stage for stage in (1, 2, 3))):
        own = [event for event in document["traceEvents"] if event["ph"] == "X" and event["pid"] == pid]
        names = [bar["name"] for bar in own]
        assert {"bubble", "optimizer"} <= set(names)
        number = found.choice.micro_steps
        assert names.count("forward layers.0") == names.count("backward layers.0") == number == 128
        assert max(bar["ts"] + bar["dur"] for bar in own) / 1e6 == pytest.approx(found.step_seconds.expected, abs=2e-9)


def test_both_readers_see_the_same_nanoseconds() -> None:
    random.seed(1)
    for number in [*range(3000), *(random.randrange(10**13) for _ in range(3000))]:
        assert {read(microseconds(number) * 1000) for read in READERS} == {number}
    assert microseconds(1_500) == 1.5


def test_ranks_and_tracks_are_named() -> None:
    document, found = trace(Layout(dp_shard=8, tp=8))
    names = {(e["pid"], e["tid"], e["name"]): e["args"]["name"] for e in document["traceEvents"] if e["ph"] == "M"}
    assert names == {
        (1, 1, "process_name"): "rank 0, stage 0",
        (1, 1, "thread_name"): "compute",
        (1, 2, "thread_name"): "dp_shard",
        (1, 3, "thread_name"): "tp",
    }
    gather = next(event for event in document["traceEvents"] if event["name"] == "all-gather")
    assert gather["tid"] == 2 and gather["args"] == {"bytes": 1000, "for": "layers.0"}
    about = document["otherData"]
    assert about["step_seconds"] == found.step_seconds.expected and 0 < about["data_messages_shortened"]["0"] <= 1


def test_stages_that_were_not_rehearsed_have_bubbles_of_their_own() -> None:
    document, found = trace(Layout(pp=4, dp_shard=2, tp=8))
    names = {e["pid"]: e["args"]["name"] for e in document["traceEvents"] if e["name"] == "process_name"}
    assert names == {
        1: "rank 0, stage 0",
        **{STAGES_FROM + n: f"stage {n}: not rehearsed, with the work of rank 0" for n in (1, 2, 3)},
    }
    assert list(document["otherData"]["data_messages_shortened"]) == ["0", "stage 1", "stage 2", "stage 3"]
    begins = []
    for stage in (1, 2, 3):
        bars = [e for e in document["traceEvents"] if e["ph"] == "X" and e["pid"] == STAGES_FROM + stage]
        bubbles = [bar["dur"] for bar in bars if bar["name"] == "bubble"]
        assert sum(bubbles) / 1e6 == pytest.approx(found.time.bubble, rel=1e-3)
        begins.append(next(bar["ts"] for bar in bars if bar["name"].startswith("forward")))
    assert begins == sorted(set(begins)) and begins[0] > 0, "each waits for the one before it"


@pytest.mark.parametrize("layout", [Layout(dp_shard=8, tp=8), Layout(pp=4, dp_shard=2, tp=8)])
def test_perfetto_reads_it(layout: Layout) -> None:
    perfetto = pytest.importorskip("perfetto.trace_processor", reason="Perfetto's trace processor is not installed")
    document, _ = trace(layout, layers=32)
    bars = [event for event in document["traceEvents"] if event["ph"] == "X"]
    try:
        processor = perfetto.TraceProcessor(trace=io.BytesIO(json.dumps(document).encode()))
    except (OSError, subprocess.SubprocessError) as error:  # the package fetches its program when it is first asked for
        pytest.skip(f"Perfetto's trace processor cannot be fetched: {error}")
    with processor:
        (row,) = processor.query("select count(*) as n from slice")
        assert row.n == len(bars)
