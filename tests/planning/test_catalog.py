"""The catalog: every row is possible, sourced and within what a cluster file may say; names and the nearest ones."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from allranks.errors import ConfigError
from allranks.planning import catalog
from allranks.planning.assembly import build_cluster, find_fabric
from allranks.planning.cluster_file import read_cluster, write_cluster
from allranks.planning.cluster_limits import MOST_TFLOPS

DEVICES = catalog.device_names()


@pytest.mark.parametrize("name", DEVICES)
def test_every_device_can_be_a_cluster(name: str) -> None:
    found = catalog.find_device(name)
    assert found.device.name == name and found.device.label
    assert found.device.source and found.because
    assert found.inside in catalog.link_names() and find_fabric(found.between).bandwidth > 0
    assert found.domain % found.devices_per_node == 0
    assert build_cluster(name, 2, found.devices_per_node, found, None).num_devices == 2 * found.devices_per_node


@pytest.mark.parametrize("name", DEVICES)
def test_a_measured_product_is_below_its_peak_and_a_peak_below_the_limit(name: str) -> None:
    device = catalog.find_device(name).device
    for precision, rate in device.matmul_flops.items():
        # Cards of consumers run at higher clocks than their data sheets say.
        most = 1.25 if device.name.startswith("rtx") else 1.0
        assert 0.3 * device.peak_flops[precision] < rate < most * device.peak_flops[precision]
    for precision, limit in MOST_TFLOPS.items():
        assert device.peak_flops.get(precision, 0) <= limit * 1e12 / 2


def test_every_link_is_sourced() -> None:
    for name in catalog.link_names():
        link = catalog.find_link(name)
        assert link.bandwidth > 0 and link.latency_seconds > 0 and link.source and catalog.link_label(name)
        for groups in link.measured.values():
            for rows in groups.values():
                assert list(rows) == sorted(rows)


def test_an_alias_names_one_device() -> None:
    words = [word for name in DEVICES for word in (name, *catalog.device_aliases(name))]
    assert len(words) == len(set(words))
    assert catalog.find_device("A100_80GB").device == catalog.find_device("a100-80g").device


def test_nothing_in_the_catalog_costs_anything_without_a_dated_source() -> None:
    text = "".join(map(str, catalog._catalog().values()))
    assert not re.search(r"price|watts_per|_hour", text)


def test_memory_is_what_the_driver_reports() -> None:
    assert catalog.find_device("h100").device.memory_bytes == 81559 * 2**20
    assert catalog.find_device("tpu-v4").device.memory_bytes == 32 * 2**30


@pytest.mark.parametrize(
    ("name", "per_node", "source"),
    [
        ("v100-16g", 512e9, "training_results_v0.7 (2020-07)"),
        ("a100-80g", 2e12, "training_results_v2.0 (2022-06)"),
        ("h100", 2e12, "training_results_v3.1 (2023-11)"),
        ("h200", 2e12, "inference_results_v4.1 (2024-08)"),
        ("gb200", 1.7e12, "training_results_v5.1 (2025-11)"),
        ("mi300x", 1.5e12, "training_results_v5.1 (2025-11)"),
    ],
)
def test_the_vendors_node_has_a_published_host_memory(name: str, per_node: float, source: str) -> None:
    found = catalog.find_device(name)
    assert build_cluster(name, 2, found.devices_per_node, found, None).memory_of_host == per_node
    assert source in found.device.source.partition("; host memory: ")[2]


@pytest.mark.parametrize("name", DEVICES)
def test_no_host_memory_is_without_its_dated_source(name: str) -> None:
    device = catalog.find_device(name).device
    assert (device.host_memory_bytes is None) == ("; host memory: " not in device.source)
    assert device.host_memory_bytes is None or re.search(r"; host memory: \S+ \(20\d\d-\d\d\) ", device.source)


def test_published_times_of_a_collective() -> None:
    rows = catalog.find_link("nvlink3").measured["all_reduce"][8]
    assert rows[0] == (1048576.0, 92.8e-6) and rows[-1] == (1073741824.0, 8193e-6)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h10", "did you mean 'h100'"),
        ("A100-90g", "did you mean 'a100-"),
        ("mi30", "'mi300"),
        ("zzz", "there are v100-16g"),
    ],
)
def test_an_unknown_device_gets_the_nearest_names(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        catalog.find_device(name)


def test_an_unknown_link_gets_the_nearest_names() -> None:
    with pytest.raises(ConfigError, match="unknown link 'nvlnk4'; did you mean 'nvlink4'"):
        catalog.find_link("nvlnk4")


def test_fabrics_are_the_links_between_nodes() -> None:
    assert {"hdr200", "ndr400", "ethernet100", "efa400"} <= set(catalog.fabric_names())
    assert not {"nvlink4", "pcie5", "ici-v4", "infinity-fabric-mi300"} & set(catalog.fabric_names())


def test_what_a_driver_says() -> None:
    assert catalog.find_device_by_driver_name(" NVIDIA H100 80GB HBM3 ") == "h100"
    assert catalog.find_device_by_driver_name("NVIDIA GeForce 256") is None


@pytest.mark.parametrize("name", DEVICES)
def test_every_device_can_be_written_and_read_back(name: str, tmp_path: Path) -> None:
    found = catalog.find_device(name)
    cluster = replace(build_cluster("all", 2, found.devices_per_node, found, None), notes=("as the catalog has it",))
    path = tmp_path / "all.toml"
    write_cluster(cluster, path)
    assert read_cluster(path) == cluster
