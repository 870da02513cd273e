"""The machines that a plan is for, as one process sees its own."""

from dataclasses import replace
from pathlib import Path

import pytest

from allranks.errors import ConfigError
from allranks.planning import this_machine
from allranks.planning.cluster_file import write_cluster
from allranks.training import like_this_machine as module
from allranks.training.like_this_machine import like_this_machine


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def show(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    """So many GPUs to this process."""
    facts = this_machine.MachineFacts("Processor", 4, 16e9, ("NVIDIA H100 80GB HBM3",) * gpus)
    for place in (this_machine, module):
        monkeypatch.setattr(place, "look", lambda: facts)


def test_a_run_on_some_of_the_gpus_takes_what_was_measured_with_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    show(monkeypatch, 8)
    whole = this_machine.local_cluster()
    write_cluster(replace(whole, devices_per_node=4, domain=4), this_machine.calibrated_path("h100", 4))
    found, other = like_this_machine(True, 4, 1), like_this_machine(True, 2, 1)
    assert found.num_devices == 4 and "figures as measured" in found.notes[-1] and found.machine
    assert other.num_devices == 2 and "nobody measured this machine" in other.notes[-1]


def test_gpus_of_several_hosts_are_joined_as_the_catalog_says(monkeypatch: pytest.MonkeyPatch) -> None:
    show(monkeypatch, 8)
    found = like_this_machine(True, 16, 2)
    assert (found.nodes, found.devices_per_node, found.num_devices, found.domain) == (2, 8, 16, 8)
    assert found.notes[-1].startswith(f"{found.between.name} between nodes") and not found.machine


@pytest.mark.parametrize(("gpus", "processes", "nodes"), [(1, 8, 1), (1, 16, 2), (2, 16, 2), (2, 6, 2), (1, 2, 2)])
def test_who_is_shown_a_part_of_the_gpus_plans_for_one_a_process_where_each_has_its_own(
    gpus: int, processes: int, nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    show(monkeypatch, gpus)
    found = like_this_machine(True, processes, nodes, own_gpus=True)
    assert (found.nodes, found.num_devices) == (nodes, processes)
    assert (found.inside.name, found.domain) == ("nvlink4", processes // nodes), "they are in one machine"


@pytest.mark.parametrize(("gpus", "processes", "nodes"), [(1, 8, 1), (2, 16, 2), (2, 3, 1)])
def test_processes_that_may_share_gpus_are_not_planned(
    gpus: int, processes: int, nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    show(monkeypatch, gpus)
    with pytest.raises(ConfigError, match=rf"whose GPUs in sight are {gpus}, and a plan is for one process a GPU"):
        like_this_machine(True, processes, nodes)


def test_a_gpu_measured_alone_is_that_of_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    show(monkeypatch, 1)
    alone = this_machine.local_cluster()
    measured = replace(alone, device=replace(alone.device, measured=True, memory_bandwidth=1e12))
    write_cluster(measured, this_machine.calibrated_path("h100", 1))
    found = like_this_machine(True, 4, 1, own_gpus=True)
    assert (found.num_devices, found.device.memory_bandwidth, found.corrections) == (4, 1e12, {})
