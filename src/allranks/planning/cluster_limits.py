"""Figures that no machine has: refused, with the unit that they were probably written in.

Every check takes a key of a cluster file with its figure, and raises ValueError with one line that begins with both.
"""

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Literal

Precision = Literal["bfloat16", "float16", "float32", "float64", "float8", "float4"]
Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "broadcast"]

# Twice what the fastest device of the catalog has, or more; float32 may be meant as TF32.
MOST_TFLOPS: Mapping[Precision, int] = {
    "float64": 500,
    "float32": 5_000,
    "bfloat16": 5_000,
    "float16": 5_000,
    "float8": 10_000,
    "float4": 50_000,
}
MOST_MEMORY_GB = 10_000
MOST_HOST_GB = 100_000
MOST_BANDWIDTH_GB = 50_000
MOST_LINK_GB = 2_000  # NVLink 6 has 1800 in one direction
MOST_GBIT = 1_600  # of one device between nodes; no adapter with more is sold
LEAST_LATENCY_MICROSECONDS, MOST_LATENCY_MICROSECONDS = Decimal("0.01"), 100_000
MOST_WATTS, FEW_WATTS = 10_000, 20
LEAST_STORAGE_GB = Decimal("0.001")
MUCH_MORE = Decimal("1.5")  # times the catalog's figure: another device, or another unit
CLOCKED = Decimal("1.25")  # times a data sheet's peak: cards of consumers run at higher clocks than it says
MOST_OVER_LINK = 10  # times a link's bandwidth; an all_gather of two moves twice of it

# What a device of so many TFLOP/s has at least: of memory, of bandwidth, and of a link to its neighbours.
FAST_TFLOPS, LEAST_MEMORY_GB, LEAST_BANDWIDTH_GB, LEAST_INSIDE_GB = 20, 1, 50, Decimal("0.5")
FAST_BANDWIDTH_GB, LEAST_TFLOPS = 500, 1  # and the other way round: such memory belongs to no slow device

MEGA, GIGA, TERA = Decimal(10**6), Decimal(10**9), Decimal(10**12)

Memory = tuple[str, Decimal, Decimal]
"""The key, the figure as given, and the same in GB."""


def check_most(key: str, given: Decimal, amount: Decimal, most: int | Decimal, what: str) -> None:
    """`amount` is `given` in the unit of `most`; `what` has so much: "any device has"."""
    if amount > most:
        raise ValueError(f"{key} = {plain(given)} is more than {what}; {in_smaller_units(given, most)}")


def check_device(memory: Memory, bandwidth_gb: Decimal, peaks: Mapping[Precision, Decimal]) -> None:
    """What no device exceeds: memory, its bandwidth in GB/s, peaks in TFLOP/s."""
    if not peaks:
        raise ValueError("peak_tflops is empty: give at least one precision, such as { bfloat16 = 312 }")
    key, given, memory_gb = memory
    check_most(key, given, memory_gb, MOST_MEMORY_GB, "any device has")
    check_most("bandwidth_gb_per_s", bandwidth_gb, bandwidth_gb, MOST_BANDWIDTH_GB, "any memory has")
    for precision, rate in peaks.items():
        check_peak(f"peak_tflops.{precision}", rate, MOST_TFLOPS[precision])


def check_too_slow(memory: Memory, bandwidth_gb: Decimal, peaks: Mapping[Precision, Decimal]) -> None:
    """What no device has so little of, beside its other figures."""
    key, given, memory_gb = memory
    precision, rate = max(peaks.items(), key=lambda item: item[1])
    if rate > FAST_TFLOPS and memory_gb < LEAST_MEMORY_GB:
        raise ValueError(
            f"{key} = {plain(given)} is less than any device of {plain(rate)} TFLOP/s has; did you mean"
            f" {plain(given)} TB = {plain(memory_gb * 1000)} GB?"
        )
    if rate > FAST_TFLOPS and bandwidth_gb < LEAST_BANDWIDTH_GB:
        raise ValueError(
            f"bandwidth_gb_per_s = {plain(bandwidth_gb)} is less than any device of {plain(rate)} TFLOP/s has; did"
            f" you mean {plain(bandwidth_gb)} TB/s = {plain(bandwidth_gb * 1000)} GB/s?"
        )
    if rate < LEAST_TFLOPS and bandwidth_gb > FAST_BANDWIDTH_GB:
        raise ValueError(
            f"peak_tflops.{precision} = {plain(rate)} is less than any device with {plain(bandwidth_gb)} GB/s of memory"
            f" has; did you mean {plain(rate)} PFLOP/s = {plain(rate * 1000)} TFLOP/s?"
        )


