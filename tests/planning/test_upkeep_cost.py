"""What a step waits for samples and checkpoints, by hand."""

from dataclasses import replace
from typing import Any

import pytest

from allranks.cluster import Cluster, Correction
from allranks.named_models import find_model
from allranks.plan import Choice
from allranks.planning.block_parts import forget
from allranks.planning.choices import every_choice
from allranks.planning.estimate import estimate
from allranks.planning.search import Search, rank
from allranks.planning.setting import Setting, setting_of
from allranks.planning.upkeep_cost import checkpoint_seconds, input_seconds, left_out
from allranks.upkeep import Upkeep
from tests.planning.profiles import choose, cluster, decoder
from tests.planning.questions import ask

PROFILE = decoder()
TWO_NODES = cluster(2, storage_bandwidth=1e9)


def on_processor(where: Cluster) -> Cluster:
    return replace(where, device=replace(where.device, name="cpu"))


def choice(upkeep: Upkeep, **layout: Any) -> Choice:
    return replace(choose(64, 2, **layout), upkeep=upkeep)


def setting(**upkeep: Any) -> Setting:
    return setting_of(choice(Upkeep(**upkeep), dp_shard=16))


def test_a_waited_checkpoint_is_written_by_all_nodes_and_shared_by_the_steps_between_two() -> None:
    """12 bytes a parameter: the weight and two averages, each once."""
    seconds = checkpoint_seconds(PROFILE, TWO_NODES, setting(save_every=50), 1.0)
    assert seconds == pytest.approx(12 * PROFILE.parameters / 2 / 1e9 / 50)


def test_a_checkpoint_beside_the_steps_costs_its_copy() -> None:
    state, share = 12 * PROFILE.parameters, 12 * PROFILE.parameters / 16
    beside = setting(save_every=50, beside=True)
    assert checkpoint_seconds(PROFILE, TWO_NODES, beside, 1.0) == pytest.approx(share / 20e9 / 50)
    copied = 2 * share / 1e12
    assert checkpoint_seconds(PROFILE, on_processor(TWO_NODES), beside, 1.0) == pytest.approx(copied / 50)
    short = state / 2 / 1e9 / 50 / 2  # the next one comes due when half of it is written
    assert checkpoint_seconds(PROFILE, TWO_NODES, beside, short) == pytest.approx((share / 20e9) / 50 + short)


def test_what_nobody_knows_takes_no_time() -> None:
    unknown = replace(TWO_NODES, storage_bandwidth=None)
    assert checkpoint_seconds(PROFILE, unknown, setting(save_every=50), 1.0) == 0.0
    assert checkpoint_seconds(PROFILE, TWO_NODES, setting(), 1.0) == 0.0
    assert input_seconds(TWO_NODES, setting(), 1.0) == 0.0


def test_samples_are_loaded_behind_the_steps_but_for_the_thread_of_a_processor() -> None:
    slow = {"sample_seconds": 0.5}  # 4 samples of a rank's step: 2 s
    assert input_seconds(on_processor(TWO_NODES), setting(**slow), 1.5) == 2.0
    assert input_seconds(TWO_NODES, setting(**slow), 1.5) == 0.5
    assert input_seconds(on_processor(TWO_NODES), setting(**slow, workers=1), 1.5) == 0.5
    assert input_seconds(TWO_NODES, setting(**slow, workers=2), 1.5) == 0.0
    # Each rank reads all 64 of the step.
    assert input_seconds(TWO_NODES, setting(**slow, workers=1, reads_all=True), 1.5) == 30.5


def test_an_estimate_has_both_and_a_longer_step_for_them() -> None:
    forget()
    upkeep = Upkeep(save_every=2, sample_seconds=1.0)
    plain = estimate(PROFILE, TWO_NODES, choice(Upkeep(), dp_shard=16))
    found = estimate(PROFILE, TWO_NODES, choice(upkeep, dp_shard=16))
    assert plain.time.input == plain.time.checkpoint == 0.0
    assert found.time.input == pytest.approx(4.0 - plain.time.total)
    assert found.time.checkpoint == pytest.approx(12 * PROFILE.parameters / 2 / 1e9 / 2)
    assert found.step_seconds.expected == found.time.total == pytest.approx(4.0 + found.time.checkpoint)
    assert found.samples_per_second == pytest.approx(64 / found.time.total)
    assert found.memory == plain.memory


