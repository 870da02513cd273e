"""find_cluster: cluster strings, one by one, and the one line that a wrong one gets."""

import re
from pathlib import Path

import pytest

from allranks.errors import ConfigError
from allranks.planning.hardware import find_cluster


def test_nodes_devices_device_and_fabric() -> None:
    cluster = find_cluster("8x8:a100-80g@hdr200")
    assert (cluster.nodes, cluster.devices_per_node, cluster.num_devices, cluster.domain) == (8, 8, 64, 8)
    assert cluster.device.name == "a100-80g"
    assert cluster.device.peak_flops["bfloat16"] == 312e12
    assert (cluster.inside.name, cluster.inside.bandwidth) == ("nvlink3", 300e9)
    assert (cluster.between.name, cluster.between.bandwidth) == ("hdr200", 25e9)
    assert cluster.notes == ()


def test_one_node_needs_no_number_and_case_does_not_matter() -> None:
    cluster = find_cluster(" 4:H100 ")
    assert (cluster.nodes, cluster.devices_per_node, cluster.device.name) == (1, 4, "h100")
    assert find_cluster("2X4:Mi300X@ROCE400").between.bandwidth == 50e9


def test_a_fabric_may_be_a_figure() -> None:
    assert find_cluster("8x8:h100@400g").between.bandwidth == 50e9
    assert find_cluster("8x8:h100@12.5g").between.bandwidth == 12.5e9 / 8


def test_the_fabric_that_nobody_named_is_said_with_because() -> None:
    cluster = find_cluster("2x8:h100")
    assert cluster.between.name == "ndr400"
    assert cluster.notes == (
        "fabric ndr400 between nodes, because a DGX H100 has eight 400 Gbit/s NDR adapters for eight devices;"
        " another one: @FABRIC",
    )


@pytest.mark.parametrize(
    ("text", "domain"), [("18x4:gb200", 72), ("2x4:gb200", 8), ("36x4:gb200", 72), ("8x8:gb200", 64)]
)
def test_a_domain_is_whole_nodes_of_the_rack(text: str, domain: int) -> None:
    assert find_cluster(text).domain == domain


def test_a_node_larger_than_the_vendors_is_said() -> None:
    (note,) = find_cluster("64:h100").notes
    assert note.startswith("all 64 devices of a node are taken as joined by nvlink4, because the string says so")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8x8:h10", "unknown device 'h10'; did you mean 'h100'"),
        ("8x8:h100@hdr20", "unknown fabric 'hdr20'; did you mean 'hdr200'"),
        ("8x8:h100@nvlink4", "unknown fabric 'nvlink4'"),
        ("0x8:h100", "0 nodes of 8 devices: no devices; give at least 1 of each"),
        ("1x0:cpu", "1 node of 0 devices: no devices; give at least 1 of each"),
        ("-1x8:h100", "negative"),
        ("8x8", "no device; the form is [NODESx]DEVICES:DEVICE[@FABRIC]"),
        ("h100", "how many? One node of eight is 8:h100"),
        ("", "empty"),
        ("8x8:h100@", "no fabric behind '@'"),
        ("8x8:h100@400", "write 400g for 400 Gbit/s a device"),
        ("8x8:h100@0g", "a link without bandwidth"),
        ("8x8:h100@3200g", "more than any network adapter sold; is that of a node?"),
        ("8:h100:4", "not understood"),
        ("99999999x8:h100", "more than the 10000000"),
        ("here/there", "no such file"),
        ("h" * 5000, "not understood"),
        ("9" * 5000 + ":h100", "not understood"),
        ("8:h100\0", "unknown device"),
    ],
)
def test_a_wrong_string_gets_one_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        find_cluster(text)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"cluster '{text}': ")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        find_cluster(str(tmp_path / "none.toml"))
