"""What-if: one change, checked by the same rules, weighed by the same estimate."""

from dataclasses import replace
from typing import Any

import pytest

from allranks.errors import ConfigError, LayoutError
from allranks.layout import Layout
from allranks.plan import Choice, Estimate
from allranks.planning.changes import in_units, usual_changes, what_if
from allranks.planning.estimate import estimate
from allranks.planning.question import Question
from allranks.planning.scale import cluster_of
from allranks.planning.this_machine import look
from allranks.units import format_bytes
from tests.planning.profiles import decoder
from tests.planning.questions import ask

QUESTION = ask()
UNKNOWN = ask(where="2x8:a800")  # nobody says what its hosts have
LAYOUT = Layout(dp_replicate=2, dp_shard=4, tp=2)


def weigh(question: Question = QUESTION, **changes: Any) -> Estimate:
    micro_batch = changes.pop("micro_batch", 1)
    choice = Choice(replace(LAYOUT, **changes), question.global_batch, micro_batch)
    return estimate(question.make_profile(question.seq, "bfloat16"), question.cluster, choice)


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        ("recompute=full", {"recompute": "full"}),
        ("sharding=grad_op", {"sharding": "grad_op"}),
        ("micro_batch=2", {"micro_batch": 2}),
        ("tp=4", {"tp": 4, "dp_replicate": 1}),
        ("dp_shard=8", {"dp_shard": 8, "dp_replicate": 1}),
        ("cp=4", {"tp": 2, "cp": 4, "dp_replicate": 2, "dp_shard": 1}),
    ],
)
def test_a_change_is_weighed_as_if_the_user_had_chosen_it(change: str, fields: dict[str, Any]) -> None:
    expected = weigh(**fields)
    if change == "tp=4":
        expected = weigh(tp=4, dp_replicate=1, dp_shard=4)
    if change == "cp=4":
        expected = weigh(tp=2, cp=4, dp_replicate=2, dp_shard=1)
    found = what_if(change, weigh(), QUESTION)
    assert found.change == change and found.estimate is not None
    assert found.estimate.peak_bytes == expected.peak_bytes
    assert found.estimate.step_seconds == expected.step_seconds