def test_a_checkpoints_copy_stands_in_the_hosts_memory() -> None:
    """12 bytes a parameter over the nodes, whatever else is moved there; a host without room for it fits nothing."""
    forget()
    copied = 12 * PROFILE.parameters / 2
    beside = Upkeep(save_every=5, beside=True)
    for offload in ("none", "parameters"):
        plain, found = (
            estimate(PROFILE, TWO_NODES, choice(upkeep, dp_shard=16, offload=offload)) for upkeep in (Upkeep(), beside)
        )
        assert found.host_bytes - plain.host_bytes == pytest.approx(copied)
        assert plain.copied_bytes == 0.0 and found.copied_bytes == pytest.approx(copied), "which --check leaves there"
    by_time = estimate(PROFILE, TWO_NODES, choice(Upkeep(save_seconds=1800.0, beside=True), dp_shard=16))
    assert by_time.host_bytes == pytest.approx(copied) and by_time.time.checkpoint == 0.0
    one = replace(TWO_NODES, nodes=1)
    for upkeep in (Upkeep(state_copies=3), Upkeep(save_every=5, beside=True, state_copies=3)):
        found = estimate(PROFILE, one, choice(upkeep, dp_shard=8))
        assert found.host_bytes == pytest.approx(6 * copied), "copies in memory are told with the one they are made of"
        found = estimate(PROFILE, TWO_NODES, choice(upkeep, dp_shard=16))
        assert found.host_bytes == pytest.approx(5 * copied), "and each file of two of them is on two hosts"
    small = replace(TWO_NODES, host_memory_bytes=copied)
    assert not estimate(PROFILE, small, choice(beside, dp_shard=16)).fits_host
    assert estimate(PROFILE, small, choice(Upkeep(save_every=5), dp_shard=16)).fits_host


@pytest.mark.parametrize("upkeep", [
    Upkeep(save_every=1, sample_seconds=0.02), Upkeep(sample_seconds=0.02), Upkeep(save_every=2, beside=True),
    Upkeep(sample_seconds=1e-4),
])  # fmt: skip
def test_the_search_finds_the_best_of_all_with_them(upkeep: Upkeep) -> None:
    """Where the waits make most of them equally fast, the one with the least work."""
    question = ask("gpt2", "4:a100-80g", 32, seq=1024, upkeep=upkeep)
    space = question.on(replace(question.cluster, storage_bandwidth=1e8)).space()
    found, every = Search(space).run(), Search(space).weigh(every_choice(space))
    assert found.best is not None and every.best is not None and rank(found.best) == rank(every.best)
    fit = [one for one in every.estimates.values() if one.fits]
    fastest = min(one.step_seconds.expected for one in fit)
    alike = [one for one in fit if one.step_seconds.expected == pytest.approx(fastest, rel=1e-12)]
    assert found.best.time.work == pytest.approx(min(one.time.work for one in alike), rel=1e-8)
    assert found.num_choices < every.num_choices / 2


def test_waits_that_make_all_equally_fast_leave_the_search_as_short_as_it_was() -> None:
    """Loading takes 12 s, the work less than that: what has the least work is still looked for first."""
    question = ask("llama3-8b", "8:a100-80g", 64, seq=4096)
    plain = Search(question.space()).run()
    loading = Search(replace(question, upkeep=Upkeep(sample_seconds=1.5)).space()).run()
    assert plain.best is not None and loading.best is not None
    assert loading.best.step_seconds.expected == pytest.approx(12.0)
    assert loading.best.time.work == pytest.approx(plain.best.time.work)
    assert loading.num_choices < 1.1 * plain.num_choices


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_correction_is_of_the_work_and_not_of_what_it_waits_for(factor: float) -> None:
    """A Task that loads for 99 s on the loop's own thread loads for as long, however slow its work was."""
    there = on_processor(TWO_NODES)
    slow = replace(there, corrections={"": Correction(factor, factor, 1)})
    upkeep = Upkeep(sample_seconds=0.5, save_every=3)
    plain, found = (estimate(PROFILE, where, choice(upkeep, dp_shard=16)) for where in (there, slow))
    assert (found.time.input, found.time.checkpoint) == (plain.time.input, plain.time.checkpoint) and plain.time.input
    assert found.time.work == pytest.approx(factor * plain.time.work)
    assert found.step_seconds.expected == pytest.approx(found.time.total)
    hidden = estimate(PROFILE, slow, choice(replace(upkeep, workers=1, save_every=0), dp_shard=16))
    assert hidden.step_seconds.expected == pytest.approx(max(found.time.work, 4 * 0.5))


def test_what_is_left_out_is_said_with_because() -> None:
    unknown = replace(TWO_NODES, storage_bandwidth=None)
    assert [line.partition(", because ")[0] for line in left_out(unknown, Upkeep())] == [
        "the step time holds no input", "the step time holds no checkpoint"
    ]  # fmt: skip
    (waited,) = left_out(unknown, Upkeep(save_every=5, sample_seconds=0.1))
    assert waited.startswith("the step time holds no checkpoint, because 2x8:toy says no storage_gb_per_s")
    (beside,) = left_out(unknown, Upkeep(save_every=5, sample_seconds=0.1, beside=True))
    assert beside.startswith("the step time holds of a checkpoint its copy alone, because ")
    assert left_out(TWO_NODES, Upkeep(save_every=5, sample_seconds=0.1)) == ()
    (copied,) = left_out(TWO_NODES, Upkeep(save_every=5, sample_seconds=0.1, state_copies=2))
    assert copied.startswith("the step time holds no copy in memory, because ")


def test_a_model_of_eight_billion_parameters_saves_96_gigabytes() -> None:
    profile = find_model("llama3-8b").profile(4096)
    one_node = cluster(storage_bandwidth=2e9)
    assert 100 * checkpoint_seconds(profile, one_node, setting(save_every=100), 1.0) == pytest.approx(48.2, rel=0.01)