def check_peak(key: str, rate: Decimal, most: int) -> None:
    """A peak in TFLOP/s against the most that a device has in this precision."""
    if rate <= most:
        return
    advice = "is it that of a whole node, or with sparsity? Give one device's dense peak"
    for factor, unit in ((Decimal(1000), "GFLOP/s"), (MEGA, "MFLOP/s"), (TERA, "FLOP/s")):
        if FAST_TFLOPS <= rate / factor <= most:
            advice = f"did you mean {unit}? {plain(rate)} {unit} are {plain(rate / factor)} TFLOP/s"
            break
    raise ValueError(f"{key} = {plain(rate)} is more than any device has; {advice}")


def check_measured(
    peaks: Mapping[Precision, Decimal],
    matmul: Mapping[Precision, Decimal],
    shapes: Mapping[Precision, Sequence[tuple[int, int, int, Decimal]]],
) -> None:
    """Measured products against the peaks, both in TFLOP/s."""
    for precision, rows in shapes.items():
        for *shape, _ in rows:
            if min(shape) < 1:
                raise ValueError(
                    f"matmul_shapes_tflops.{precision} = {shape} ...: a row is [rows, inner, columns, TFLOP/s]"
                )
    best = [(f"matmul_tflops.{precision}", precision, rate) for precision, rate in matmul.items()]
    best += [(f"matmul_shapes_tflops.{name}", name, row[3]) for name, rows in shapes.items() for row in rows]
    for key, precision, rate in best:
        if rate > CLOCKED * peaks.get(precision, rate):
            raise ValueError(
                f"{key} = {plain(rate)} is above peak_tflops.{precision} = {plain(peaks[precision])}: nothing runs"
                " so much faster than its peak; one of them is wrong"
            )


def check_link(key: str, given: Decimal, bandwidth_gb: Decimal, latency_microseconds: Decimal) -> None:
    """A link's bandwidth (key, as given, in GB/s) and latency."""
    if key == "bandwidth_gb_per_s" and MOST_LINK_GB < given <= 8 * MOST_LINK_GB:
        raise ValueError(
            f"{key} = {plain(given)} is more than any link of one device has; did you mean {plain(given)} Gbit/s ="
            f" {plain(given / 8)} GB/s (gbit_per_s = {plain(given)})?"
        )
    if key == "gbit_per_s" and bandwidth_gb > MOST_LINK_GB:
        raise ValueError(f"{key} = {plain(given)} is more than any link of one device has; {in_smaller_bits(given)}")
    check_most(key, given, bandwidth_gb, MOST_LINK_GB, "any link of one device has")
    value = latency_microseconds
    if value > MOST_LATENCY_MICROSECONDS:
        raise ValueError(
            f"latency_microseconds = {plain(value)} is {plain(value / MEGA)} s a hop; did you mean {plain(value)}"
            f" nanoseconds = {plain(value / 1000)} microseconds?"
        )
    if value < LEAST_LATENCY_MICROSECONDS:
        raise ValueError(
            f"latency_microseconds = {plain(value)} is less than any link takes; did you mean {plain(value)}"
            f" s = {plain(value * MEGA)} microseconds?"
        )


def check_times(
    bandwidth_gb: Decimal, times: Mapping[Collective, Mapping[int, Sequence[tuple[Decimal, Decimal]]]]
) -> None:
    """Measured times: collective -> group size -> (bytes, microseconds), over a link of `bandwidth_gb` GB/s."""
    for collective, groups in times.items():
        for size, rows in groups.items():
            key = f"bytes_microseconds.{collective}.{size}"
            sizes = [row[0] for row in rows]
            if size < 2 or sizes != sorted(set(sizes)):
                raise ValueError(f"{key}: a group has at least 2 devices, and its rows rise in bytes")
            for count, microseconds in rows:
                rate = count / microseconds / 1000
                if rate > MOST_OVER_LINK * bandwidth_gb:
                    raise ValueError(
                        f"{key}: {plain(count)} bytes in {plain(microseconds)} microseconds are {plain(rate)} GB/s over"
                        f" a link of {plain(bandwidth_gb)} GB/s; in milliseconds, or seconds?"
                    )


def check_watts(given: Decimal) -> None:
    """What one device takes."""
    if given > MOST_WATTS:
        milli = f"did you mean {plain(given)} mW = {plain(given / 1000)} W?"
        raise ValueError(
            f"watts_per_device = {plain(given)} is more than any device takes;"
            f" {milli if given >= 1000 * FEW_WATTS else 'is it that of a node?'}"
        )


