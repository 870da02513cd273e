"""What a dry run counted becomes an Estimate: its memory as counted, messages in proportion to their bytes."""

import json
from dataclasses import replace
from typing import Any

import pytest

from allranks.layout import Layout
from allranks.plan import Estimate, MemoryUse, StepTime, Traffic
from allranks.planning.checking import weigh
from allranks.planning.dry_run import DryRun, corrected, ratios, read_dry_run, what_changed
from allranks.rehearsal import Finding
from allranks.rehearsed_messages import Collective
from tests.rehearsing.tasks import Experts, rehearsed
from tests.reporting.plans import make_estimate
from tests.test_rehearsal import rank, rehearsal

FSDP = Layout(dp_shard=4, tp=2)

COUNTED = "12.0 GB counted (1.0 GB of it cuBLAS's and the batch's)"


def planned(**changes: Any) -> Estimate:
    """10 s of computation, 2 of tp and 1 of dp; 10 GB of tensors and 2 GB of framework on 20 GB."""
    found = make_estimate(
        FSDP,
        MemoryUse(weights=4e9, activations=6e9, framework=2e9),
        StepTime(compute=10.0, tensor=2.0, data=1.0),
        capacity=20e9,
        traffic=(Traffic("tp", "nvlink3", 1e9, 4, 2.0, 0.0), Traffic("dp", "hdr200", 8e9, 4, 3.0, 2.0)),
    )
    return replace(found, **changes)


def told(**changes: Any) -> DryRun:
    """12 GB of tensors and 4 GB of margin; messages as planned."""
    counted = DryRun(12e9, 4e9, {"weights": 4e9, "activations": 7e9, "other": 1e9}, {"tp": 1e9, "dp": 8e9})
    return replace(counted, **changes)


def sent(layout: Layout, *collectives: Collective) -> dict[str, float]:
    document = rehearsal(replace(rank(), collectives=collectives)).to_json()
    return dict(read_dry_run(json.loads(json.dumps(document)), layout, 8).sent_bytes)


def test_the_document_of_a_dry_run_is_read() -> None:
    first, fullest = rank(0, 500), rank(7, 800)
    found = read_dry_run(json.loads(json.dumps(rehearsal(first, fullest).to_json())), Layout(dp_shard=8, tp=8), 8)
    assert (found.peak_bytes, found.margin_bytes, found.fault) == (800, 100.0, "")
    assert found.by_category == {"weights": 100, "activations": 700}
    assert found.sent_bytes == {"tp": pytest.approx(40 * 8 / 7)}


def test_what_waits_counts_for_every_process_of_a_node() -> None:
    told = rehearsal(replace(rank(0, 900), host_peak_bytes=70), replace(rank(1), host_peak_bytes=90))
    assert read_dry_run(told.to_json(), FSDP, 4).host_bytes == 360


@pytest.mark.parametrize(("host_bytes", "fits"), [(3e9, True), (3.1e9, False)])
def test_a_host_has_to_have_room_for_what_was_counted(host_bytes: float, fits: bool) -> None:
    """Planned is half of it: pinned memory comes in powers of two."""
    before, counted = planned(host_bytes=1.5e9, host_capacity_bytes=3e9), told(host_bytes=host_bytes)
    after = corrected(before, counted)
    assert (
        after.host_bytes == host_bytes
        and after.fits is fits
        and weigh(before, counted).outcome == ("stands" if fits else "dropped")
    )
    short = "" if fits else "; 3.1 GB in a host's memory, which has 3.0 GB for what is moved there (80% of its 3.8 GB)"
    assert what_changed(before, counted) == f"{COUNTED}, 10.0 GB planned{short}; messages as planned"


def test_copies_of_checkpoints_stay_beside_what_was_counted() -> None:
    """A dry run is of steps: what checkpoints keep in the host it does not see."""
    before = planned(host_bytes=2.5e9, copied_bytes=2e9, host_capacity_bytes=3e9)
    assert corrected(before, told(host_bytes=0.0)).host_bytes == 2e9
    after = corrected(before, told(host_bytes=1.1e9))
    assert after.host_bytes == 3.1e9 and not after.fits and after.copied_bytes == 2e9


