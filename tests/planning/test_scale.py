"""Other sizes of the same cluster."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.errors import ConfigError
from allranks.planning import this_machine
from allranks.planning.assembly import MOST_DEVICES
from allranks.planning.hardware import find_cluster
from allranks.planning.scale import cluster_of, fewest_nodes, largest, sizes_of, step_of

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


def test_a_part_of_a_rack_grows_into_one() -> None:
    """What joins 72 devices is known of the device: four of them say nothing against it."""
    part = find_cluster("1x4:gb200")
    assert part.domain == 4
    for number, domain in ((72, 72), (36, 36), (144, 72), (2, 2)):
        grown = cluster_of(part, number)
        assert grown.domain == domain
        nodes = f"{number // 4}x4:gb200" if number >= 4 else f"1x{number}:gb200"
        assert replace(find_cluster(nodes), notes=()) == replace(grown, notes=())


def test_a_rack_that_a_file_describes_stays_as_it_says() -> None:
    half = replace(find_cluster("9x4:gb200"), domain=12)
    assert cluster_of(half, 72).domain == 12
    own = replace(find_cluster("1x4:gb200"), inside=replace(NODES.inside, name="ours"))
    assert cluster_of(own, 72).domain == 4


def test_other_processes_on_this_processor_share_the_same_machine() -> None:
    two = replace(find_cluster("1x2:cpu"), device_hour_price=0.5, device_watts=9.0)
    assert two.host_memory_bytes is not None
    for number in (1, 3, 4):
        found = cluster_of(two, number)
        there = find_cluster(f"1x{number}:cpu")
        assert found == replace(there, device_hour_price=0.5, device_watts=9.0)
        assert (found.nodes, found.num_devices) == (1, number)
        assert number * found.device.memory_bytes == pytest.approx(two.host_memory_bytes)
    assert cluster_of(two, 2) is not None and cluster_of(two, 2).device == two.device
    many = find_cluster("1x6:cpu")
    sizes = list(sizes_of(many))
    assert step_of(many) == 1 and sizes[0] == 1 and sizes == sorted(set(sizes))
    assert max(sizes) <= max(6, this_machine.look().cores)


def test_nodes_of_processors_come_and_go_whole() -> None:
    nodes = find_cluster("2x2:cpu")
    assert step_of(nodes) == 2 and cluster_of(nodes, 8).nodes == 4
    assert cluster_of(nodes, 8).device == nodes.device
    with pytest.raises(ConfigError, match="nodes of 2 devices; use 2 or 4"):
        cluster_of(nodes, 3)


def test_parts_of_a_second_node_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--gpus 12: 4x8:a100-80g has nodes of 8 devices; use 8 or 16"):
        cluster_of(NODES, 12)
    with pytest.raises(ConfigError, match="no devices"):
        cluster_of(NODES, 0)
    with pytest.raises(ConfigError, match="more than the 10000000 devices that a plan takes"):
        cluster_of(NODES, 8 * 10**7)


def test_sizes_rise_by_a_half_at_most() -> None:
    sizes = list(sizes_of(NODES))
    assert sizes[:7] == [1, 2, 4, 8, 16, 24, 32]
    for smaller, larger in pairwise(sizes[4:]):
        assert smaller < larger <= 1.5 * smaller
    assert all(cluster_of(NODES, size).num_devices == size for size in sizes)


def test_sizes_of_wide_nodes_end_where_a_plan_does() -> None:
    """Of 4096 nodes of 4096 devices each the last third is more than any plan takes."""
    wide = find_cluster("4096:h100")
    sizes = list(sizes_of(wide))
    assert 5_000_000 < max(sizes) <= MOST_DEVICES
    assert all(cluster_of(wide, size).num_devices == size for size in sizes)


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
