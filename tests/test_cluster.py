"""The noun Cluster: how many devices it has, and that a value cannot change under a plan."""

import dataclasses

import pytest

from allranks.cluster import Cluster, Device, Link

LINK = Link("link", 25e9, 4.7e-6)
CLUSTER = Cluster("mine", 3, 8, Device("d", "a device", 80e9, 2e12, {"bfloat16": 312e12}), LINK, LINK, 8)


def test_the_devices_are_those_of_all_nodes() -> None:
    assert CLUSTER.num_devices == 24


def test_devices_are_cpus_or_gpus() -> None:
    assert CLUSTER.device.kind == "cuda"
    assert [dataclasses.replace(CLUSTER.device, name=name).kind for name in ("cpu", "cpu-share")] == ["cpu", "cpu"]


def test_what_nobody_gave_is_not_there() -> None:
    assert (CLUSTER.device_hour_price, CLUSTER.device_watts, CLUSTER.host_memory_bytes) == (None, None, None)
    assert (CLUSTER.device.measured, CLUSTER.device.kernel_seconds, CLUSTER.device.update_rate) == (False, None, None)
    assert (CLUSTER.device.matmul_flops, CLUSTER.device.matmul_shapes, LINK.measured) == ({}, {}, {})


def test_a_cluster_is_a_value() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        CLUSTER.nodes = 4  # type: ignore[misc]
    assert dataclasses.replace(CLUSTER, nodes=4).num_devices == 32
    assert dataclasses.replace(CLUSTER) == CLUSTER


def test_a_host_has_what_the_cluster_says_or_the_shares_of_its_devices() -> None:
    assert CLUSTER.memory_of_host is None and not CLUSTER.takes_vendors_host
    vendors = dataclasses.replace(CLUSTER, device=dataclasses.replace(CLUSTER.device, host_memory_bytes=250e9))
    assert vendors.memory_of_host == 8 * 250e9 and vendors.takes_vendors_host
    own = dataclasses.replace(vendors, host_memory_bytes=1e12)
    assert own.memory_of_host == 1e12 and not own.takes_vendors_host
