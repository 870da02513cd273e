"""Gradients and weights between copies, and the update."""

from typing import Any

import pytest

from allranks.planning.axis_traffic import Axes, axes_of
from allranks.planning.block_cost import Around, Parameters
from allranks.planning.collectives import all_gather_seconds, all_reduce_seconds
from allranks.planning.compute import update_seconds
from allranks.planning.data_traffic import DataCost, data_cost
from allranks.planning.mechanisms import Mechanisms, mechanisms_of
from allranks.planning.setting import Setting
from tests.planning.profiles import choose, cluster

WHERE = cluster(nodes=2)
P = 1e9


def made(how: Mechanisms | None = None, **given: Any) -> tuple[Setting, Axes]:
    setting = Setting(**{"global_batch": 64, "micro_batch": 1, "dp": 16, "mechanisms": how or Mechanisms(), **given})
    return setting, axes_of(WHERE, setting)


def cost(how: Mechanisms | None = None, seconds: float = 0.0, **given: Any) -> DataCost:
    setting, axes = made(how, **given)
    return data_cost(setting, axes, Parameters(P, 0.0, P, 0.0), 10, seconds, 2 * seconds)


def test_one_copy_sends_nothing_and_still_steps() -> None:
    got = cost(dp=1)
    assert (got.seconds, got.exposed, got.sent_bytes) == (0.0, 0.0, 0.0)
    assert got.update == pytest.approx(update_seconds(made(dp=1)[1].machine, P))


def test_copies_reduce_their_gradients_once_a_step() -> None:
    how = Mechanisms(reduce_bytes=2, overlap_data=0.0)
    expected = all_reduce_seconds(made()[1].data, 2 * P)
    assert cost(how).seconds == cost(how).exposed == expected
    assert cost(how, micro_batch=2).seconds == expected


def test_what_overlaps_hides_behind_the_backward() -> None:
    how = Mechanisms(reduce_bytes=2, overlap_data=0.9)
    alone, hidden = cost(how), cost(how, seconds=1e3)
    assert alone.exposed == alone.seconds
    assert hidden.exposed == pytest.approx(0.1 * hidden.seconds)


def test_a_sharded_optimizer_scatters_and_gathers() -> None:
    how = Mechanisms(reduce_bytes=4, gather_bytes=2)
    got = cost(how, zero=1, shard=16)
    data = made()[1].data
    # ZeRO 1910.02054, section 7: as much as an all-reduce, in two halves.
    assert got.seconds == pytest.approx(all_gather_seconds(data, 4 * P) + all_gather_seconds(data, 2 * P))
    machine = made()[1].machine
    assert got.update == pytest.approx(update_seconds(machine, P / 16))


def test_a_sharded_optimizer_of_ours_sums_everything_everywhere() -> None:
    """As `parallel/optimizer_shard.py` does: DDP's all-reduce, and a gather of what the update has changed."""
    how = Mechanisms(reduce_bytes=4, gather_bytes=2, reduces_to_all=True, overlap_data=1.0)
    got, axes = cost(how, 1e3, zero=1, shard=16), made(zero=1, shard=16)[1]
    gather = all_gather_seconds(axes.shard, 4 * P)
    assert got.seconds == pytest.approx(all_reduce_seconds(axes.data, 4 * P) + gather)
    assert got.exposed == pytest.approx(gather), "no computation is left to hide it"
    assert got.sent_bytes == (2 * 4 + 4) * P
    assert mechanisms_of(choose(16, 1, dp_shard=16, sharding="optimizer")).reduces_to_all
    assert not mechanisms_of(choose(16, 1, dp_shard=16)).reduces_to_all


def test_fsdp_gathers_twice_and_reduces_once_for_every_micro_step() -> None:
    how = Mechanisms(gather_bytes=2, reduce_bytes=4)
    got = cost(how, zero=3, shard=16)
    shard = made(zero=3, shard=16)[1].shard
    gather, reduce = (10 * all_gather_seconds(shard, size * P / 10) for size in (2, 4))
    steps = 64 // 16
    assert got.seconds == pytest.approx(steps * (2 * gather + reduce))
    assert got.sent_bytes == steps * (2 * 2 + 4) * P
    assert got.count == steps * 3 * 10
    # Nothing to hide behind: all of it is exposed. Everything to hide behind: the first gather and the last reduction.
    assert got.exposed == pytest.approx(got.seconds)
    hidden = cost(Mechanisms(gather_bytes=2, reduce_bytes=4, overlap_data=1.0), 1e3, zero=3, shard=16)
    assert hidden.exposed == pytest.approx(steps * (gather / 10 + reduce / 10))


