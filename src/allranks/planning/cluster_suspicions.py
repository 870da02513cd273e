"""Figures of a cluster file that a machine could have, and that are more probably in another unit: said in a plan."""

from collections.abc import Iterator, Mapping
from typing import Any

from allranks.cluster import Cluster, Device
from allranks.planning.bill_suspicions import suspect_price, suspect_watts
from allranks.planning.catalog import CatalogDevice, device_names, find_device
from allranks.planning.cluster_limits import MUCH_MORE, TERA, giga, is_fast, plain, short
from allranks.planning.link_suspicions import suspect_between, suspect_inside

ALIKE = 0.1  # so near a figure of a catalog device's memory is that device's
SPARSE = (1.9, 2.1)  # times the dense peak
NARROW = (("float8", ("bfloat16", "float16")), ("float4", ("float8",)))
LEAST_HOST_GB, LEAST_SHARE_GB = 10, 1  # of a node with fast devices, and of one device in it
MOST_SHARE_GB = 4096


def suspicions(cluster: Cluster, between: Any, base: CatalogDevice | None) -> tuple[str, ...]:
    """A note for each; what was measured is believed.

    Args:
        between: what the file has of it: None, the name of a fabric, or a table.
        base: the device of the catalog that the file names, or is like; None where it describes its own.
    """
    found: list[str] = []
    device = cluster.device
    if not device.measured:
        if base is None:
            found += _of_a_node(device, cluster.devices_per_node)
            found += _of_sparsity(device)
        found += _of_narrow_types(device)
        found += suspect_inside(cluster, base or _of_the_same_name(device))
        found += _of_the_host(cluster)
    found += suspect_between(cluster, between if isinstance(between, Mapping) else {})
    found += suspect_price(cluster, "price_per_device_hour")
    found += suspect_watts(cluster, "watts_per_device")
    return tuple(found)


def _known() -> list[Device]:
    return [find_device(name).device for name in device_names()]


def _of_the_same_name(device: Device) -> CatalogDevice | None:
    """A file that was written from a device of the catalog has all of its figures, and its name."""
    return find_device(device.name) if device.name in device_names() else None


def _of_a_node(device: Device, per_node: int) -> Iterator[str]:
    """More than any device of the catalog has, by far."""
    figures = (("memory_bytes", "device.memory_gb", "GB"), ("memory_bandwidth", "device.bandwidth_gb_per_s", "GB/s"))
    for field, key, unit in figures:
        most = max(_known(), key=lambda one: float(getattr(one, field)))
        given, largest = giga(getattr(device, field)), giga(getattr(most, field))
        if given > MUCH_MORE * largest:
            node = f"; is it that of a node? Over {per_node} devices it is {short(given / per_node)} {unit}"
            times = f"{short(given / largest)} times the most of any device in the catalog"
            yield f"{key} = {short(given)} is {times} ({most.name}, {short(largest)}){node if per_node > 1 else ''}"


def _of_sparsity(device: Device) -> Iterator[str]:
    """Twice the dense peak of a device with such a memory, where none has it densely: a vendor's larger figure."""
    twins = [one for one in _known() if _is_near(one, device)]
    for precision, rate in device.peak_flops.items():
        dense = {one.name: one.peak_flops[precision] for one in twins if precision in one.peak_flops}
        if any(abs(rate / other - 1) < ALIKE for other in dense.values()):
            continue
        for name, other in dense.items():
            if SPARSE[0] <= rate / other <= SPARSE[1]:
                yield (
                    f"device.peak_tflops.{precision} = {_tera(rate)} is twice the dense peak of {name}, {_tera(other)},"
                    " which has such a memory; is it the vendor's figure with sparsity? Plans want the dense one"
                )
                break


def _is_near(one: Device, device: Device) -> bool:
    size, speed = device.memory_bytes / one.memory_bytes, device.memory_bandwidth / one.memory_bandwidth
    return min(abs(size - 1), abs(speed - 1)) < ALIKE


def _of_narrow_types(device: Device) -> Iterator[str]:
    """A type of half as many bits that is slower: two peaks were exchanged, or one is in another unit."""
    peaks = device.peak_flops
    for narrow, wide in NARROW if is_fast(peaks) else ():
        slower = next((name for name in wide if name in peaks and peaks.get(narrow, peaks[name]) < peaks[name]), None)
        if slower is not None:
            yield (
                f"device.peak_tflops.{narrow} = {_tera(peaks[narrow])} is below {slower} = {_tera(peaks[slower])}, and"
                " devices multiply narrower types faster; are the two exchanged? Leave out what the device has not"
            )


def _of_the_host(cluster: Cluster) -> Iterator[str]:
    """Terabytes and megabytes that stand as GB."""
    if not is_fast(cluster.device.peak_flops):
        return
    per_node = cluster.devices_per_node
    hosts = (
        ("host_memory_gb", cluster.host_memory_bytes, LEAST_HOST_GB, MOST_SHARE_GB * per_node),
        ("device.host_memory_gb", cluster.device.host_memory_bytes, LEAST_SHARE_GB, MOST_SHARE_GB),
    )
    for key, size, least, most in hosts:
        if size is None or least <= giga(size) <= most:
            continue
        given = giga(size)
        unit, factor = ("TB", 1000.0) if given < least else ("MB", 0.001)
        what = f"{'little' if given < least else 'much'} for a host of {cluster.device.name}"
        yield f"{key} = {plain(given)} is {what}; did you mean {unit}: {key} = {float(given) * factor:.12g}?"


def _tera(rate: float) -> str:
    return f"{rate / float(TERA):.12g}"
