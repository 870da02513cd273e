"""Cluster files: what may be left out, what is refused and how, and that what was written reads back bit for bit."""

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from allranks.cluster import Cluster, Device, FixedSeconds, Link
from allranks.errors import ConfigError
from allranks.layout import Layout
from allranks.plan import Choice, Estimate
from allranks.planning.assembly import build_cluster
from allranks.planning.catalog import find_device
from allranks.planning.cluster_file import preflight, read_cluster, render_cluster, write_cluster
from allranks.planning.estimate import estimate
from allranks.planning.hardware import find_cluster
from tests.planning.profiles import decoder

WHOLE = """\
nodes = 2
devices_per_node = 8
inside = "nvlink4"
between = "ndr400"
[device]
name = "mine"
memory_gb = 80
bandwidth_gb_per_s = 3350
[device.peak_tflops]
bfloat16 = 989
"""


def read(tmp_path: Path, text: str) -> Cluster:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return find_cluster(str(path))


def refusal(tmp_path: Path, text: str) -> str:
    """The one line, without the name of the file."""
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'mine.toml'}") and "\n" not in message
    return message.removeprefix(str(tmp_path / "mine.toml")).lstrip()


def test_a_whole_file(tmp_path: Path) -> None:
    cluster = read(tmp_path, WHOLE)
    assert (cluster.name, cluster.num_devices, cluster.domain, cluster.notes) == ("mine", 16, 8, ())
    assert cluster.device == Device("mine", "mine", 80e9, 3350e9, {"bfloat16": 989e12})
    assert (cluster.inside.bandwidth, cluster.between.bandwidth) == (450e9, 50e9)
    assert (cluster.device_hour_price, cluster.device_watts, cluster.host_bandwidth) == (None, None, None)


def test_three_lines_are_enough_for_a_device_of_the_catalog(tmp_path: Path) -> None:
    cluster = read(tmp_path, 'nodes = 2\ndevices_per_node = 8\ndevice = "h100"\n')
    drawn = find_cluster("2x8:h100")
    assert (cluster.device, cluster.inside, cluster.between) == (drawn.device, drawn.inside, drawn.between)
    assert cluster.notes == drawn.notes != ()


def test_a_device_like_one_of_the_catalog(tmp_path: Path) -> None:
    cluster = read(tmp_path, 'nodes = 1\ndevices_per_node = 8\n[device]\nlike = "h100"\nmemory_mib = 90000\n')
    assert cluster.device.memory_bytes == 90000 * 2**20
    assert cluster.device.peak_flops == find_device("h100").device.peak_flops
    assert cluster.device.matmul_flops == find_device("h100").device.matmul_flops
    other = read(tmp_path, 'nodes = 1\ndevices_per_node = 8\n[device]\nlike = "h100"\npeak_tflops.bfloat16 = 800\n')
    assert (other.device.peak_flops["bfloat16"], other.device.matmul_flops) == (800e12, {})


def test_a_link_like_one_of_the_catalog(tmp_path: Path) -> None:
    text = 'nodes = 2\ndevices_per_node = 8\ndevice = "a100"\ninside = { like = "nvlink3", latency_microseconds = 9 }\n'
    kept, moved = (read(tmp_path, text), read(tmp_path, text.replace("latency_microseconds", "bandwidth_gb_per_s")))
    assert (kept.inside.latency_seconds, kept.inside.bandwidth) == (9e-6, 300e9)
    assert kept.inside.measured == find_cluster("1:a100").inside.measured != {}
    assert (moved.inside.bandwidth, moved.inside.measured) == (9e9, {})


def test_price_and_watts_are_the_users(tmp_path: Path) -> None:
    money = 'price_per_device_hour = 2.49\ncurrency = "EUR"\nprice_source = "offer of 2026-11-02"\n'
    cluster = read(tmp_path, money + "watts_per_device = 700\n" + WHOLE)
    assert (cluster.device_hour_price, cluster.currency, cluster.device_watts) == (2.49, "EUR", 700.0)
    assert cluster.price_source == "offer of 2026-11-02"