def test_what_stands_around_the_blocks_stays_gathered_until_its_backward() -> None:
    """FSDP2's root; of a mixture the experts that ep cuts are gathered by nobody, wherever they stand."""
    how = Mechanisms(gather_bytes=2, reduce_bytes=4, keeps_around=True, experts_stay=True)
    setting, axes = made(how, zero=3, shard=16)
    every, around = Parameters(P, 0.0, P), Around(2, Parameters(0.3 * P, 0.0, 0.3 * P))
    got, steps = data_cost(setting, axes, every, 10, 0.0, 0.0, around), setting.micro_steps
    assert got.sent_bytes == pytest.approx(steps * (2 * (1 + 0.7) + 4) * P)
    assert got.count == steps * (10 + 8 + 10)
    gather, reduce = (10 * all_gather_seconds(axes.shard, size * P / 10) for size in (2, 4))
    again = 8 * all_gather_seconds(axes.shard, 2 * 0.7 * P / 8)
    assert got.seconds == pytest.approx(steps * (gather + again + reduce)) == got.exposed
    with_experts = Around(2, Parameters(0.3 * P, P, 0.3 * P, P))
    cut, axes = made(how, zero=3, shard=16, ep=8)
    assert data_cost(cut, axes, every, 10, 0.0, 0.0, with_experts).sent_bytes == got.sent_bytes


def test_a_model_without_repeated_blocks_is_gathered_once_a_micro_step() -> None:
    setting, axes = made(Mechanisms(gather_bytes=2, reduce_bytes=4, keeps_around=True), zero=3, shard=16)
    got = data_cost(setting, axes, Parameters(P, 0.0, P), 10, 0.0, 0.0, Around(10, Parameters(P, 0.0, P)))
    assert (got.sent_bytes, got.count) == (4 * (2 + 4) * P, 4 * 2 * 10)
    assert mechanisms_of(choose(16, 1, dp_shard=16)).keeps_around


def test_weights_that_stay_gathered_are_gathered_once_a_micro_step() -> None:
    how = Mechanisms(gather_bytes=2, reduce_bytes=4)
    got = cost(how, zero=3, shard=16, keeps_gathered=True)
    assert got.sent_bytes == 4 * (2 + 4) * P
    once = Mechanisms(gather_bytes=2, reduce_bytes=4, reduces_every_micro_step=False)
    assert cost(once, zero=3, shard=16, keeps_gathered=True).sent_bytes == (2 + 4) * P


def test_copies_of_shards_reduce_what_is_left_once_a_step() -> None:
    """Each rank with the one that has the same part in the other node, over a card of its own."""
    how = Mechanisms(gather_bytes=2, reduce_bytes=4)
    setting, axes = made(how, zero=3, shard=8)
    assert (axes.copies.size, axes.copies.link.name) == (2, WHERE.between.name)
    extra = all_reduce_seconds(axes.copies, 4 * P / 8)
    gather, reduce = (10 * all_gather_seconds(axes.shard, size * P / 10) for size in (2, 4))
    got, steps = cost(how, zero=3, shard=8), setting.micro_steps
    assert steps == 4 and got.seconds == pytest.approx(steps * (2 * gather + reduce) + extra)
    assert got.sent_bytes == steps * (2 * 2 + 4) * P, "among those who share"
    assert got.copies is not None and got.copies.seconds == pytest.approx(extra)
    assert (got.copies.sent_bytes, got.copies.count) == (2 * 4 * P / 8, 10)
    assert cost(how, zero=3, shard=16).copies is None


def test_copies_of_shards_that_eight_ranks_sum_at_once_do_not_have_all_cards_each() -> None:
    """What one ring over all ranks would have, of which a node's eight cards carry one."""
    _, axes = made(zero=3, shard=8)
    assert all_reduce_seconds(axes.copies, P) > 3 * all_reduce_seconds(axes.data, P)


def test_in_a_pipeline_copies_reduce_with_every_micro_step() -> None:
    once, each = cost(zero=3, shard=4).copies, cost(zero=3, shard=4, dp=8, pp=2).copies
    assert once is not None and once.count == 10
    assert each is not None and each.count == 8 * 10


