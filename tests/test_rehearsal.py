"""A Rehearsal says what the fullest rank has left, and whether anything would fail; its document is the design's."""

import json
from dataclasses import replace

from allranks.rehearsal import Finding, Holding, Moment, RankRehearsal, Rehearsal, Remedy
from allranks.rehearsed_messages import Collective, Message


def rank(number: int = 0, peak_bytes: int = 600, *findings: Finding) -> RankRehearsal:
    """One that holds weights and activations."""
    return RankRehearsal(
        rank=number,
        stage=0,
        peak_bytes=peak_bytes,
        by_category={"weights": 100, "activations": peak_bytes - 100},
        at="backward of layers.3",
        holdings=(Holding("layers.*", "activations", peak_bytes - 100), Holding("", "weights", 100)),
        resting_bytes=300,
        collectives=(Collective("tp", "all-reduce", 40, 2, 8, "task.py:3 forward"),),
        sequence=(Message("tp", "all-reduce", 20, 8, "task.py:3 forward"),) * 2,
        flops=2e12,
        findings=findings,
        moments=(
            Moment("start", "begin", "the step", 0, 300, 300),
            Moment("forward", "compute", "layers.1", 0, 500, peak_bytes, 7, {"weights": 100, "activations": 400}),
        ),
        traced=4,
        blocks=10,
    )


def rehearsal(*ranks: RankRehearsal) -> Rehearsal:
    """On a device of a thousand bytes, a hundred of them margin."""
    found = {one.rank: one for one in ranks or (rank(),)}
    return Rehearsal("100b", "8x8:a100-80g", "dp_shard=8,tp=8", 64, found, 1000.0, 100.0)


def test_the_fullest_rank_decides() -> None:
    told = rehearsal(rank(0, 600), rank(63, 950))
    assert (told.peak_bytes, told.free_bytes) == (950, -50.0)
    assert rehearsal().free_bytes == 300.0


def test_what_waits_has_to_find_room_on_the_host_where_its_size_is_known() -> None:
    told = rehearsal(replace(rank(), host_peak_bytes=70), replace(rank(1), host_peak_bytes=90))
    assert told.host_peak_bytes == 90 and told.fits
    assert replace(told, host_capacity_bytes=90.0).fits
    assert not replace(told, host_capacity_bytes=80.0).fits
    assert replace(told, host_capacity_bytes=80.0).to_json()["fits"] is False


def test_what_does_not_fit_has_a_next_move() -> None:
    full = rehearsal(rank(0, 950))
    assert full.next_move.startswith("--remedies rehearses") and full.to_json()["next"] == full.next_move
    assert rehearsal().next_move == ""
    tried = replace(full, remedies=(Remedy("layout.recompute=full", 300),))
    fatal = replace(full, findings=(Finding("hang", "a", "b", fails=True),))
    assert tried.next_move == fatal.next_move == "", "remedies and findings have their own"
    on_host = replace(rehearsal(replace(rank(), host_peak_bytes=90)), host_capacity_bytes=80.0)
    assert "offload" in on_host.next_move and "--remedies" not in on_host.next_move


def test_a_finding_may_fail() -> None:
    harmless, fatal = Finding("unsharded", "w lies whole", "cut it"), Finding("hang", "a", "b", fails=True)
    assert not rehearsal(rank(0, 600, harmless)).fails
    assert rehearsal(rank(0, 600, fatal)).fails
    assert replace(rehearsal(), findings=(fatal,)).fails
    assert str(harmless) == "w lies whole; cut it"


def test_the_document_is_the_designs() -> None:
    full = Remedy("layout.recompute=full", 300, slower=0.3, by="estimate", margin_bytes=50.0, fits=True)
    told = replace(rehearsal(rank(20)), remedies=(full,))
    document = json.loads(json.dumps(told.to_json(), allow_nan=False))
    assert document["fits"] is True
    found = document["ranks"]["20"]
    assert {"peak_bytes", "by_category", "collectives", "flops", "findings"} <= found.keys()
    assert {"axis", "op", "bytes", "count"} <= found["collectives"][0].keys()
    assert "moments" not in found
    timeline = json.loads(json.dumps(told.to_json(timeline=True)))["ranks"]["20"]["moments"]
    assert timeline[1]["live_by_category"] == {"weights": 100, "activations": 400}
    assert document["remedies"] == [
        {"change": "layout.recompute=full", "peak_bytes": 300, "because": "", "slower": 0.3, "by": "estimate"}
        | {"margin_bytes": 50.0, "fits": True}
    ]
