"""Other sizes of the same cluster."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.errors import ConfigError
from allranks.planning.hardware import find_cluster
from allranks.planning.scale import cluster_of, fewest_nodes, largest, sizes_of

NODES = find_cluster("4x8:a100-80g")


@pytest.mark.parametrize(
    ("number", "nodes", "each", "domain"), [(1, 1, 1, 1), (4, 1, 4, 4), (8, 1, 8, 8), (64, 8, 8, 8), (32, 4, 8, 8)]
)
def test_whole_nodes_or_a_part_of_one(number: int, nodes: int, each: int, domain: int) -> None:
    found = cluster_of(NODES, number)
    assert (found.nodes, found.devices_per_node, found.domain) == (nodes, each, domain)
    assert found.num_devices == number
    assert found.device == NODES.device and found.between == NODES.between


def test_the_same_number_is_the_same_cluster() -> None:
    assert cluster_of(NODES, 32) == NODES


def test_a_rack_stays_a_rack() -> None:
    rack = find_cluster("18x4:gb200")
    assert cluster_of(rack, 72).domain == rack.domain
    assert cluster_of(rack, 8).domain == 8


def test_parts_of_a_second_node_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--gpus 12: 4x8:a100-80g has nodes of 8 devices; use 8 or 16"):
        cluster_of(NODES, 12)
    with pytest.raises(ConfigError, match="no devices"):
        cluster_of(NODES, 0)


def test_sizes_rise_by_a_half_at_most() -> None:
    sizes = list(sizes_of(NODES))
    assert sizes[:7] == [1, 2, 4, 8, 16, 24, 32]
    for smaller, larger in pairwise(sizes[4:]):
        assert smaller < larger <= 1.5 * smaller
    assert all(cluster_of(NODES, size).num_devices == size for size in sizes)


@given(st.integers(2, 4096), st.data(), st.sampled_from([1, 8]))
def test_the_fewest_nodes_between_two_sizes(found: int, data: st.DataObject, each: int) -> None:
    failed = data.draw(st.integers(1, found - 1))
    limit = data.draw(st.integers(failed + 1, found))
    asked: list[int] = []

    def does(number: int) -> bool:
        asked.append(number)
        return number >= limit * each

    assert fewest_nodes(does, failed * each, found * each, each) == limit * each
    assert len(asked) <= 12 and all(failed * each < number < found * each for number in asked)


def test_parts_of_a_node_leave_nothing_between() -> None:
    def none(number: int) -> bool:
        raise AssertionError(number)

    assert fewest_nodes(none, 4, 8, 8) == 8 and fewest_nodes(none, 8, 16, 8) == 16 and fewest_nodes(none, 0, 1, 8) == 1


@given(st.integers(0, 5000), st.sampled_from([1, 7, 128]))
def test_the_largest_that_does(limit: int, step: int) -> None:
    asked: list[int] = []

    def does(number: int) -> bool:
        asked.append(number)
        return number <= limit

    assert largest(does, step, 4096) == min(limit, 4096) // step * step
    assert len(asked) <= 30 and max(asked) <= 4096
