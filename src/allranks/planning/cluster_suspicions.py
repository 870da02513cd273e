"""Figures of a cluster file that a machine could have, and that are more probably in another unit: said in a plan."""

from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from allranks.cluster import Cluster, Device
from allranks.planning.catalog import device_names, find_device, find_link, link_names
from allranks.planning.cluster_limits import FAST_TFLOPS, GIGA, MUCH_MORE, TERA, plain

FAST_BETWEEN_GB = 60  # of one device; the fastest of usual networks has 50
SLOW_BETWEEN_GB = Decimal("0.125")  # Ethernet of 1 Gbit/s
SHOWN_DIGITS = 3


def suspicions(cluster: Cluster, between: Any, *, own_device: bool) -> tuple[str, ...]:
    """A note for each; what was measured is believed.

    Args:
        between: what the file has of it: None, the name of a fabric, or a table.
        own_device: whether the file describes a device that is not like one of the catalog.
    """
    found: list[str] = []
    if own_device and not cluster.device.measured:
        found += _of_a_node(cluster.device, cluster.devices_per_node)
    if cluster.nodes > 1 and not cluster.between.measured:
        found += _of_the_fabric(cluster, between if isinstance(between, Mapping) else {})
    return tuple(found)


def _of_a_node(device: Device, per_node: int) -> Iterator[str]:
    """More than any device of the catalog has, by far."""
    known = [find_device(name).device for name in device_names()]
    figures = (("memory_bytes", "device.memory_gb", "GB"), ("memory_bandwidth", "device.bandwidth_gb_per_s", "GB/s"))
    for field, key, unit in figures:
        most = max(known, key=lambda one: float(getattr(one, field)))
        given, largest = _giga(getattr(device, field)), _giga(getattr(most, field))
        if given > MUCH_MORE * largest:
            node = f"; is it that of a node? Over {per_node} devices it is {_short(given / per_node)} {unit}"
            times = f"{_short(given / largest)} times the most of any device in the catalog"
            yield f"{key} = {_short(given)} is {times} ({most.name}, {_short(largest)}){node if per_node > 1 else ''}"


def _of_the_fabric(cluster: Cluster, table: Mapping[str, Any]) -> Iterator[str]:
    """Bits that stand as bytes, and a network that is slower than the slowest."""
    link, given = cluster.between, _giga(cluster.between.bandwidth)
    if link.name in link_names() and find_link(link.name).bandwidth == link.bandwidth:
        return
    gbit = given * 8
    if given > FAST_BETWEEN_GB and "gbit_per_s" not in table:
        yield (
            f"between.bandwidth_gb_per_s = {plain(given)} is {plain(gbit)} Gbit/s a device, and few networks are as"
            f" fast; did you mean Gbit/s: between.gbit_per_s = {plain(given)}? Where it is right, between.gbit_per_s ="
            f" {plain(gbit)} says so"
        )
    fastest = max(cluster.device.peak_flops.values()) / float(TERA)
    if given < SLOW_BETWEEN_GB and fastest > FAST_TFLOPS:
        key, figure = ("gbit_per_s", gbit) if "gbit_per_s" in table else ("bandwidth_gb_per_s", given)
        unit = "Tbit/s" if "gbit_per_s" in table else "TB/s"
        yield (
            f"between.{key} = {plain(figure)} is slower than Ethernet of 1 Gbit/s; did you mean {plain(figure)} {unit}:"
            f" between.{key} = {plain(figure * 1000)}?"
        )


def _giga(value: float) -> Decimal:
    return Decimal(repr(value)) / GIGA


def _short(value: Decimal) -> str:
    return f"{float(value):.{SHOWN_DIGITS}g}" if value < 1000 else f"{float(value):.0f}"