def check_inside(bandwidth_gb: Decimal, fastest_tflops: Decimal) -> None:
    """The link between fast devices of one node against the slowest bus that joins such."""
    if fastest_tflops > FAST_TFLOPS and bandwidth_gb < LEAST_INSIDE_GB:
        raise ValueError(
            f"{plain(bandwidth_gb)} GB/s is less than any bus between devices of {plain(fastest_tflops)}"
            f" TFLOP/s; did you mean {plain(bandwidth_gb)} TB/s = {plain(bandwidth_gb * 1000)} GB/s?"
        )


def check_between(bandwidth_gb: Decimal, *, given_in_bits: bool, devices_per_node: int) -> None:
    """A fabric's figure: bits that stand as bytes, or those of a node as those of a device."""
    gbit = bandwidth_gb * 8
    if gbit <= MOST_GBIT:
        return
    figure = plain(bandwidth_gb)
    advice = f"did you mean {figure} Gbit/s = {plain(bandwidth_gb / 8)} GB/s (gbit_per_s = {figure})?"
    if given_in_bits:
        share = plain(gbit / devices_per_node)
        advice = f"is it that of a node? Over {devices_per_node} devices it is {share} Gbit/s a device"
    raise ValueError(f"{figure} GB/s = {plain(gbit)} Gbit/s a device is more than any network adapter sold; {advice}")


def check_sparse(device: str, own: Mapping[Precision, Decimal], catalog: Mapping[str, Decimal]) -> None:
    """Peaks that a file gives for a catalog device against those of the catalog, TFLOP/s."""
    for precision, rate in own.items():
        dense = catalog.get(precision, rate)
        if rate > dense * MUCH_MORE:
            raise ValueError(
                f"peak_tflops.{precision} = {plain(rate)} is {float(rate / dense):.3g} times the dense peak of"
                f" {device}, {plain(dense)}; is it the vendor's figure with sparsity?"
            )


def check_like(device: str, key: str, own: Decimal, catalog: Decimal) -> None:
    """Memory or bandwidth that a file gives for a catalog device against that of the catalog, in one unit."""
    if own > catalog * MUCH_MORE:
        raise ValueError(
            f"{key} = {plain(own)} is {float(own / catalog):.3g} times that of {device}, {float(catalog):.5g}; is it"
            " that of a node? A device of another kind takes no like"
        )


def check_host(bandwidth_gb: Decimal, fastest_tflops: Decimal) -> None:
    """The bus between a fast device and its host, GB/s."""
    if fastest_tflops > FAST_TFLOPS and bandwidth_gb < LEAST_INSIDE_GB:
        raise ValueError(
            f"host_bandwidth_gb_per_s = {plain(bandwidth_gb)} is less than any bus to a device of"
            f" {plain(fastest_tflops)} TFLOP/s; did you mean {plain(bandwidth_gb)} TB/s ="
            f" {plain(bandwidth_gb * 1000)} GB/s?"
        )


def check_storage(given: Decimal) -> None:
    """What a node writes, GB/s, against the slowest disk."""
    if given < LEAST_STORAGE_GB:
        unit, factor = ("TB/s", 1000) if given * 1000 >= Decimal("0.1") else ("PB/s", 1_000_000)
        raise ValueError(
            f"storage_gb_per_s = {plain(given)} is less than any storage takes; did you mean {plain(given)} {unit} ="
            f" {plain(given * factor)} GB/s?"
        )


def in_smaller_bits(given: Decimal) -> str:
    """In which unit a link of so many Gbit/s would be possible."""
    for factor, unit in ((Decimal(1000), "Mbit/s"), (MEGA, "kbit/s"), (GIGA, "bit/s")):
        if given / factor <= MOST_GBIT:
            return f"did you mean {unit}? {plain(given)} {unit} are {plain(given / factor)} Gbit/s"
    return "give one device's"


def in_smaller_units(given: Decimal, most: int | Decimal) -> str:
    """In which unit `given` would be possible, where GB and GB/s are expected."""
    for factor, unit in ((Decimal(1000), "MB"), (MEGA, "kB"), (GIGA, "bytes")):
        if given / factor <= most:
            return f"did you mean {unit}? {plain(given)} {unit} are {plain(given / factor)} GB"
    return "give one device's"


def plain(value: Decimal) -> str:
    """A figure for people: 80000000000, 9.89e+14, 0.45."""
    return f"{float(value):.12g}"


def short(value: Decimal) -> str:
    """A figure in three digits, or in all before the point: 0.45, 309, 16312."""
    return f"{float(value):.3g}" if value < 1000 else f"{float(value):.0f}"


def giga(value: float) -> Decimal:
    """Bytes in GB, bytes/s in GB/s."""
    return Decimal(repr(value)) / GIGA


def is_fast(peak_flops: Mapping[str, float]) -> bool:
    """Whether a device has such peaks, FLOP/s, that a slow memory or link belongs to no such one."""
    return max(peak_flops.values()) > FAST_TFLOPS * float(TERA)
