"""This machine as a Cluster: a guess that says so, what was measured where it was, and what the drivers say."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from allranks import __version__, free_memory
from allranks.cluster import Cluster
from allranks.errors import ConfigError
from allranks.free_memory import whole_host_bytes
from allranks.planning import this_machine
from allranks.planning.cluster_file import write_cluster
from allranks.planning.corrections import Row, remember
from allranks.planning.hardware import find_cluster
from allranks.planning.scale import cluster_of
from allranks.planning.this_machine import (
    MachineFacts,
    calibrated_files,
    calibrated_path,
    corrections_path,
    cpu_cluster,
    local_cluster,
)

PROCESSOR = MachineFacts("AMD EPYC 9B45 (tm)", 8, 32e9, ())


@pytest.fixture(autouse=True)
def configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's configuration directory in which nothing was measured yet."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def machine() -> Iterator[None]:
    with patch.object(this_machine, "look", lambda: PROCESSOR):
        yield


def with_devices(*names: str) -> MachineFacts:
    return replace(PROCESSOR, devices=names)


def calibrated(devices: int) -> Cluster:
    """What a calibration with so many processes may have found, and kept."""
    guess = cpu_cluster(1, devices, None, name="local", calibrated=False)
    device = replace(
        guess.device, memory_bandwidth=7e9, matmul_flops={"float32": 3e10}, peak_flops={"float32": 3e10},
        matmul_shapes={"float32": ((16, 16, 16, 3e10),)}, measured=True, update_rate=1e8,
        pass_rates=((1e6, 8e9),),
    )  # fmt: skip
    found = replace(guess, device=device, notes=())
    write_cluster(found, calibrated_path("cpu", devices))
    return found


def test_a_machine_that_nobody_measured_is_guessed_and_says_so(machine: None) -> None:
    cluster = find_cluster("local")
    assert (cluster.name, cluster.nodes, cluster.devices_per_node, cluster.domain) == ("local", 1, 8, 8)
    assert (cluster.device.memory_bytes, cluster.host_memory_bytes, cluster.device.measured) == (4e9, 32e9, False)
    (note,) = cluster.notes
    assert "a careful guess, because 8 processes were not measured" in note
    assert note.endswith("allranks doctor --calibrate --nproc 8")


def test_fewer_processes_have_more_cores_each(machine: None) -> None:
    two, sixteen = find_cluster("1x2:cpu"), find_cluster("16:cpu")
    assert two.device.peak_flops["float32"] == 4 * 20e9
    assert sixteen.device.peak_flops["float32"] == 20e9 / 2
    assert two.device.memory_bytes == 16e9


def test_what_was_measured_is_taken_and_the_file_is_named(machine: None) -> None:
    measured = calibrated(8)
    found = find_cluster("local")
    assert found.notes == (f"figures as measured, because this machine's are kept in {calibrated_path('cpu', 8)}",)
    assert found.machine.startswith("amd-epyc-9b45-tm-8cores/")
    assert replace(found, notes=(), machine="") == measured


def test_another_number_of_processes_shares_the_measured_figures(machine: None) -> None:
    calibrated(2)
    found = find_cluster("8:cpu")
    assert (found.devices_per_node, found.domain, found.device.memory_bytes) == (8, 8, 4e9)
    assert found.device.matmul_flops["float32"] == found.device.peak_flops["float32"] == 3e10 / 4
    assert found.device.matmul_shapes["float32"][0] == (16, 16, 16, 3e10 / 4)
    assert (found.device.memory_bandwidth, found.device.update_rate) == (7e9 / 4, 1e8 / 4)
    assert found.device.pass_rates == ((1e6, 2e9),)
    assert "figures are those of 2 processes" in found.notes[-1] and found.notes[-1].endswith("--nproc 8")


def test_the_nearest_number_of_processes_is_taken(machine: None) -> None:
    calibrated(2)
    calibrated(8)
    assert "those of 2 processes" in find_cluster("3:cpu").notes[-1]
    assert "those of 8 processes" in find_cluster("6:cpu").notes[-1]


def test_another_machine_is_not_this_one(machine: None) -> None:
    other = replace(PROCESSOR, processor="Another", cores=4)
    calibrated(8)
    calibrated_path("cpu", 8, other).write_text(calibrated_path("cpu", 8).read_text())
    assert calibrated_files() == [calibrated_path("cpu", 8)]
    assert calibrated_files(replace(PROCESSOR, cores=6)) == []


def test_the_place_is_the_users_configuration(configuration: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = configuration / "allranks" / "clusters" / "h100-x8-amd-epyc-9b45-tm-8cores.toml"
    assert calibrated_path("h100", 8, PROCESSOR) == path
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert calibrated_path("h100", 8, PROCESSOR).parent == Path("/home/someone/.config/allranks/clusters")


def test_somebody_elses_home_has_no_figures_for_this_user(machine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    calibrated(8)

    def refuse(*_: object) -> object:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "glob", refuse)
    assert calibrated_files() == []


def test_several_nodes_like_this_one(machine: None) -> None:
    joined, named = find_cluster("4x2:cpu"), find_cluster("4x2:cpu@ethernet10")
    assert (joined.num_devices, joined.domain) == (8, 2)
    assert "because no fabric was named" in joined.notes[-1]
    assert named.between.bandwidth == 1.25e9 and named.notes[-1].startswith("fabric ethernet10")


def test_a_file_that_somebody_broke_is_named(machine: None) -> None:
    calibrated(8)
    calibrated_path("cpu", 8).write_text("nodes = 0")
    with pytest.raises(ConfigError, match=r"cpu-x8-.*\.toml line 1: .*"):
        find_cluster("local")


def test_gpus_of_the_catalog() -> None:
    with patch.object(this_machine, "look", lambda: with_devices(*["NVIDIA H100 80GB HBM3"] * 4)):
        cluster = find_cluster("local")
        assert (cluster.name, cluster.device.name, cluster.devices_per_node) == ("local", "h100", 4)
        assert cluster.host_memory_bytes == 32e9
        assert "figures of the catalog's h100, because nobody measured this machine yet" in cluster.notes[-1]
        write_cluster(replace(cluster, device=replace(cluster.device, measured=True)), calibrated_path("h100", 4))
        assert find_cluster("local").device.measured


def test_a_part_of_the_gpus_as_it_was_measured() -> None:
    with patch.object(this_machine, "look", lambda: with_devices(*["NVIDIA H100 80GB HBM3"] * 8)):
        whole = find_cluster("local")
        write_cluster(replace(whole, devices_per_node=4, domain=4), calibrated_path("h100", 4))
        assert "are kept in" in local_cluster(4).notes[-1] and local_cluster(4).num_devices == 4
        for cluster in (local_cluster(2), local_cluster(), find_cluster("local")):
            assert cluster.num_devices == 8 and "nobody measured this machine yet" in cluster.notes[-1]


def test_a_gpu_that_nobody_knows_has_to_be_measured() -> None:
    with (
        patch.object(this_machine, "look", lambda: with_devices("NVIDIA GeForce 256")),
        pytest.raises(ConfigError, match=r"'NVIDIA GeForce 256' is not in the catalog; measure it: allranks doctor"),
    ):
        find_cluster("local")


def test_gpus_that_differ() -> None:
    with (
        patch.object(this_machine, "look", lambda: with_devices("NVIDIA H100 80GB HBM3", "NVIDIA A10")),
        pytest.raises(ConfigError, match=r"the devices differ .* CUDA_VISIBLE_DEVICES"),
    ):
        find_cluster("local")


def in_a_container(num_bytes: float) -> Any:
    """The same machine, of whose memory a container may take so much."""
    return patch.object(this_machine, "look", lambda: replace(PROCESSOR, memory_bytes=num_bytes))


def test_what_was_measured_outside_of_a_container_has_no_more_than_its_limit(machine: None) -> None:
    calibrated(8)
    row = Row(run="a", machine=find_cluster("8:cpu").machine, version=__version__, family="ddp", seconds_ratio=1.5)
    remember(corrections_path(), row)
    with in_a_container(4e9):
        for text, each in (("8:cpu", 5e8), ("2:cpu", 2e9), ("3x8:cpu", 5e8)):
            found = find_cluster(text)
            assert (found.device.memory_bytes, found.host_memory_bytes) == (each, 4e9), text
        assert find_cluster("8:cpu").corrections, "what its runs took stays known there"
    with in_a_container(64e9):
        assert find_cluster("8:cpu").device.memory_bytes == 4e9, "a file that says less is believed"


def test_so_has_the_host_of_gpus() -> None:
    facts = with_devices(*["NVIDIA H100 80GB HBM3"] * 4)
    with patch.object(this_machine, "look", lambda: facts):
        write_cluster(find_cluster("local"), calibrated_path("h100", 4))
    with patch.object(this_machine, "look", lambda: replace(facts, memory_bytes=1e9)):
        found = find_cluster("local")
    assert (found.host_memory_bytes, found.device.memory_bytes) == (1e9, 81559 * 2**20)


def test_the_real_machine_is_looked_at_without_torch() -> None:
    facts = this_machine.look()
    assert facts.cores >= 1 and 1e8 < facts.memory_bytes == whole_host_bytes() and facts.processor


def test_a_containers_limit_is_the_memory_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(free_memory, "whole_host_bytes", lambda: 4 * 10**9)
    assert this_machine.look.__wrapped__().memory_bytes == 4e9


def test_runs_correct_this_machine_alone(machine: None) -> None:
    where = find_cluster("local")
    assert where.machine.startswith("amd-epyc-9b45-tm-8cores/") and not where.corrections
    path = corrections_path()
    row = Row(run="a", machine=where.machine, version=__version__, family="ddp", seconds_ratio=1.5, context_bytes=5e8)
    remember(path, row)
    again = find_cluster("8:cpu")
    assert again.corrections["ddp"].factor == 1.5 and again.device.context_bytes == 5e8
    assert again.machine == where.machine and str(path) in again.notes[-1]
    assert path not in calibrated_files()
    for other in ("4:cpu", "2x8:cpu", "8:a100-80g"):
        assert not find_cluster(other).corrections
    assert not cluster_of(again, 4).corrections and cluster_of(again, 4).machine == find_cluster("4:cpu").machine
    assert cluster_of(again, 8).corrections == again.corrections
    calibrated(8)  # other figures
    assert not find_cluster("local").corrections


def test_a_torn_file_of_runs_is_one_line(machine: None) -> None:
    corrections_path().parent.mkdir(parents=True)
    corrections_path().write_text("{")
    assert "what earlier runs took is left out, because" in find_cluster("local").notes[-1]