def test_frozen_parameters_are_gathered_and_nothing_else() -> None:
    """Of half of them gradients travel, and half are updated."""
    how = Mechanisms(gather_bytes=2, reduce_bytes=4)
    setting, axes = made(how, zero=3, shard=16)
    half = data_cost(setting, axes, Parameters(P, 0.0, P / 2), 10, 0.0, 0.0)
    assert half.sent_bytes == setting.micro_steps * (2 * 2 * P + 4 * P / 2)
    assert half.update == pytest.approx(update_seconds(axes.machine, P / 2 / 16))
    setting, axes = made(how)
    assert data_cost(setting, axes, Parameters(P, 0.0, P / 2), 10, 0.0, 0.0).sent_bytes == 2 * 4 * P / 2


@pytest.mark.parametrize("zero", [0, 3])
def test_experts_that_ep_cuts_are_summed_by_those_who_hold_the_same_ones_once_a_step(zero: int) -> None:
    """Over both nodes, and nothing hides it; nobody gathers them."""
    how = Mechanisms(gather_bytes=2, reduce_bytes=4, experts_stay=True)
    setting, axes = made(how, zero=zero, shard=16 if zero else 1, ep=8)
    alone = data_cost(setting, axes, Parameters(P, 0.0, P), 10, 1.0, 2.0)
    both = data_cost(setting, axes, Parameters(P, P, P, P), 10, 1.0, 2.0)
    assert (axes.twins.size, axes.twins.link.name) == (2, WHERE.between.name)
    assert both.twins is not None and alone.twins is None
    assert both.twins.seconds == pytest.approx(all_reduce_seconds(axes.twins, how.gradient_bytes * P))
    assert both.exposed - alone.exposed == pytest.approx(both.twins.seconds)
    assert (both.sent_bytes, both.twins.sent_bytes) == (alone.sent_bytes, 2 * how.gradient_bytes * P)
    assert data_cost(*made(how, zero=zero, shard=1, ep=16), Parameters(P, P, P, P), 10, 1.0, 2.0).twins is None


def test_sharded_experts_are_gathered_and_reduced_by_those_who_hold_the_same_ones() -> None:
    """Twice and once a micro-step; backwards hide what is not a forward's, as far as the rest leaves them room."""
    how = Mechanisms(gather_bytes=2, reduce_bytes=4, experts_apart=True, overlap_data=1.0)
    setting, axes = made(how, zero=3, shard=16, ep=4)
    steps, gather = setting.micro_steps, 10 * all_gather_seconds(axes.twins, 2 * P / 10)
    reduce = 10 * all_gather_seconds(axes.twins, 4 * P / 10)
    alone, both = (data_cost(setting, axes, Parameters(P, e, P, e), 10, 0.0, 1e3) for e in (0.0, P))
    assert (axes.twins.size, axes.twin_copies.size, alone.twins) == (4, 1, None)
    assert both.twins is not None and both.sent_bytes == alone.sent_bytes
    assert (both.twins.sent_bytes, both.twins.count) == (steps * (2 * 2 + 4) * P, steps * 3 * 10)
    assert both.twins.seconds == pytest.approx(steps * (2 * gather + reduce))
    assert both.exposed - alone.exposed == pytest.approx(steps * gather), "of forwards"
    shown = data_cost(setting, axes, Parameters(P, P, P, P), 10, 0.0, 0.0)
    assert shown.twins is not None and shown.twins.hidden == 0.0
    kept, axes = made(how, zero=3, shard=16, ep=4, keeps_gathered=True)
    found = data_cost(kept, axes, Parameters(P, P, P, P), 10, 0.0, 1e3).twins
    assert found is not None and found.sent_bytes == steps * (2 + 4) * P


def test_copies_of_sharded_experts_sum_what_is_left_once_a_step() -> None:
    how = Mechanisms(gather_bytes=2, reduce_bytes=4, experts_apart=True)
    setting, axes = made(how, zero=3, shard=8, ep=4)
    twins = data_cost(setting, axes, Parameters(P, P, P, P), 10, 0.0, 0.0).twins
    assert (axes.twins.size, axes.twin_copies.size) == (2, 2) and twins is not None
    assert twins.sent_bytes == setting.micro_steps * (2 * 2 + 4) * P + 2 * 4 * P / 2


def test_low_rank_matrices_alone_travel_where_the_rest_is_frozen() -> None:
    assert cost(frozen=True).update == 0.0
    assert cost(frozen=True).sent_bytes == pytest.approx(0.01 * cost().sent_bytes)
