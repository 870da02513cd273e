"""The groups that the page draws are those that the engine makes."""

import itertools

import pytest

from allranks.layout import Layout
from allranks.parallel.mesh import MESH_AXES
from allranks.reporting.axis_places import MESH_ORDER, Axis, devices_on_node, place_axes, show_nodes


def test_ranks_are_counted_as_the_engine_counts_them() -> None:
    assert MESH_ORDER == MESH_AXES


@pytest.mark.parametrize(
    "layout",
    [Layout(pp=2, dp_replicate=2, dp_shard=3, cp=2, tp=4), Layout(dp_shard=8), Layout(tp=2, pp=3), Layout()],
)
def test_ranks_of_a_group_differ_on_its_axis_alone(layout: Layout) -> None:
    degrees = [getattr(layout, name) for name in MESH_AXES]
    places = list(itertools.product(*map(range, degrees)))
    found = place_axes(layout, 8)
    assert [axis.name for axis in found] == [name for name in MESH_AXES if getattr(layout, name) > 1]
    for axis in found:
        along = MESH_AXES.index(axis.name)
        zero = [place for place in places if all(c == 0 for i, c in enumerate(place) if i != along)]
        assert list(axis.ranks) == [places.index(place) for place in zero]
        assert axis.num_groups * axis.degree == layout.world_size


def test_experts_are_cut_over_neighbouring_data_ranks() -> None:
    layout = Layout(pp=2, dp_replicate=2, dp_shard=4, tp=2, ep=4)
    *_, experts = place_axes(layout, 8)
    assert (experts.name, experts.ranks, experts.num_groups) == ("ep", (0, 2, 4, 6), 8)


def test_nodes_are_those_of_the_group_that_is_spread_the_most() -> None:
    outer, inner = place_axes(Layout(pp=4, tp=8), 8)
    assert (outer.num_nodes, inner.num_nodes) == (4, 1)
    # Rank 0's group is on one node, the one behind it on two.
    straddling = place_axes(Layout(dp_shard=3, tp=8), 12)[1]
    assert (straddling.num_nodes, straddling.ranks) == (2, tuple(range(8, 16)))


def test_all_nodes_of_a_small_cluster_are_shown() -> None:
    axis = place_axes(Layout(pp=2, dp_shard=4, tp=2), 8)[0]
    nodes = show_nodes(axis, 16, 2, 8)
    assert [node.number for node in nodes] == [0, 1]
    assert [rank for node in nodes for rank, inside in node.devices if inside] == [0, 8]
    assert [rank for node in nodes for rank, _ in node.devices] == list(range(16))


def test_of_a_large_cluster_those_of_the_group_are_shown() -> None:
    axis = place_axes(Layout(pp=16, dp_shard=128, tp=8), 8)[0]
    nodes = show_nodes(axis, 16384, 2048, 8)
    assert [node.number for node in nodes] == [128 * stage for stage in range(8)]
    assert sum(len(node.devices) for node in nodes) == 64


def test_devices_without_a_rank_are_idle_and_large_nodes_are_cut() -> None:
    axis = Axis("tp", 2, 1, (0, 1), 1)
    assert show_nodes(axis, 2, 1, 4)[0].devices == ((0, True), (1, True), (None, False), (None, False))
    (large,) = show_nodes(axis, 100, 1, 100)
    assert (len(large.devices), large.left_out) == (64, 36)


def test_devices_on_a_node() -> None:
    assert [devices_on_node(64, 8), devices_on_node(1, 1), devices_on_node(9, 2)] == [8, 1, 5]