def test_storage_is_a_nodes_and_may_be_left_open(tmp_path: Path) -> None:
    cluster = read(tmp_path, "storage_gb_per_s = 2.5\n" + WHOLE)
    assert cluster.storage_bandwidth == 2.5e9
    assert read(tmp_path, WHOLE).storage_bandwidth is None
    write_cluster(cluster, tmp_path / "again.toml")
    assert replace(read_cluster(tmp_path / "again.toml"), name=cluster.name) == cluster


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("nodes = 2", "storage_gb_per_s = 5000\nnodes = 2", "storage_gb_per_s = 5000 is more than any node writes"),
        ("nodes = 2", "nodes = 0", "line 1: nodes = 0: no devices; give a whole number of at least 1"),
        ("nodes = 2", "nodes = -2", "line 1: nodes = -2: no devices; give a whole number of at least 1"),
        ("nodes = 2", 'nodes = "2"', 'line 1: nodes = "2": a whole number is expected'),
        ("node = 8", "node = 0", "line 2: devices_per_node = 0: no devices; give a whole number of at least 1"),
        ("nodes = 2", "nodes = true", "line 1: nodes = true: "),
        ("nodes = 2", "node = 2", "line 1: unknown key 'node'; did you mean 'nodes'"),
        ("nodes = 2", "nodes = 9999999", "79999992 devices are more than the 10000000"),
        ("nodes = 2\n", "", "nodes is missing; nodes = 8, devices_per_node = 8 and device"),
        ("memory_gb = 80", "memory_gb = nan", "line 7: device.memory_gb = nan: input should be a finite number"),
        ("memory_gb = 80", "memory_gb = inf", "line 7: device.memory_gb = infinity: "),
        ("memory_gb = 80", "memory_gb = 0", "line 7: device.memory_gb = 0: a number above 0 is expected"),
        ("memory_gb = 80", 'memory_gb = "80 GB"', 'line 7: device.memory_gb = "80 GB": a number is expected'),
        ("memory_gb = 80", "memory_gb = 80e9", "line 7: device.memory_gb = 80000000000 is more than any device has"),
        ("memory_gb = 80", "memory_bytes = 80", "line 7: unknown key 'device.memory_bytes'; did you mean 'memory_gb'"),
        ("memory_gb = 80", "memory_mib = 8\nmemory_gb = 80", "line 5: device: give memory_gb or memory_mib, one of"),
        ("= 3350", "= 3.35", "line 8: device.bandwidth_gb_per_s = 3.35 is less than any device of 989 TFLOP/s has"),
        ("= 989", "= 989e12", "line 10: device.peak_tflops.bfloat16 = 9.89e+14 is more than any device has; did you"),
        ("bfloat16", "bf16", "line 10: unknown key 'device.peak_tflops.bf16'; did you mean 'bfloat16'?"),
        ("[device.peak_tflops]\nbfloat16 = 989", "", "line 5: device.peak_tflops is missing; or say like = "),
        ('"ndr400"', '"ndr4000"', "line 4: between: unknown fabric 'ndr4000'; did you mean 'ndr400'"),
        ('"ndr400"', "400", "line 4: between = 400: the name of a link, or a table, is expected"),
        ('"ndr400"', "{ gbit_per_s = 0 }", "line 4: between.gbit_per_s = 0: a number above 0 is expected"),
        ('"ndr400"', "{ bandwidth_gb_per_s = 400 }", "line 4: between: 400 GB/s = 3200 Gbit/s a device is more than"),
        ('"ndr400"', "{ gbit_per_s = 3200 }", "Over 8 devices it is 400 Gbit/s a device"),
        ('"ndr400"', "{ bandwidth_gb_per_s = 50e9 }", "line 4: between.bandwidth_gb_per_s = 50000000000 is more"),
        ('"nvlink4"', '"nvlnk4"', "line 3: inside: unknown link 'nvlnk4'; did you mean 'nvlink4'"),
        ('"nvlink4"', "{ bandwidth_gb_per_s = 0.45 }", "line 3: inside: 0.45 GB/s is less than any bus"),
        ('"nvlink4"', "{ bandwidth_gb_per_s = 3600 }", "did you mean 3600 Gbit/s = 450 GB/s"),
        ('inside = "nvlink4"\n', "", 'inside is missing: inside = "nvlink4", or a table [inside]'),
        ("nodes = 2", "domain = 12\nnodes = 2", "line 1: domain = 12 devices are no whole nodes of 8, at most 16"),
        ("nodes = 2", "watts_per_device = 700000\nnodes = 2", "did you mean 700000 mW = 700 W?"),
        ("nodes = 2", "host_memory_gb = 2e12\nnodes = 2", "line 1: host_memory_gb = 2e+12 is more than any host has"),
        ("nodes = 2", "host_bandwidth_gb_per_s = 0.0315\nnodes = 2", "line 1: host_bandwidth_gb_per_s = 0.0315 is"),
        ("nodes = 2", "storage_gb_per_s = 2e-6\nnodes = 2", "did you mean 2e-06 PB/s = 2 GB/s?"),
        ('"ndr400"', "{ gbit_per_s = 200000 }", "did you mean Mbit/s? 200000 Mbit/s are 200 Gbit/s"),
        ("nodes = 2", "price_per_device_hour = -1\nnodes = 2", "line 1: price_per_device_hour = -1: "),
        ("nodes = 2", "nodes 2", "line 1: not valid TOML"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_line_the_key_the_value_and_the_next_move(
    old: str, new: str, message: str, tmp_path: Path
) -> None:
    assert old in WHOLE
    assert message in refusal(tmp_path, WHOLE.replace(old, new, 1))


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ('"h10"', "line 3: device: unknown device 'h10'; did you mean 'h100'"),
        ('["h100"]', 'line 3: device = ["h100"]: the name of a device, or a table, is expected'),
        ('{ like = "h1" }', "line 3: device: unknown device 'h1'; did you mean 'h100'"),
        (
            '{ like = "h100", peak_tflops.bfloat16 = 1979 }',
            "line 3: device.peak_tflops.bfloat16 = 1979 is 2 times the dense peak of h100, 989.4; is it the vendor's",
        ),
        (
            '{ like = "a100-80g", bandwidth_gb_per_s = 16312 }',
            "line 3: device.bandwidth_gb_per_s = 16312 is 8 times that of a100-80g, 2039; is it that of a node?",
        ),
        (
            '{ like = "a100-80g", memory_gb = 640 }',
            "line 3: device.memory_gb = 640 is 7.45 times that of a100-80g, 85.899; is it that of a node?",
        ),
        ('{ like = "a100-80g", memory_mib = 655360 }', "device.memory_mib = 655360 is 8 times that of a100-80g, 81920"),
    ],
)
def test_a_device_by_name_or_like_one_is_refused(device: str, message: str, tmp_path: Path) -> None:
    assert message in refusal(tmp_path, f"nodes = 1\ndevices_per_node = 8\ndevice = {device}\n")


