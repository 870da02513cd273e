"""Links inside a node and between nodes in another unit: which are told, and that right ones are not."""

from dataclasses import replace

import pytest

from allranks.cluster import Cluster
from allranks.planning.catalog import device_names, fabric_names, find_device, find_link, link_names
from allranks.planning.hardware import find_cluster
from allranks.planning.link_suspicions import suspect_between, suspect_inside

GIGA = 1e9


def inside(text: str, gb_per_s: float) -> Cluster:
    """A cluster whose link inside a node was given as a figure."""
    cluster = find_cluster(text)
    return replace(cluster, inside=replace(cluster.inside, name="inside", bandwidth=gb_per_s * GIGA, measured={}))


def pace(link: str) -> float:
    return find_link(link).bandwidth


def told(cluster: Cluster, device: str | None = None) -> list[str]:
    return list(suspect_inside(cluster, None if device is None else find_device(device)))


def test_the_vendors_figure_of_both_directions() -> None:
    (note,) = told(inside("8:h100", 900), "h100")
    assert note == (
        "inside: 900 GB/s are 2 times nvlink4, the link of h100, which sends 450 in one direction; is it the vendor's"
        " figure of both directions? One has 450"
    )


@pytest.mark.parametrize(
    ("device", "given", "why"),
    [
        ("a100-80g", 600, "both directions? One has 300"),
        ("a100-pcie", 64, "both directions? One has 32"),
        ("a100-pcie", 252, "did you mean Gbit/s: inside.gbit_per_s = 252?"),
        ("h100", 1800, "of both directions, of another device, or of a whole node?"),
    ],
)
def test_more_than_the_catalogs_link_of_the_device(device: str, given: float, why: str) -> None:
    (note,) = told(inside(f"8:{device}", given), device)
    assert why in note


@pytest.mark.parametrize(
    ("device", "given"), [("h100", 450), ("h100", 550), ("h100", 300), ("a100-pcie", 300), ("rtx3090", 56.25)]
)
def test_the_right_figure_and_a_bridge_over_pcie_are_believed(device: str, given: float) -> None:
    assert told(inside(f"8:{device}", given), device) == []


def test_slower_inside_a_node_than_between_nodes() -> None:
    (note,) = told(inside("8:h100", 10), "h100")
    assert note.startswith("inside: 10 GB/s (nvlink4, the link of h100, has 450) are slower than the 50 GB/s between")
    (unknown,) = told(inside("2x8:h100", 10))
    assert unknown.startswith("inside: 10 GB/s are slower than the 50 GB/s between nodes; is one of them in another")
    assert told(inside("8:h100", 10)) == []  # nothing is between nodes, and nobody knows the device
    assert told(inside("2x8:a100-pcie@400g", 25), "a100-pcie") == []  # PCIe beside a fast network


def test_where_a_link_joins_nobody_or_was_measured_it_is_believed() -> None:
    assert told(inside("2x1:h100", 900), "h100") == []
    wrong = inside("8:h100", 900)
    measured = replace(wrong.inside, measured={"send": {2: ((1e6, 1e-5),)}})
    assert told(replace(wrong, inside=measured), "h100") == [] != told(wrong, "h100")


@pytest.mark.parametrize(
    ("microseconds", "why"),
    [
        (3400, "= 3400 is 3.4 ms a hop, where links of the catalog take microseconds; did you mean nanoseconds: "),
        (0.014, "= 0.014 is less than a hop over any link takes; did you mean milliseconds: "),
    ],
)
def test_a_latency_in_another_unit(microseconds: float, why: str) -> None:
    cluster = find_cluster("2x8:h100")
    slow = replace(
        cluster,
        inside=replace(cluster.inside, latency_seconds=microseconds * 1e-6),
        between=replace(cluster.between, latency_seconds=microseconds * 1e-6),
    )
    (within,), (without,) = told(slow, "h100"), suspect_between(slow, {})
    assert within.startswith(f"inside.latency_microseconds {why}inside.latency_microseconds = ")
    assert without.startswith(f"between.latency_microseconds {why}between.latency_microseconds = ")
    right = f"{microseconds / 1000 if microseconds > 1 else microseconds * 1000:g}?"
    assert within.endswith(right) and without.endswith(right)


def test_a_slow_network_may_reach_far() -> None:
    far = find_cluster("2x8:h100@10g")
    assert list(suspect_between(replace(far, between=replace(far.between, latency_seconds=0.02)), {})) == []


@pytest.mark.parametrize("device", device_names())
def test_no_link_of_the_catalog_is_suspected_inside_a_node(device: str) -> None:
    for fabric in (min(fabric_names(), key=pace), max(fabric_names(), key=pace)):
        for name in link_names():
            cluster = replace(find_cluster(f"2x4:{device}@{fabric}"), inside=find_link(name))
            assert told(cluster, device) == [] and list(suspect_between(cluster, {})) == []
