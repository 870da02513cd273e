"""The predicted step in the published trace format: every event is one of its kinds, with what that kind needs."""

import io
import json
import subprocess
from dataclasses import replace
from typing import Any

import pytest

from allranks.layout import Layout
from allranks.named_models import find_model
from allranks.plan import Choice
from allranks.planning.estimate import estimate
from allranks.planning.hardware import find_cluster
from allranks.rehearsal import Work
from allranks.rehearsed_messages import COPIES_OF_EXPERTS
from allranks.reporting.step_trace import STAGES_FROM, make_trace
from allranks.reporting.timeline import make_timeline
from tests.test_rehearsal import rank, rehearsal

WORKS = (
    Work("forward", "layers.1", 2e12, (("dp_shard", "all-gather", 1000), ("tp", "all-reduce", 500)), 3),
    Work("backward", "layers.1", 4e12, (("dp_shard", "reduce-scatter", 2000),), 3),
)


def trace(layout: Layout) -> tuple[dict[str, Any], Any]:
    """(a trace, the estimate that its seconds are from)."""
    told = rehearsal(replace(rank(), works=WORKS, flops=18e12))
    cluster = find_cluster("8x8:a100-80g")
    found = estimate(find_model("llama3-8b").profile(), cluster, Choice(layout, 64, 1))
    return json.loads(json.dumps(make_trace(told, found), allow_nan=False)), found


def check_format(document: dict[str, Any]) -> None:
    """Trace Event Format: an object with traceEvents; complete events (X) have ts and dur, metadata (M) a name."""
    assert document["displayTimeUnit"] in ("ms", "ns")
    assert isinstance(document["otherData"], dict)
    named = {(e["pid"], e["tid"]) for e in document["traceEvents"] if e["ph"] == "M" and e["name"] == "thread_name"}
    for event in document["traceEvents"]:
        assert event["ph"] in ("X", "M")
        assert isinstance(event["name"], str) and event["name"]
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int) and isinstance(event["args"], dict)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name") and isinstance(event["args"]["name"], str)
        else:
            assert event["ts"] >= 0 and event["dur"] >= 0 and (event["pid"], event["tid"]) in named
    by_track: dict[tuple[int, int], float] = {}
    for event in (e for e in document["traceEvents"] if e["ph"] == "X"):
        track = event["pid"], event["tid"]
        assert event["ts"] >= by_track.get(track, 0.0) - 0.002  # bars of a track follow one another
        by_track[track] = event["ts"] + event["dur"]


def test_a_rank_computes_and_sends_as_long_as_the_estimate_says() -> None:
    document, found = trace(Layout(dp_shard=8, tp=8))
    check_format(document)
    bars = [event for event in document["traceEvents"] if event["ph"] == "X"]
    seconds: dict[int, float] = {}
    for bar in bars:
        seconds[bar["tid"]] = seconds.get(bar["tid"], 0.0) + bar["dur"] / 1e6
    time = found.time
    assert seconds[0] == pytest.approx(time.compute + time.recompute + time.optimizer, rel=1e-3)
    rows = {row.axis: row.seconds for row in found.traffic}
    assert seconds[1] == pytest.approx(rows["dp"], rel=1e-3)
    assert seconds[2] == pytest.approx(rows["tp"], rel=1e-3)
    gather = next(bar for bar in bars if bar["name"] == "all-gather")
    assert gather["args"] == {"bytes": 1000, "for": "forward layers.1"}


def test_messages_of_tp_stop_the_computation_and_those_of_data_do_not() -> None:
    document, _ = trace(Layout(dp_shard=8, tp=8))
    bars = [event for event in document["traceEvents"] if event["ph"] == "X"]
    first, second = [bar for bar in bars if bar["tid"] == 0][:2]
    reduce = next(bar for bar in bars if bar["name"] == "all-reduce")
    assert second["ts"] == pytest.approx(reduce["ts"] + reduce["dur"], abs=0.01)
    assert reduce["ts"] == pytest.approx(first["ts"] + first["dur"], abs=0.01)


def test_messages_of_experts_have_a_track_and_what_their_copies_sum_counts_as_data() -> None:
    messages = (
        ("ep", "all-to-all", 1000),
        ("dp_replicate", "all-reduce", 3000),
        (COPIES_OF_EXPERTS, "all-reduce", 1000),
    )
    told = rehearsal(replace(rank(), works=(Work("backward", "layers.1", 2e12, messages),), flops=2e12))
    choice = Choice(Layout(dp_replicate=8, ep=4), 64, 1)
    found = estimate(find_model("mixtral-8x7b").profile(), find_cluster("1x8:h200"), choice)
    seconds = {row.axis: row.seconds for row in found.traffic}
    document = make_trace(told, found)
    check_format(json.loads(json.dumps(document)))
    events = document["traceEvents"]
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    bars = {tracks[event["tid"]]: event for event in events if event["ph"] == "X" and event["tid"]}
    assert {name: bar["dur"] / 1e6 for name, bar in bars.items()} == {
        "ep": pytest.approx(seconds["ep"], rel=1e-3),
        "dp_replicate": pytest.approx(seconds["dp"] * 3 / 4, rel=1e-3),
        COPIES_OF_EXPERTS: pytest.approx(seconds["dp"] / 4, rel=1e-3),
    }


def test_stages_have_their_bubbles() -> None:
    document, found = trace(Layout(pp=4, dp_shard=2, tp=8))
    check_format(document)
    bars = [event for event in document["traceEvents"] if event["ph"] == "X" and event["pid"] >= STAGES_FROM]
    assert {bar["pid"] - STAGES_FROM for bar in bars} == {0, 1, 2, 3}
    timeline = make_timeline(found.choice, found.time)
    for stage in range(4):
        waiting = sum(bar["dur"] for bar in bars if bar["pid"] == STAGES_FROM + stage and bar["name"] == "bubble")
        busy = sum(bar.end - bar.start for bar in timeline.bars if bar.rank == stage)
        assert waiting / 1e6 == pytest.approx(timeline.seconds - busy, rel=1e-3) and waiting > 0


def test_perfetto_reads_it() -> None:
    perfetto = pytest.importorskip("perfetto.trace_processor", reason="Perfetto's trace processor is not installed")
    document, _ = trace(Layout(dp_shard=8, tp=8))
    bars = [event for event in document["traceEvents"] if event["ph"] == "X"]
    try:
        processor = perfetto.TraceProcessor(trace=io.BytesIO(json.dumps(document).encode()))
    except (OSError, subprocess.SubprocessError) as error:  # the package fetches its program when it is first asked for
        pytest.skip(f"Perfetto's trace processor cannot be fetched: {error}")
    with processor:
        (row,) = processor.query("select count(*) as n from slice")
        assert row.n == len(bars)