def test_the_files_of_the_documentation(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "describe-your-cluster.md").read_text()
    short, over, own = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    assert read(tmp_path, short).device == find_cluster("8x8:a100-80g").device
    priced = read(tmp_path, over)
    assert (priced.device_hour_price, priced.device_watts, priced.between.bandwidth) == (1.79, 400.0, 6.25e9)
    assert priced.device.memory_bytes == 81000 * 2**20 < find_device("a100-80g").device.memory_bytes
    assert read(tmp_path, own).device.peak_flops == {"bfloat16": 256e12, "float32": 64e12}
    sparse = 'nodes = 1\ndevices_per_node = 8\n[device]\nlike = "h100"\npeak_tflops.bfloat16 = 1979\n'
    wrong = [
        own.replace('"roce200"', "{ bandwidth_gb_per_s = 400 }"),
        own.replace("memory_gb = 64", "memory_gb = 64000"),
        sparse,
    ]
    (shown,) = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    assert shown.splitlines() == [f"ours.toml {refusal(tmp_path, text)}" for text in wrong]


def test_a_device_is_needed(tmp_path: Path) -> None:
    assert refusal(tmp_path, "nodes = 1\ndevices_per_node = 8\n") == (
        ': device is missing: device = "a100-80g", or a [device] table'
    )


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        find_cluster(str(tmp_path / "mine.toml"))


