"""What a calibration is about to measure, before it starts, and the Cluster that its figures make."""

from collections.abc import Hashable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from allranks.cli.calibration import MOST_PROCESSES, choose_start, cluster_words, finish_cluster
from allranks.errors import ConfigError
from allranks.planning import this_machine
from allranks.planning.cluster_file import read_cluster, write_cluster
from allranks.planning.hardware import find_cluster
from allranks.planning.this_machine import MachineFacts
from allranks.profiling.calibrate import Figures

FACTS = MachineFacts("Processor", 4, 16e9, ())
COMPUTED: dict[Hashable, float] = {
    ("kernel",): 5e-6,
    ("copy", 1024): 1e-6,
    ("update", 4096): 2e-6,
    ("matmul", "float32", 16, 16, 16): 1e-6,
}
SAID: dict[Hashable, float] = {("all_reduce", 2, 4096): 3e-6, ("send", 2, 4096): 4e-6}


@pytest.fixture(autouse=True)
def a_machine_without_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(this_machine, "look", lambda: FACTS)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


def test_a_processor_is_measured_with_a_process_a_core(tmp_path: Path) -> None:
    start = choose_start("auto", None, None)
    assert (start.device, start.nproc, start.cluster.num_devices) == ("cpu", 4, 4)
    assert start.path == tmp_path / "allranks" / "clusters" / "cpu-x4-processor-4cores.toml"
    assert start.cluster.device.peak_flops == {}  # a guess is no peak of what will be measured
    assert choose_start("cpu", 3, Path("mine.toml")).path == Path("mine.toml")


@pytest.mark.parametrize(
    ("device", "nproc", "message"),
    [
        ("cuda", None, "--device cuda, but torch sees no CUDA device; take --device cpu"),
        ("auto", MOST_PROCESSES + 1, "--nproc 65: at most 64 processes are measured"),
    ],
)
def test_what_cannot_be_measured_here(device: str, nproc: int | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_start(device, nproc, None)


def names(*of_devices: str) -> AbstractContextManager[Any]:
    """As torch sees GPUs of these names."""
    return patch.multiple(torch.cuda, device_count=lambda: len(of_devices), get_device_name=lambda i: of_devices[i])


def test_gpus_of_the_catalog_keep_what_is_not_measured() -> None:
    with names(*["NVIDIA H100 80GB HBM3"] * 4):
        start = choose_start("auto", 2, None)
        assert (start.device, start.nproc, start.cluster.device.name, start.path.name[:7]) == (
            "cuda",
            2,
            "h100",
            "h100-x2",
        )
        assert start.cluster.device.peak_flops["float8"] > 0
        with pytest.raises(ConfigError, match="--nproc 5, but torch sees 4 GPUs"):
            choose_start("auto", 5, None)
        assert choose_start("cpu", 5, None).device == "cpu"


def test_gpus_that_nobody_knows_or_that_differ() -> None:
    with names("NVIDIA GeForce 256"):
        start = choose_start("auto", None, None)
        assert (start.cluster.device.name, start.cluster.device.peak_flops) == ("NVIDIA GeForce 256", {})
    with names("NVIDIA A10", "NVIDIA L4"), pytest.raises(ConfigError, match="the devices differ"):
        choose_start("auto", None, None)


@pytest.mark.parametrize(
    ("device", "nproc", "gpus", "unnamed", "words"),
    [
        ("auto", None, 4, "", "local"),
        ("auto", 2, 4, "", "FILE"),
        ("auto", None, 0, "nvidia-smi cannot be run", "FILE"),
        ("cpu", 2, 4, "", "2:cpu"),
        ("cpu", 2, 0, "nvidia-smi cannot be run", "2:cpu"),
        ("cpu", 2, 0, "", "2:cpu"),
        ("cpu", None, 0, "", "local"),
    ],
)
def test_what_is_measured_is_told_by_the_words_that_find_it(
    device: str, nproc: int | None, gpus: int, unnamed: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = replace(FACTS, devices=("NVIDIA H100 80GB HBM3",) * gpus, unnamed=unnamed)
    monkeypatch.setattr(this_machine, "look", lambda: facts)
    with names(*["NVIDIA H100 80GB HBM3"] * 4):
        start = choose_start(device, nproc, None)
        mine = choose_start(device, nproc, Path("mine.toml"))
    assert cluster_words(start, None) == (str(start.path) if words == "FILE" else words)
    assert cluster_words(mine, mine.path) == "mine.toml"
    write_cluster(finish_cluster(start, [Figures(COMPUTED, float("inf"), 2)], quick=False), start.path)
    assert find_cluster(cluster_words(start, None)).device.measured


def test_two_processes_on_a_processor(tmp_path: Path) -> None:
    start = choose_start("auto", 2, tmp_path / "mine.toml")
    cluster = finish_cluster(start, [Figures(COMPUTED | SAID, float("inf"), 2)] * 2, quick=False)
    assert (cluster.name, cluster.notes, cluster.inside) == ("mine", (), cluster.between)
    assert cluster.device.measured and cluster.device.memory_bytes == 8e9
    assert "by allranks doctor --calibrate, torch" in cluster.device.source
    assert cluster.inside.source.endswith("processes at once: 2, threads of each: 2")
    write_cluster(cluster, start.path)
    assert read_cluster(start.path) == cluster


def test_one_process_has_nobody_to_talk_to() -> None:
    cluster = finish_cluster(choose_start("auto", 1, None), [Figures(COMPUTED, float("inf"), 4, 7)], quick=True)
    assert "--calibrate --quick" in cluster.device.source
    assert cluster.notes == (
        "link loopback is not measured, because one process has nobody to talk to",
        "7 measurements were left out, because they took too long or the time was up",
    )


def test_a_gpus_fabric_is_not_measured_by_its_node() -> None:
    with names(*["NVIDIA H100 80GB HBM3"] * 2):
        start = choose_start("auto", None, None)
    found = Figures(COMPUTED | SAID | {("host", 1024): 1e-6}, 80e9, 1)
    cluster = finish_cluster(start, [replace(found, memory_bytes=79e9), found], quick=False)
    assert (cluster.inside.name, cluster.between.name, cluster.between.source) == (
        "nvlink4", "ndr400", start.cluster.between.source
    )  # fmt: skip
    assert cluster.inside.measured and cluster.device.memory_bytes == 79e9
    assert cluster.host_bandwidth == pytest.approx(1.024e9)
    assert cluster.device.peak_flops["bfloat16"] == start.cluster.device.peak_flops["bfloat16"]
