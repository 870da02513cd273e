"""Gradients and weights between copies, and the update."""

from typing import Any

import pytest

from allranks.planning.axis_traffic import Axes, axes_of
from allranks.planning.collectives import all_gather_seconds, all_reduce_seconds
from allranks.planning.compute import update_seconds
from allranks.planning.data_traffic import DataCost, data_cost
from allranks.planning.setting import Mechanisms, Setting, mechanisms_of
from tests.planning.profiles import choose, cluster

WHERE = cluster(nodes=2)
P = 1e9


def made(how: Mechanisms | None = None, **given: Any) -> tuple[Setting, Axes]:
    setting = Setting(**{"global_batch": 64, "micro_batch": 1, "dp": 16, "mechanisms": how or Mechanisms(), **given})
    return setting, axes_of(WHERE, setting)


def cost(how: Mechanisms | None = None, seconds: float = 0.0, **given: Any) -> DataCost:
    setting, axes = made(how, **given)
    return data_cost(setting, axes, P, 0.0, 10, seconds, 2 * seconds)


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


def test_weights_that_stay_gathered_are_gathered_once_a_micro_step() -> None:
    how = Mechanisms(gather_bytes=2, reduce_bytes=4)
    got = cost(how, zero=3, shard=16, keeps_gathered=True)
    assert got.sent_bytes == 4 * (2 + 4) * P
    once = Mechanisms(gather_bytes=2, reduce_bytes=4, reduces_every_micro_step=False)
    assert cost(once, zero=3, shard=16, keeps_gathered=True).sent_bytes == (2 + 4) * P


def test_copies_of_shards_reduce_what_is_left() -> None:
    how = Mechanisms(gather_bytes=2, reduce_bytes=4)
    extra = all_reduce_seconds(made()[1].data, 4 * P / 8)
    setting, axes = made(how, zero=3, shard=8)
    gather, reduce = (10 * all_gather_seconds(axes.shard, size * P / 10) for size in (2, 4))
    got, steps = cost(how, zero=3, shard=8), setting.micro_steps
    assert got.seconds == pytest.approx(steps * (2 * gather + reduce + extra))
    assert got.sent_bytes == steps * (2 * 2 + 4) * P, "among those who share"
    assert got.copies is not None and got.copies.seconds == pytest.approx(steps * extra)
    assert (got.copies.sent_bytes, got.copies.count) == (steps * 2 * 4 * P / 8, steps * 10)
    assert cost(how, zero=3, shard=16).copies is None


def test_low_rank_matrices_alone_travel_where_the_rest_is_frozen() -> None:
    assert cost(frozen=True).update == 0.0
    assert cost(frozen=True).sent_bytes == pytest.approx(0.01 * cost().sent_bytes)