def test_the_first_fault_of_any_rank_is_told_with_its_move() -> None:
    harmless, fatal = Finding("unsharded", "w lies whole", "cut it"), Finding("hang", "rank 7 waits", "x", fails=True)
    assert read_dry_run(rehearsal(rank(0, 500, harmless)).to_json(), FSDP, 8).fault == ""
    assert read_dry_run(rehearsal(rank(0, 500, harmless), rank(7, 500, fatal)).to_json(), FSDP, 8).fault == (
        "rank 7 waits; x"
    )
    assert read_dry_run(replace(rehearsal(), findings=(fatal,)).to_json(), FSDP, 8).fault == "rank 7 waits; x"


def test_bytes_are_counted_as_a_plan_counts_them() -> None:
    """A gather over 4 brings a rank three quarters of what the plan has; a stage sends what it sends."""
    gather, scatter = (
        Collective("dp_shard", "all-gather", 30, 2, 4, ""),
        Collective("tp", "reduce-scatter", 5, 1, 2, ""),
    )
    assert sent(FSDP, gather, scatter) == {"dp": 40.0, "tp": 10.0}
    folded = Collective("dp_shard+cp", "all-gather", 30, 2, 4, "")
    assert sent(FSDP, gather, folded) == {"dp": 80.0}
    there, back = Collective("pp", "send", 7, 1, 2, ""), Collective("pp", "receive", 9, 1, 2, "")
    tied = Collective("pp", "all-reduce", 11, 1, 2, "")
    assert sent(Layout(pp=2), there, back, tied) == {"pp": 7.0}
    assert sent(Layout(), Collective("all", "all-reduce", 0, 1, 1, "")) == {}


def test_sums_over_copies_count_apart_where_parameters_are_shared() -> None:
    copies, gather = (Collective(axis, "all-reduce", 30, 1, 4, "") for axis in ("dp_replicate", "dp_shard"))
    assert sent(Layout(dp_replicate=4), copies) == {"dp": 40.0}
    assert sent(Layout(dp_replicate=2, dp_shard=2), copies, gather, gather) == {"dp_replicate": 40.0, "dp_shard": 80.0}
    assert sent(Layout(dp_shard=2), copies) == {}
    assert sent(Layout(dp_replicate=2, dp_shard=2, sharding="none"), copies) == {"dp": 40.0}


def test_gradients_of_a_sequences_ranks_are_no_sequences_traffic() -> None:
    """Without other data-parallel ranks it is those of cp that sum them."""
    sums, swap = Collective("cp", "all-reduce", 30, 1, 4, ""), Collective("cp", "all-to-all", 30, 1, 4, "")
    assert sent(Layout(cp=4), sums, swap) == {"dp": 40.0, "cp": 40.0}
    assert sent(Layout(cp=4, dp_replicate=2), sums, swap) == {"cp": 80.0}


@pytest.mark.full
def test_a_run_whose_experts_lie_along_a_data_axis_has_both() -> None:
    """Their ranks are the same; the planner has a row of Traffic for each."""
    told = rehearsed(Experts(), "dp_replicate=2,ep=2", 2)
    found = sent(Layout(dp_replicate=2, ep=2), *told.collectives)
    exchanged = sum(one.bytes for one in told.collectives if one.op == "all-to-all")
    assert found["ep"] == pytest.approx(2 * exchanged, rel=1e-3)
    reduced = 4 * sum(p.numel() for name, p in Experts().model().named_parameters() if ".experts." not in name)
    assert set(found) == {"ep", "dp"} and found["dp"] == pytest.approx(2 * reduced, rel=1e-3)


def test_the_busiest_rank_counts_for_each_axis() -> None:
    first = replace(rank(0), collectives=(Collective("pp", "send", 7, 1, 2, ""), Collective("tp", "send", 1, 1, 2, "")))
    middle = replace(rank(1), collectives=(Collective("pp", "send", 9, 1, 2, ""),))
    assert read_dry_run(rehearsal(first, middle).to_json(), Layout(pp=2), 8).sent_bytes == {"pp": 9.0, "tp": 1.0}


