"""Collectives on small clusters, by hand."""

from dataclasses import replace

import pytest

from allranks.cluster import Link
from allranks.planning.collectives import (
    NETWORK_HOP_SECONDS,
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    group_of,
    send_seconds,
)
from allranks.planning.constants import constants_of
from tests.planning.profiles import cluster

TWO_NODES = cluster(nodes=2)
CONSTANTS = constants_of(TWO_NODES.device)
GB = 1e9


def test_a_ring_inside_a_node() -> None:
    group = group_of(TWO_NODES, CONSTANTS, 8, 1)
    assert (group.near, group.crosses, group.link.name) == (8, False, "inside")
    latency = CONSTANTS.base_seconds + 7 * CONSTANTS.hop_seconds
    # Every rank sends and receives 2 (n - 1) / n of the tensor.
    expected = 2 * 7 / 8 * GB / (100e9 * CONSTANTS.inside) + latency
    assert all_reduce_seconds(group, GB) == pytest.approx(expected)
    assert all_gather_seconds(group, GB) == pytest.approx((expected - latency) / 2 + latency)


def test_a_ring_between_nodes_shares_the_cards_of_its_ranks() -> None:
    whole = group_of(TWO_NODES, CONSTANTS, 16, 1)
    alone = group_of(TWO_NODES, CONSTANTS, 2, 8)
    assert (whole.near, alone.near) == (8, 1)
    assert whole.bandwidth == min(100e9 * CONSTANTS.inside, 8 * 10e9 * CONSTANTS.between)
    assert alone.bandwidth == 10e9 * CONSTANTS.between


def test_gathers_take_a_hop_for_every_node_and_reductions_do_not() -> None:
    big = cluster(nodes=128)
    group = group_of(big, CONSTANTS, 1024, 1)
    ring = CONSTANTS.base_seconds + 128 * (NETWORK_HOP_SECONDS + 7 * CONSTANTS.hop_seconds)
    assert group.ring_seconds == pytest.approx(ring)
    assert group.latency_seconds < group.ring_seconds / 10
    passed = 1023 / 1024 * GB / group.bandwidth
    assert all_gather_seconds(group, GB) == pytest.approx(passed + group.ring_seconds)
    assert all_reduce_seconds(group, GB) == pytest.approx(2 * passed + group.latency_seconds)


def test_one_rank_sends_nothing() -> None:
    group = group_of(TWO_NODES, CONSTANTS, 1, 1)
    assert all_reduce_seconds(group, GB) == all_gather_seconds(group, GB) == all_to_all_seconds(group, GB) == 0.0
    assert send_seconds(group, GB, False) == 0.0


def test_all_to_all_is_bound_by_each_ranks_own_card() -> None:
    group = group_of(TWO_NODES, CONSTANTS, 16, 1)
    seconds = all_to_all_seconds(group, GB) - group.latency_seconds
    assert seconds == pytest.approx(8 / 16 * GB / (group.bandwidth / 8))
    assert all_to_all_seconds(group, GB, 0.5) - group.latency_seconds == pytest.approx(seconds / 2)


def test_measured_times_take_the_formulas_place() -> None:
    table = {"all_reduce": {8: ((1e6, 1e-4), (1e9, 1e-2))}}
    measured = replace(TWO_NODES, inside=Link("inside", 100e9, 1e-6, table))
    group = group_of(measured, CONSTANTS, 8, 1)
    assert all_reduce_seconds(group, 1e5) == 1e-4  # below the table: what the least took
    assert all_reduce_seconds(group, 4e9) == pytest.approx(4e-2)  # above: at the rate of the largest
    assert all_reduce_seconds(group, (1e6 + 1e9) / 2) == pytest.approx((1e-4 + 1e-2) / 2)
    assert all_gather_seconds(group, GB) == all_gather_seconds(group_of(TWO_NODES, CONSTANTS, 8, 1), GB)
    assert all_reduce_seconds(group_of(measured, CONSTANTS, 4, 1), GB) > 1e-2  # nobody measured four


def test_a_message_that_leaves_the_node_takes_one_card() -> None:
    group = group_of(TWO_NODES, CONSTANTS, 2, 8)
    assert send_seconds(group, GB, True) == pytest.approx(GB / (10e9 * CONSTANTS.between) + 1e-5)
