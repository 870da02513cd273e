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
    group = group_of(TWO_NODES, CONSTANTS, 16, ((8, 1),))
    assert (group.near, group.crosses, group.link.name) == (8, False, "inside")
    latency = CONSTANTS.base_seconds + 7 * CONSTANTS.hop_seconds
    # Every rank sends and receives 2 (n - 1) / n of the tensor.
    expected = 2 * 7 / 8 * GB / (100e9 * CONSTANTS.inside) + latency
    assert all_reduce_seconds(group, GB) == pytest.approx(expected)
    assert all_gather_seconds(group, GB) == pytest.approx((expected - latency) / 2 + latency)


def test_a_ring_between_nodes_shares_the_cards_of_its_ranks() -> None:
    whole = group_of(TWO_NODES, CONSTANTS, 16, ((16, 1),))
    alone = group_of(TWO_NODES, CONSTANTS, 16, ((2, 8),))
    assert (whole.near, alone.near) == (8, 1)
    assert whole.bandwidth == min(100e9 * CONSTANTS.inside, 8 * 10e9 * CONSTANTS.between)
    assert alone.bandwidth == 10e9 * CONSTANTS.between


def test_gathers_take_a_hop_for_every_node_and_reductions_do_not() -> None:
    big = cluster(nodes=128)
    group = group_of(big, CONSTANTS, 1024, ((1024, 1),))
    ring = CONSTANTS.base_seconds + 128 * (NETWORK_HOP_SECONDS + 7 * CONSTANTS.hop_seconds)
    assert group.ring_seconds == pytest.approx(ring)
    assert group.latency_seconds < group.ring_seconds / 10
    passed = 1023 / 1024 * GB / group.bandwidth
    assert all_gather_seconds(group, GB) == pytest.approx(passed + group.ring_seconds)
    assert all_reduce_seconds(group, GB) == pytest.approx(2 * passed + group.latency_seconds)


def test_one_rank_sends_nothing() -> None:
    group = group_of(TWO_NODES, CONSTANTS, 16, ((1, 1),))
    assert all_reduce_seconds(group, GB) == all_gather_seconds(group, GB) == all_to_all_seconds(group, GB) == 0.0
    assert send_seconds(group, GB, False) == 0.0


def test_all_to_all_is_bound_by_each_ranks_own_card() -> None:
    group = group_of(TWO_NODES, CONSTANTS, 16, ((16, 1),))
    seconds = all_to_all_seconds(group, GB) - group.latency_seconds
    assert seconds == pytest.approx(8 / 16 * GB / (10e9 * CONSTANTS.between))
    assert all_to_all_seconds(group, GB, 0.5) - group.latency_seconds == pytest.approx(seconds / 2)


def test_a_card_is_no_part_of_the_links_inside() -> None:
    """H800: 150 GB/s to the seven others of a node, and 40 to each rank of other nodes, not an eighth of the 150."""
    slow = replace(TWO_NODES, inside=Link("inside", 30e9, 1e-6))
    group = group_of(slow, CONSTANTS, 16, ((16, 1),))
    assert group.bandwidth == 30e9 * CONSTANTS.inside < 8 * group.card
    assert group.card == 10e9 * CONSTANTS.between
    assert all_to_all_seconds(group, GB) == pytest.approx(8 / 16 * GB / group.card + group.latency_seconds)
    assert send_seconds(group, GB, True) == pytest.approx(GB / group.card + 1e-5)
    assert send_seconds(group, GB, False) == pytest.approx(GB / (30e9 * CONSTANTS.inside) + 1e-5)


def test_what_stays_inside_runs_beside_what_leaves() -> None:
    """Where hardly anything leaves, the copies that the node makes of it take longer: 7 and 8 of 16 parts inside."""
    slow = replace(TWO_NODES, inside=Link("inside", 10e9, 1e-6))
    group = group_of(slow, CONSTANTS, 16, ((16, 1),))
    seconds = all_to_all_seconds(group, GB, 0.0) - group.latency_seconds
    assert seconds == pytest.approx(15 / 16 * GB / (10e9 * CONSTANTS.inside))


def test_the_group_that_leaves_its_node_is_the_axis() -> None:
    """Six of 3 nodes of eight: {6-11} has two ranks in the first node, whose cards are all that it has there."""
    three = cluster(nodes=3)
    group = group_of(three, CONSTANTS, 24, ((6, 1),))
    assert (group.size, group.near, group.domains, group.link.name) == (6, 2, 2, "between")
    assert group.bandwidth == 2 * 10e9 * CONSTANTS.between
    twelve = group_of(three, CONSTANTS, 24, ((12, 1),))
    assert twelve.bandwidth == 4 * 10e9 * CONSTANTS.between
    # Four of six parts leave the rank that has one other beside it.
    seconds = all_to_all_seconds(group, GB) - group.latency_seconds
    assert seconds == pytest.approx(4 / 6 * GB / group.card)
    assert group.ring_seconds == pytest.approx(
        CONSTANTS.base_seconds + 2 * NETWORK_HOP_SECONDS + 4 * CONSTANTS.hop_seconds
    )


def test_measured_times_take_the_formulas_place() -> None:
    table = {"all_reduce": {8: ((1e6, 1e-4), (1e9, 1e-2))}}
    measured = replace(TWO_NODES, inside=Link("inside", 100e9, 1e-6, table))
    group = group_of(measured, CONSTANTS, 16, ((8, 1),))
    assert all_reduce_seconds(group, 1e5) == 1e-4  # below the table: what the least took
    assert all_reduce_seconds(group, 4e9) == pytest.approx(4e-2)  # above: at the rate of the largest
    assert all_reduce_seconds(group, (1e6 + 1e9) / 2) == pytest.approx((1e-4 + 1e-2) / 2)
    assert all_gather_seconds(group, GB) == all_gather_seconds(group_of(TWO_NODES, CONSTANTS, 16, ((8, 1),)), GB)
    assert all_reduce_seconds(group_of(measured, CONSTANTS, 16, ((4, 1),)), GB) > 1e-2  # nobody measured four


def test_a_table_of_ranks_on_nodes_of_their_own_is_of_no_others() -> None:
    """Three of {6, 7, 8} are on two nodes: between nodes somebody measured one rank of each."""
    table = {"all_reduce": {3: ((1e9, 1.0),)}, "send": {2: ((1e9, 2.0),)}}
    measured = replace(cluster(nodes=3), between=Link("between", 10e9, 1e-5, table))
    assert all_reduce_seconds(group_of(measured, CONSTANTS, 24, ((3, 8),)), GB) == 1.0
    assert all_reduce_seconds(group_of(measured, CONSTANTS, 24, ((3, 1),)), GB) < 0.5
    stages = group_of(measured, CONSTANTS, 12, ((2, 6),))  # rank 0 sends to 6 beside it, rank 2 to 8
    assert send_seconds(stages, GB, True) == 2.0 and send_seconds(stages, GB, False) < 0.1


def test_a_message_that_leaves_the_node_takes_one_card() -> None:
    group = group_of(TWO_NODES, CONSTANTS, 16, ((2, 8),))
    assert send_seconds(group, GB, True) == pytest.approx(GB / (10e9 * CONSTANTS.between) + 1e-5)
