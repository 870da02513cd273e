"""Figures of links that are possible, and more probably in another unit or of both directions: said in a plan."""

from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from allranks.cluster import Cluster, Link
from allranks.planning.catalog import CatalogDevice, find_link, link_names
from allranks.planning.cluster_limits import giga, is_fast, plain, short

FAST_BETWEEN_GB = 60  # of one device; the fastest of usual networks has 50
SLOW_BETWEEN_GB = Decimal("0.125")  # Ethernet of 1 Gbit/s
FASTER = Decimal("1.3")  # times the link that the catalog has inside: not that one, or counted otherwise
BOTH_WAYS = (Decimal("1.9"), Decimal("2.1"))  # times one direction
IN_BITS = (Decimal("7.5"), Decimal("8.5"))
SLOW_INSIDE_MICROSECONDS = 100  # the slowest link inside a node has 11
SLOW_BETWEEN_MICROSECONDS, NEAR_GB = 500, 3  # so fast a network leaves no building, and no hop in one takes so long
LEAST_MICROSECONDS = 0.2  # below it is no hop


def suspect_inside(cluster: Cluster, base: CatalogDevice | None) -> Iterator[str]:
    """The link inside a node, beside the catalog's for its device and beside the one between nodes.

    Args:
        base: the device of the catalog that the file names, or that has the name of the file's own; None where there
            is none. Its links are often replaced by bridges where they are PCIe, so that only twice and eight times
            its bandwidth are suspected there.
    """
    link = cluster.inside
    if cluster.domain == 1 or _is_believed(link) or not is_fast(cluster.device.peak_flops):
        return
    yield from _of_latency("inside", link, SLOW_INSIDE_MICROSECONDS)
    if _is_the_catalogs(link):
        return
    own = None if base is None else find_link(base.inside)
    given, outside = giga(link.bandwidth), giga(cluster.between.bandwidth)
    usual = "" if base is None or own is None else f"{own.name}, the link of {base.device.name}"
    if own is not None and (why := _explain_faster(own, given)):
        yield (
            f"inside: {short(given)} GB/s are {short(given / giga(own.bandwidth))} times {usual}, which sends"
            f" {short(giga(own.bandwidth))} in one direction; {why}"
        )
    if given < outside and (cluster.nodes > 1 if own is None else given * 2 < giga(own.bandwidth)):
        has = "" if own is None else f" ({usual}, has {short(giga(own.bandwidth))})"
        yield (
            f"inside: {short(given)} GB/s{has} are slower than the {short(outside)} GB/s between nodes; is one of them"
            " in another unit, or are the two exchanged?"
        )


def suspect_between(cluster: Cluster, table: Mapping[str, Any]) -> Iterator[str]:
    """Bits that stand as bytes, a network that is slower than the slowest, and hops that no network takes.

    Args:
        table: what the file has of it, where it is a table.
    """
    link, given = cluster.between, giga(cluster.between.bandwidth)
    if cluster.nodes == 1 or link.measured:
        return
    if is_fast(cluster.device.peak_flops):
        yield from _of_latency("between", link, SLOW_BETWEEN_MICROSECONDS if given > NEAR_GB else None)
    if _is_the_catalogs(link):
        return
    gbit = given * 8
    if given > FAST_BETWEEN_GB and "gbit_per_s" not in table:
        yield (
            f"between.bandwidth_gb_per_s = {plain(given)} is {plain(gbit)} Gbit/s a device, and few networks are as"
            f" fast; did you mean Gbit/s: between.gbit_per_s = {plain(given)}? Where it is right, between.gbit_per_s ="
            f" {plain(gbit)} says so"
        )
    if given < SLOW_BETWEEN_GB and is_fast(cluster.device.peak_flops):
        key, figure = ("gbit_per_s", gbit) if "gbit_per_s" in table else ("bandwidth_gb_per_s", given)
        unit = "Tbit/s" if "gbit_per_s" in table else "TB/s"
        yield (
            f"between.{key} = {plain(figure)} is slower than Ethernet of 1 Gbit/s; did you mean {plain(figure)} {unit}:"
            f" between.{key} = {plain(figure * 1000)}?"
        )


def _explain_faster(own: Link, given: Decimal) -> str:
    """What so much more than the catalog's link probably is; "" where it may be right."""
    times = given / giga(own.bandwidth)
    if BOTH_WAYS[0] <= times <= BOTH_WAYS[1]:
        return f"is it the vendor's figure of both directions? One has {short(given / 2)}"
    if IN_BITS[0] <= times <= IN_BITS[1]:
        return f"did you mean Gbit/s: inside.gbit_per_s = {plain(given)}?"
    if times > FASTER and not own.name.startswith("pcie"):
        return "is it of both directions, of another device, or of a whole node?"
    return ""


def _of_latency(key: str, link: Link, most: int | None) -> Iterator[str]:
    """Nanoseconds or milliseconds that stand as microseconds."""
    given = link.latency_seconds * 1e6
    name = f"{key}.latency_microseconds = {given:.12g}"
    if most is not None and given > most:
        yield (
            f"{name} is {given / 1000:.12g} ms a hop, where links of the catalog take microseconds; did you mean"
            f" nanoseconds: {key}.latency_microseconds = {given / 1000:.12g}?"
        )
    if given < LEAST_MICROSECONDS:
        yield (
            f"{name} is less than a hop over any link takes; did you mean milliseconds: {key}.latency_microseconds ="
            f" {given * 1000:.12g}?"
        )


def _is_believed(link: Link) -> bool:
    return bool(link.measured) and not _is_the_catalogs(link)


def _is_the_catalogs(link: Link) -> bool:
    return link.name in link_names() and find_link(link.name).bandwidth == link.bandwidth