def test_a_larger_micro_batch_is_asked_about_where_there_is_more_than_one() -> None:
    share = QUESTION.global_batch // 8
    for micro_batch, larger in ((share // 2, True), (share, False)):
        found = usual_changes(weigh(micro_batch=micro_batch), QUESTION)
        assert (f"micro_batch={2 * micro_batch}" in found) == larger
        assert f"micro_batch={micro_batch // 2}" in found
    fixed = usual_changes(weigh(micro_batch=share // 2), replace(QUESTION, micro_steps=2))
    assert not [change for change in fixed if change.startswith("micro_batch")], "no run may take them"


def test_because_is_the_difference_in_memory_and_speed() -> None:
    first, full = weigh(), weigh(recompute="full")
    size = (full.memory.total - first.memory.total) / 1e9
    speed = full.samples_per_second / first.samples_per_second - 1
    assert size < 0 and speed < 0
    assert what_if("recompute=full", first, QUESTION).because.startswith(f"-{-size:.1f} GB, {speed:+.0%} speed")


def test_that_it_then_no_longer_fits_is_said() -> None:
    for change, may_fit, words in (
        ("micro_batch=4", True, "is not sure to fit"),
        ("sharding=none", False, "does not fit"),
    ):
        found = what_if(change, weigh(), QUESTION)
        assert found.estimate is not None and not found.estimate.fits
        assert found.estimate.may_fit is may_fit
        assert found.because.endswith(f", then it {words}")


def test_other_numbers_of_devices_change_the_data_parallel_ranks() -> None:
    found = what_if("gpus=32", weigh(), QUESTION).estimate
    assert found is not None
    assert found.choice.layout == replace(LAYOUT, dp_replicate=4)
    there = QUESTION.on(cluster_of(QUESTION.cluster, 32))
    assert found.step_seconds == weigh(there, dp_replicate=4).step_seconds


def test_seq_and_precision_are_other_profiles() -> None:
    longer = what_if("seq=8192", weigh(), QUESTION).estimate
    assert longer is not None and longer.tokens_per_second == pytest.approx(longer.samples_per_second * 8192)
    wide = what_if("precision=float32", weigh(), QUESTION).estimate
    assert wide is not None and wide.choice.precision == "float32"
    assert wide.step_seconds.expected > weigh().step_seconds.expected


def test_larger_units_are_gathered_whole() -> None:
    wide = decoder(layers=8, hidden=1024, ffn=8192)  # whose backward is fuller than its loss
    question = replace(QUESTION, make_profile=lambda seq, precision: wide)
    one, found = weigh(question), what_if("unit=4", weigh(question), question).estimate
    assert found is not None
    assert found.memory.gathered > 2 * one.memory.gathered
    assert found.memory.weights == pytest.approx(one.memory.weights)
    profile = decoder(layers=8)
    four = in_units(profile, 4)
    assert (four.parameters, four.num_repeated) == (profile.parameters, 2)
    assert four.flops == pytest.approx(profile.flops)
    with pytest.raises(LayoutError, match="units of 3 blocks do not divide 8 of layers"):
        in_units(profile, 3)


@pytest.mark.parametrize(
    ("change", "because"),
    [
        ("tp=16", "refused: tp=16 does not divide 8 key-value heads; tp can be 1, 2, 4, 8"),
        ("tp=3", "refused: tp * cp * pp = 3 does not divide 16 devices"),
        ("dp_shard=3", "refused: dp_shard=3 does not divide the 8 data-parallel ranks"),
        ("gpus=12", "refused: 2x8:a100-80g has nodes of 8 devices; use 8 or 16"),
        ("gpus=3", "refused: tp * cp * pp = 2 does not divide 3 devices"),
        ("micro_batch=999", "refused: a data-parallel rank has "),
        ("unit=5", "refused: units of 5 blocks do not divide 32 of layers.*"),
        ("offload=all", "give host_memory_gb in a cluster file (weights and the optimizer's state are "),
    ],
)
def test_a_change_that_no_rule_lets_in_is_refused(change: str, because: str) -> None:
    found = what_if(change, weigh(), UNKNOWN if "offload" in change else QUESTION)
    assert found.estimate is None and because in found.because


@pytest.mark.parametrize(
    "change", ["micro_batch=" + 320 * "9", "tp=" + 5000 * "9", "gpus=" + 30 * "9", "seq=" + 400 * "9"]
)
def test_a_size_that_nothing_has_is_one_line(change: str) -> None:
    with pytest.raises(ConfigError, match=r"what-if .*more than 1e\+1[28], which no run has") as told:
        what_if(change, weigh(), QUESTION)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("key", ["micro_batch", "global_batch", "gpus", "tp", "ep", "unit"])
def test_the_largest_size_that_is_taken_has_an_answer(key: str) -> None:
    assert what_if(f"{key}={10**12}", weigh(), QUESTION).because


def test_other_processes_on_this_processor_are_no_other_machines() -> None:
    """Half of them have twice as much memory each; twice as many compute no faster than there are cores."""
    question = ask(where="1x2:cpu")
    choice = Choice(Layout(dp_replicate=2), question.global_batch, 1, "float32")
    first = estimate(question.make_profile(question.seq, "float32"), question.cluster, choice)
    one = what_if("gpus=1", first, question).estimate
    assert one is not None and one.capacity_bytes == pytest.approx(2 * first.capacity_bytes, rel=1e-6)
    cores = look().cores
    many = what_if(f"gpus={2 * cores}", first, question).estimate
    assert many is not None and many.time.compute > first.time.compute * 0.9 * min(1, 2 / cores)


def test_positions_are_written_as_for_the_whole_plan() -> None:
    short, long = (what_if(change, weigh(), QUESTION) for change in ("seq=8192", "seq=8k"))
    assert short.estimate is not None and short.estimate == long.estimate and short.because == long.because
    assert short.estimate != weigh()


def test_the_optimizer_on_the_host_is_weighed_and_says_what_the_host_holds() -> None:
    """Where nobody says how much memory a host has, too: the line has what it takes."""
    found = what_if("offload=parameters", weigh(UNKNOWN), UNKNOWN)
    assert found.estimate is not None and found.estimate.host_capacity_bytes is None
    assert found.estimate.memory.optimizer == 0.0
    assert f", {format_bytes(found.estimate.host_bytes)} in each host's memory" in found.because


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("recompute", "write KEY=VALUE"),
        ("recomputes=full", "did you mean recompute"),
        ("tp=0", "tp takes a whole number of at least 1"),
        ("seq=8x", "seq 8x: not understood; write 30, 30k, 30m"),
        ("recompute=ful", "no recompute is called 'ful'; did you mean 'full'"),
        ("sharding=banana", "no sharding is called 'banana'; it can be full, grad_op, none, optimizer"),
        ("schedule=foo", "no schedule is called 'foo'"),
        ("offload=disk", "no offload is called 'disk'"),
        ("context=star", "no context is called 'star'; it can be ulysses, ring"),
        ("gather=int8", "no gather is called 'int8'; it can be float32, bfloat16"),
        ("ddp_hook=zip", "no ddp_hook is called 'zip'"),
        ("compile=x", "no compile is called 'x'; it can be none, block"),
        ("precision=int4", "no precision is called 'int4'"),
    ],
)
def test_what_is_no_change_is_an_error(change: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        what_if(change, weigh(), QUESTION)


def test_the_usual_changes_change_something() -> None:
    first = weigh()
    changes = usual_changes(first, QUESTION)
    assert changes == [
        *("recompute=selective", "recompute=full", "sharding=grad_op", "sharding=optimizer"),
        *("offload=activations", "offload=parameters", "micro_batch=2", "precision=float32", "gpus=8", "gpus=32"),
    ]
    for change in changes:
        found = what_if(change, first, QUESTION)
        assert found.estimate is None or found.estimate.choice != first.choice or change.startswith("gpus")