def measured() -> Cluster:
    """Every field of a Cluster that a calibration fills, with figures that a rounding would change."""
    link = Link(
        "loopback", 1.2345678901234567e9, 3.3e-05 / 7, {"all_reduce": {2: ((1024.0, 1e-5 / 3), (4096.0, 2e-5))}}
    )
    device = Device(
        "cpu", "a processor, one of 2", 12345678901.0, 1 / 3e-10, {"float32": 4e10 / 3, "bfloat16": 1e11},
        matmul_flops={"float32": 4e10 / 3}, measured=True, source="measured on 2026-11-21",
        matmul_shapes={"float32": ((16, 256, 256, 1e10 / 7), (128, 256, 256, 4e10 / 3))},
        kernel_seconds=6.5e-6 / 3, update_rate=1.48e8, pass_rates=((65536.0, 1e11 / 7), (1e6, 3e9)),
        context_bytes=2.4526e8 / 3, cores=0.5, fixed=FixedSeconds(operation=1.9e-5 / 3, hop=1e-3),
    )  # fmt: skip
    return Cluster("local", 1, 2, device, link, link, 2, 25e9, 4e9, 0.1, "EUR", 7.0, "my bill", ("a note",))


def test_what_was_written_reads_back_bit_for_bit(tmp_path: Path) -> None:
    write_cluster(measured(), tmp_path / "new" / "mine.toml")
    assert read_cluster(tmp_path / "new" / "mine.toml") == measured()


def test_a_person_can_read_what_was_written() -> None:
    text = render_cluster(build_cluster("mine", 2, 8, find_device("a100"), "hdr200"))
    assert text.startswith("# A cluster of allranks.")
    assert "memory_gb = 85.89934592" in text and "bfloat16 = 312" in text


def test_writing_replaces_the_whole_file_or_leaves_it(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    write_cluster(measured(), path)
    before = path.read_text()
    with pytest.raises(AttributeError):
        write_cluster(object(), path)  # type: ignore[arg-type]
    assert path.read_text() == before and os.listdir(tmp_path) == ["mine.toml"]


def test_a_place_that_cannot_be_written_is_seen_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written: .*; name another with --output FILE\.toml"):
        preflight(tmp_path / "file" / "mine.toml")
    with pytest.raises(ConfigError, match="is a directory"):
        preflight(tmp_path)
    preflight(tmp_path / "new" / "mine.toml")
    assert list((tmp_path / "new").iterdir()) == []


TABLES = """
measured = true
kernel_microseconds = 4
update_gparameters_per_s = {update}
[device.matmul_shapes_tflops]
bfloat16 = [[4096, 4096, 4096, {rate}], [16384, 8192, 8192, {rate}]]
"""


def test_a_plan_takes_the_tables_of_a_measured_accelerator(tmp_path: Path) -> None:
    """Every one of them changes the step of a model by name."""

    def step(rate: float, update: float) -> Estimate:
        head, _, peaks = WHOLE.partition("[device.peak_tflops]")
        tables, _, shapes = TABLES.partition("[device.matmul_shapes_tflops]")
        text = head + tables.format(update=update) + "[device.peak_tflops]" + peaks
        text += "[device.matmul_shapes_tflops]" + shapes.format(rate=rate)
        where = read(tmp_path, text)
        large = decoder(hidden=4096, heads=32, ffn=16384, seq=4096)
        return estimate(large, where, Choice(Layout(dp_replicate=16), 64, 1))

    first = step(600, 50)
    assert step(300, 50).time.compute > 1.3 * first.time.compute
    assert step(300, 50).time.optimizer == first.time.optimizer
    assert step(600, 5).time.optimizer > 3 * first.time.optimizer


def test_a_host_is_the_files_or_the_catalogs(tmp_path: Path) -> None:
    said, silent = tmp_path / "said.toml", tmp_path / "silent.toml"
    words = 'nodes = 2\ndevices_per_node = 4\ndevice = "h100"\n'
    silent.write_text(words)
    said.write_text("host_memory_gb = 700\n" + words)
    assert (read_cluster(silent).host_memory_bytes, read_cluster(silent).memory_of_host) == (None, 4 * 250e9)
    assert read_cluster(said).memory_of_host == 700e9
