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


H100 = 'nodes = 2\ndevices_per_node = 8\ndevice = "h100"\n'


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("inside = { bandwidth_gb_per_s = 900 }", "is it the vendor's figure of both directions? One has 450"),
        ("inside = { gbit_per_s = 7200 }", "is it the vendor's figure of both directions? One has 450"),
        ("inside = { bandwidth_gb_per_s = 10 }", "are slower than the 50 GB/s between nodes"),
        ('inside = { like = "nvlink4", latency_microseconds = 3400 }', "did you mean nanoseconds"),
        ('between = { like = "ndr400", latency_microseconds = 4700 }', "did you mean nanoseconds"),
        ("host_memory_gb = 2", "host_memory_gb = 2 is little for a host of h100; did you mean TB: host_memory_gb = 20"),
        ("host_memory_gb = 64000", "host_memory_gb = 64000 is much for a host of h100; did you mean MB"),
        ("watts_per_device = 0.7", "watts_per_device = 0.7 is less than h100 takes under load; did you mean 0.7 kW"),
        ("watts_per_device = 5600", "is it that of a node? Over 8 devices it is 700"),
        ("price_per_device_hour = 100000", "price_per_device_hour = 100000 is more than any device costs for an hour"),
        ('[device]\nlike = "h100"\nhost_memory_gb = 0.25', "did you mean TB: device.host_memory_gb = 250?"),
        (
            '[device]\nlike = "h100"\npeak_tflops = { float8 = 494 }',
            "device.peak_tflops.float8 = 494 is below bfloat16 = 989.4, and devices multiply narrower types faster",
        ),
    ],
)
def test_a_slip_beside_a_device_of_the_catalog(line: str, told: str, tmp_path: Path) -> None:
    head = H100.replace('device = "h100"\n', "") if "[device]" in line else H100
    cluster = read(tmp_path, head + line + "\n")
    (note,) = [one for one in cluster.notes if not one.startswith("fabric ")]
    assert told in note
    assert read(tmp_path, render_cluster(cluster)) == cluster  # told once, however often it is written


@pytest.mark.parametrize(
    "line",
    [
        "inside = { bandwidth_gb_per_s = 400 }",
        'inside = "nvlink5"',
        "host_memory_gb = 2000",
        "watts_per_device = 700",
        "price_per_device_hour = 2.5",
        'price_per_device_hour = 400\ncurrency = "JPY"',
    ],
)
def test_right_figures_are_not_suspected(line: str, tmp_path: Path) -> None:
    assert [note for note in read(tmp_path, H100 + line + "\n").notes if not note.startswith("fabric ")] == []


def peaks(tmp_path: Path, given: str, memory: int = 80, bandwidth: int = 3350) -> tuple[str, ...]:
    text = OWN.format(memory=memory, bandwidth=bandwidth)
    return read(tmp_path, text.replace("bfloat16 = 2496", given)).notes


def test_a_device_by_hand_with_the_figure_of_sparsity(tmp_path: Path) -> None:
    (note,) = peaks(tmp_path, "bfloat16 = 1979")
    assert note.startswith("device.peak_tflops.bfloat16 = 1979 is twice the dense peak of h100, 989.4, which has such")
    assert "is it the vendor's figure with sparsity?" in note
    assert len(peaks(tmp_path, "bfloat16 = 1979, float8 = 3958")) == 2
    assert peaks(tmp_path, "bfloat16 = 989, float8 = 1979") == ()
    assert peaks(tmp_path, "bfloat16 = 1979", memory=120, bandwidth=6500) == ()  # no such memory is known


def test_a_device_by_hand_whose_narrow_type_is_slower(tmp_path: Path) -> None:
    (note,) = peaks(tmp_path, "bfloat16 = 989, float8 = 494")
    assert note.startswith("device.peak_tflops.float8 = 494 is below bfloat16 = 989, ")
    (other,) = peaks(tmp_path, "bfloat16 = 989, float8 = 1979, float4 = 1000")
    assert other.startswith("device.peak_tflops.float4 = 1000 is below float8 = 1979, ")


@pytest.mark.parametrize("device", device_names())
def test_the_peaks_of_the_catalog_written_by_hand_are_not_suspected(device: str, tmp_path: Path) -> None:
    text = render_cluster(find_cluster(f"1:{device}")).replace(f'name = "{device}"', 'name = "mine"')
    assert read(tmp_path, text).notes == ()


@pytest.mark.parametrize("device", device_names())
def test_nothing_of_the_catalog_is_suspected(device: str, tmp_path: Path) -> None:
    for fabric in fabric_names():
        drawn = find_cluster(f"2x4:{device}@{fabric}")
        assert read(tmp_path, render_cluster(drawn)) == drawn


def test_a_note_is_told_once_however_often_a_file_is_written(tmp_path: Path) -> None:
    first = read(tmp_path, f"{LIKE}[between]\nbandwidth_gb_per_s = 200\n")
    assert read(tmp_path, render_cluster(first)) == first and len(first.notes) == 1