def test_memory_is_what_was_counted() -> None:
    found = corrected(planned(), told())
    assert found.memory == MemoryUse(weights=4e9, activations=8e9, framework=2e9)
    assert (found.peak_bytes.low, found.peak_bytes.expected, found.peak_bytes.high) == (14e9, 16e9, 16e9)
    assert found.fits and found.step_seconds == planned().step_seconds and found.time == planned().time


@pytest.mark.parametrize(("margin", "fits"), [(8e9, True), (8.1e9, False), (0.0, True)])
def test_what_fits_leaves_the_margin_free(margin: float, fits: bool) -> None:
    """As `Rehearsal.free_bytes`; a processor has no margin, and a process takes there what was planned."""
    found = corrected(planned(), told(margin_bytes=margin))
    assert found.fits is fits
    assert found.peak_bytes.expected == 12e9 + max(margin, 2e9)


def test_messages_take_longer_in_proportion_to_their_bytes() -> None:
    after = corrected(planned(), told(sent_bytes={"tp": 1.5e9, "dp": 4e9}))
    assert (after.time.tensor, after.time.data, after.time.compute) == (3.0, 0.5, 10.0)
    slower = 13.5 / 13.0
    for name in ("low", "expected", "high"):
        assert getattr(after.step_seconds, name) == pytest.approx(slower * getattr(planned().step_seconds, name))
    assert after.mfu == pytest.approx(planned().mfu / slower)
    assert after.samples_per_second == pytest.approx(planned().samples_per_second / slower)
    assert after.tokens_per_second == pytest.approx(planned().tokens_per_second / slower)
    assert [(row.sent_bytes, row.seconds, row.hidden_seconds) for row in after.traffic] == [
        *((1.5e9, 3.0, 0.0), (4e9, 1.5, 1.0)),
    ]


def test_each_of_two_data_axes_scales_its_own_part() -> None:
    """Of the second that is exposed three quarters are those of the copies."""
    rows = (Traffic("dp_shard", "nvlink3", 8e9, 4, 1.25, 1.0), Traffic("dp_replicate", "hdr200", 1e9, 4, 2.75, 2.0))
    after = corrected(planned(traffic=rows), told(sent_bytes={"dp_shard": 16e9, "dp_replicate": 3e9}))
    assert after.time.data == pytest.approx(2 * 0.25 + 3 * 0.75)
    only = corrected(planned(traffic=rows), told(sent_bytes={"dp_replicate": 3e9}))
    assert only.time.data == pytest.approx(0.25 + 3 * 0.75)


def test_small_differences_and_axes_that_nobody_counted_change_nothing() -> None:
    assert ratios(planned(), told(sent_bytes={"tp": 1.009e9})) == {}
    assert ratios(planned(), told(sent_bytes={"dp": 8.16e9, "ep": 3.0})) == {"dp": pytest.approx(1.02)}
    assert ratios(planned(), told(sent_bytes={"dp_shard": 4e9})) == {"dp": 0.5}, "of a plan with one row for both"
    links = (Traffic("tp", "nvlink3", 4e8, 4, 2.0, 0.0), Traffic("tp", "hdr200", 6e8, 4, 2.0, 0.0))
    assert ratios(planned(traffic=links), told()) == {}


def test_what_would_fail_fits_nowhere_and_keeps_its_figures() -> None:
    found = corrected(planned(), DryRun(fault="rank 7 waits; x"))
    assert not found.fits and found.fault == "rank 7 waits; x" and found.memory == planned().memory
    assert what_changed(planned(), DryRun(fault="rank 7 waits; x")) == "would fail: rank 7 waits; x"


def test_one_line_says_what_changed() -> None:
    plain = told(by_category={"weights": 4e9, "activations": 7e9, "other": 4e8})
    assert what_changed(planned(), plain) == "12.0 GB counted, 10.0 GB planned; messages as planned"
    assert what_changed(planned(), told(margin_bytes=9e9, sent_bytes={"tp": 1.5e9})) == (
        f"{COUNTED}, 10.0 GB planned; with 9.0 GB of margin more than 20.0 GB; activations 7.0 GB; "
        "bytes by axis times tp 1.50: step 13.0 s -> 14.0 s"
    )
