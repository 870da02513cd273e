"""A Cluster put together: links, domains and fabrics, and how many devices there may be."""

from decimal import Decimal

import pytest

from allranks.errors import ConfigError
from allranks.planning.assembly import MOST_DEVICES, build_cluster, check_count, custom_fabric, domain_of, find_fabric
from allranks.planning.catalog import find_device


def test_a_cluster_takes_the_links_of_its_device() -> None:
    cluster = build_cluster("mine", 2, 8, find_device("h100"), None)
    assert (cluster.inside.name, cluster.between.name, cluster.domain) == ("nvlink4", "ndr400", 8)
    assert cluster.host_bandwidth == 63e9
    assert (cluster.device_hour_price, cluster.device_watts) == (None, None)


def test_a_fabric_is_noted_only_where_it_was_assumed_and_matters() -> None:
    found = find_device("h100")
    assert "because a DGX H100" in build_cluster("mine", 2, 8, found, None).notes[0]
    assert build_cluster("mine", 2, 8, found, "hdr200").notes == ()
    assert build_cluster("mine", 1, 8, found, None).notes == ()


@pytest.mark.parametrize(
    ("nodes", "devices", "domain"),
    [(18, 4, 72), (36, 4, 72), (3, 4, 12), (2, 72, 72), (64, 4, 64), (256, 4, 64), (20, 4, 40), (25, 4, 72)],
)
def test_a_rack_joins_whole_nodes(nodes: int, devices: int, domain: int) -> None:
    assert domain_of(nodes, devices, find_device("gb200")) == domain


def test_racks_that_are_not_full_are_said() -> None:
    """16 of 18 nodes of each, as such jobs are placed; 25 nodes fill the first rack, since five each waste too much."""
    (_, note) = build_cluster("mine", 64, 4, find_device("gb200"), None).notes
    assert note.startswith("64 devices of each rack, because 256 are taken in equal numbers from racks of 72")
    for nodes in (18, 25, 36, 3):
        assert not any("rack," in note for note in build_cluster("mine", nodes, 4, find_device("gb200"), None).notes)


def test_a_node_is_the_domain_where_there_is_no_rack() -> None:
    assert domain_of(4, 6, find_device("h100")) == 6


def test_fabrics_by_name_and_by_figure() -> None:
    assert find_fabric("NDR400").bandwidth == find_fabric("400G").bandwidth == 50e9
    assert custom_fabric("25g", Decimal(25)).bandwidth == 25e9 / 8
    assert custom_fabric("25g", Decimal(25)).latency_seconds == find_fabric("ndr400").latency_seconds


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hdr", "unknown fabric 'hdr'; did you mean 'hdr"),
        ("400", "write 400g"),
        ("-400g", "no figure"),
        ("0g", "without bandwidth"),
        ("1601g", "is that of a node?"),
        ("pcie5", "unknown fabric"),
    ],
)
def test_a_wrong_fabric(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        find_fabric(text)


def test_the_fastest_adapter_is_taken() -> None:
    assert find_fabric("1600g").bandwidth == 200e9


@pytest.mark.parametrize(("nodes", "devices"), [(0, 8), (8, 0), (MOST_DEVICES, 2)])
def test_no_devices_and_too_many(nodes: int, devices: int) -> None:
    with pytest.raises(ConfigError, match=r"no devices|more than the"):
        check_count(nodes, devices)
    check_count(MOST_DEVICES // 8, 8)
