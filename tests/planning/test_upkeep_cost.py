"""What a step waits for samples and checkpoints, by hand."""

from dataclasses import replace
from typing import Any

import pytest

from allranks.cluster import Cluster
from allranks.named_models import find_model
from allranks.plan import Choice
from allranks.planning.block_parts import forget
from allranks.planning.estimate import estimate
from allranks.planning.search import Search
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


def test_the_search_finds_the_best_of_all_with_them() -> None:
    question = ask("gpt2", "8:a100-80g", 64, seq=1024, upkeep=Upkeep(save_every=1, sample_seconds=0.02))
    question = question.on(replace(question.cluster, storage_bandwidth=1e8))
    found = Search(question.space()).run()
    assert found.best is not None and found.best.time.input > 0 and found.best.time.checkpoint > 0
    best = min(one.step_seconds.expected for one in found.estimates.values() if one.fits)
    assert found.best.step_seconds.expected == best


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


def test_a_model_of_eight_billion_parameters_saves_96_gigabytes() -> None:
    profile = find_model("llama3-8b").profile(4096)
    one_node = cluster(storage_bandwidth=2e9)
    assert 100 * checkpoint_seconds(profile, one_node, setting(save_every=100), 1.0) == pytest.approx(48.2, rel=0.01)
