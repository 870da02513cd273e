"""Figures that are possible and improbable: which are told, and that the right ones are not."""

from pathlib import Path

import pytest

from allranks.cluster import Cluster
from allranks.planning.catalog import device_names, fabric_names
from allranks.planning.cluster_file import render_cluster
from allranks.planning.hardware import find_cluster

LIKE = 'nodes = 2\ndevices_per_node = 8\ndevice = "a100-80g"\n'
OWN = """\
nodes = 2
devices_per_node = 8
inside = "nvlink3"
between = "hdr200"
[device]
name = "mine"
memory_gb = {memory}
bandwidth_gb_per_s = {bandwidth}
peak_tflops = {{ bfloat16 = 2496 }}
"""


def read(tmp_path: Path, text: str) -> Cluster:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return find_cluster(str(path))


@pytest.mark.parametrize(
    ("table", "told"),
    [
        (
            "bandwidth_gb_per_s = 200",
            "between.bandwidth_gb_per_s = 200 is 1600 Gbit/s a device, and few networks are as fast; did you mean "
            "Gbit/s: between.gbit_per_s = 200? Where it is right, between.gbit_per_s = 1600 says so",
        ),
        ("bandwidth_gb_per_s = 100", "did you mean Gbit/s: between.gbit_per_s = 100?"),
        ('like = "hdr200"\nbandwidth_gb_per_s = 100', "did you mean Gbit/s: between.gbit_per_s = 100?"),
        ("gbit_per_s = 0.2", "slower than Ethernet of 1 Gbit/s; did you mean 0.2 Tbit/s: between.gbit_per_s = 200?"),
        ("bandwidth_gb_per_s = 0.025", "did you mean 0.025 TB/s: between.bandwidth_gb_per_s = 25?"),
    ],
)
def test_a_fabric_in_another_unit(table: str, told: str, tmp_path: Path) -> None:
    (note,) = read(tmp_path, f"{LIKE}[between]\n{table}\n").notes
    assert told in note


@pytest.mark.parametrize("table", ["gbit_per_s = 1600", "bandwidth_gb_per_s = 50", "gbit_per_s = 1", 'like = "xdr800"'])
def test_a_fabric_that_is_fast_slow_or_the_catalogs(table: str, tmp_path: Path) -> None:
    assert read(tmp_path, f"{LIKE}[between]\n{table}\n").notes == ()


def test_what_was_measured_and_what_nobody_uses_is_believed(tmp_path: Path) -> None:
    slow = "[between]\nbandwidth_gb_per_s = 0.02\n"
    measured = slow + "[between.bytes_microseconds.send]\n2 = [[1000, 50]]\n"
    assert read(tmp_path, LIKE + measured).notes == ()
    assert read(tmp_path, LIKE.replace("nodes = 2", "nodes = 1") + slow).notes == ()
    assert read(tmp_path, 'nodes = 2\ndevices_per_node = 1\ninside = "pcie3"\n' + slow + """\
[device]
name = "cpu"
memory_gb = 4
bandwidth_gb_per_s = 10
peak_tflops = { float32 = 0.1 }
""").notes == ()  # fmt: skip


def test_an_own_device_with_a_nodes_figures(tmp_path: Path) -> None:
    memory, bandwidth = read(tmp_path, OWN.format(memory=640, bandwidth=16312)).notes
    assert memory.startswith("device.memory_gb = 640 is 2.07 times the most of any device in the catalog (mi355x, 309")
    assert memory.endswith("is it that of a node? Over 8 devices it is 80 GB")
    assert bandwidth.startswith("device.bandwidth_gb_per_s = 16312 is 2.04 times the most")
    assert bandwidth.endswith("Over 8 devices it is 2039 GB/s")
    assert read(tmp_path, OWN.format(memory=432, bandwidth=12000)).notes == ()


@pytest.mark.parametrize("device", device_names())
def test_nothing_of_the_catalog_is_suspected(device: str, tmp_path: Path) -> None:
    for fabric in fabric_names():
        drawn = find_cluster(f"2x4:{device}@{fabric}")
        assert read(tmp_path, render_cluster(drawn)) == drawn


def test_a_note_is_told_once_however_often_a_file_is_written(tmp_path: Path) -> None:
    first = read(tmp_path, f"{LIKE}[between]\nbandwidth_gb_per_s = 200\n")
    assert read(tmp_path, render_cluster(first)) == first and len(first.notes) == 1
