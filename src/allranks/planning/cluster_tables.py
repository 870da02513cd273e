"""A device and a link as they stand in TOML, units in the names of the keys; impossible figures are refused."""

from collections.abc import Mapping
from dataclasses import asdict
from decimal import Decimal
from typing import Annotated, Any, Literal, Self, final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from allranks.cluster import Device, FixedSeconds, Link
from allranks.planning.cluster_limits import (
    GIGA,
    MOST_HOST_GB,
    TERA,
    Collective,
    Precision,
    check_device,
    check_link,
    check_measured,
    check_most,
    check_times,
    check_too_slow,
)

MICRO, MEGA, MEBI, BITS = Decimal("1e-6"), Decimal("1e6"), Decimal(2**20), Decimal(8)


def _is_number(value: object) -> object:
    """TOML knows numbers from text: "80" and true are no numbers."""
    if isinstance(value, bool | str):
        raise ValueError("a number is expected")
    return value


OTHER_UNITS = {
    "memory_gb": "memory_mib",
    "memory_mib": "memory_gb",
    "bandwidth_gb_per_s": "gbit_per_s",
    "gbit_per_s": "bandwidth_gb_per_s",
}

# Decimal from the text of the file to the value in bytes or seconds: no figure is rounded twice, so that a file that
# was written reads back bit for bit.
Fixed = Literal["operation", "micro_step", "step", "unit_message", "move", "hop", "parting"]
Figure = Annotated[Decimal, BeforeValidator(_is_number), Field(gt=0)]


class Table(BaseModel):
    """A table of a cluster file: an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@final
class DeviceTable(Table):
    """One device. Its memory is given in one of two units."""

    name: str = Field(description="as in a cluster string")
    label: str = Field("", description="for people; by default the name")
    memory_gb: Figure | None = Field(None, description="built-in memory; this or `memory_mib`")
    memory_mib: Figure | None = Field(None, description="the same as nvidia-smi prints it")
    bandwidth_gb_per_s: Figure = Field(description="of its memory")
    peak_tflops: dict[Precision, Figure] = Field(description="by precision: the dense peak of one device")
    matmul_tflops: dict[Precision, Figure] = Field(
        default_factory=dict, description="by precision: the best product that was measured"
    )
    matmul_shapes_tflops: dict[Precision, list[tuple[int, int, int, Figure]]] = Field(
        default_factory=dict, description="by precision: measured `[rows, inner, columns, TFLOP/s]`"
    )
    kernel_microseconds: Figure | None = Field(None, description="the least time of one kernel in a row of them")
    update_gparameters_per_s: Figure | None = Field(None, description="how many a fused AdamW steps")
    pass_gb_per_s: list[tuple[int, Figure]] = Field(
        default_factory=list,
        description="`[bytes, GB/s]` that elementwise operations move; a calibration measures a processor's",
    )
    context_mb: Figure | None = Field(None, description="of a processor: memory of a process before it has a model")
    cores: Figure | None = Field(None, description="of a processor: what one process has; below 1 where they share")
    fixed_microseconds: dict[Fixed, Figure] = Field(
        default_factory=dict, description="of a processor: what takes this long however small its tensors are"
    )
    host_memory_gb: Figure | None = Field(
        None, description="its share of the host's memory in the vendor's node: for where no node's is given"
    )
    measured: bool = Field(False, description="on the very machine: then it is believed, however slow")
    source: str = Field("", description="where the figures come from")

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if (self.memory_gb is None) == (self.memory_mib is None):
            raise ValueError("give memory_gb or memory_mib, one of them")
        given = self.memory_gb if self.memory_gb is not None else self.memory_mib
        assert given is not None
        memory = ("memory_gb" if self.memory_gb is not None else "memory_mib", given, self.memory_bytes / GIGA)
        check_device(memory, self.bandwidth_gb_per_s, self.peak_tflops)
        if self.host_memory_gb is not None:
            check_most("host_memory_gb", self.host_memory_gb, self.host_memory_gb, MOST_HOST_GB, "any host has")
        check_measured(self.peak_tflops, self.matmul_tflops, self.matmul_shapes_tflops)
        if not self.measured:
            check_too_slow(memory, self.bandwidth_gb_per_s, self.peak_tflops)
        return self

    @property
    def memory_bytes(self) -> Decimal:
        """The memory, whichever unit it was given in."""
        return self.memory_gb * GIGA if self.memory_gb is not None else (self.memory_mib or Decimal(0)) * MEBI

    def to_device(self) -> Device:
        """The value, in bytes, seconds and FLOP/s."""
        return Device(
            name=self.name,
            label=self.label or self.name,
            memory_bytes=float(self.memory_bytes),
            memory_bandwidth=float(self.bandwidth_gb_per_s * GIGA),
            peak_flops=_scaled(self.peak_tflops, TERA),
            matmul_flops=_scaled(self.matmul_tflops, TERA),
            measured=self.measured,
            source=self.source,
            matmul_shapes={
                precision: tuple((m, k, n, float(rate * TERA)) for m, k, n, rate in rows)
                for precision, rows in self.matmul_shapes_tflops.items()
            },
            kernel_seconds=None if self.kernel_microseconds is None else float(self.kernel_microseconds * MICRO),
            pass_rates=tuple((float(size), float(rate * GIGA)) for size, rate in self.pass_gb_per_s),
            context_bytes=None if self.context_mb is None else float(self.context_mb * MEGA),
            cores=_float(self.cores),
            fixed=FixedSeconds(**{name: float(time * MICRO) for name, time in self.fixed_microseconds.items()}),
            host_memory_bytes=None if self.host_memory_gb is None else float(self.host_memory_gb * GIGA),
            update_rate=None if self.update_gparameters_per_s is None else float(self.update_gparameters_per_s * GIGA),
        )

    @staticmethod
    def from_device(device: Device) -> dict[str, Any]:
        """What `to_device` reads back as the same value, bit for bit; None where there is nothing to say."""
        return {
            "name": device.name,
            "label": device.label,
            "memory_gb": exactly(device.memory_bytes, GIGA),
            "bandwidth_gb_per_s": exactly(device.memory_bandwidth, GIGA),
            "kernel_microseconds": exactly(device.kernel_seconds, MICRO),
            "pass_gb_per_s": [[int(size), exactly(rate, GIGA)] for size, rate in device.pass_rates],
            "update_gparameters_per_s": exactly(device.update_rate, GIGA),
            "context_mb": exactly(device.context_bytes, MEGA),
            "cores": exactly(device.cores, Decimal(1)),
            "host_memory_gb": exactly(device.host_memory_bytes, GIGA),
            "measured": device.measured,
            "source": device.source,
            "fixed_microseconds": {
                name: exactly(time, MICRO) for name, time in asdict(device.fixed).items() if time > 0
            },
            "peak_tflops": {name: exactly(rate, TERA) for name, rate in device.peak_flops.items()},
            "matmul_tflops": {name: exactly(rate, TERA) for name, rate in device.matmul_flops.items()},
            "matmul_shapes_tflops": {
                name: [[m, k, n, exactly(rate, TERA)] for m, k, n, rate in rows]
                for name, rows in device.matmul_shapes.items()
            },
        }


@final
class LinkTable(Table):
    """One link. Its bandwidth is given in one of two units."""

    name: str = Field(description="for people and plans")
    label: str = Field("", description="not read; for people")
    bandwidth_gb_per_s: Figure | None = Field(
        None, description="what one device sends in one direction, while it receives as much; this or `gbit_per_s`"
    )
    gbit_per_s: Figure | None = Field(None, description="the same in bits, as network adapters are sold")
    latency_microseconds: Figure = Field(description="of one hop")
    bytes_microseconds: dict[Collective, dict[int, list[tuple[Figure, Figure]]]] = Field(
        default_factory=dict, description="measured, by collective and group size: `[bytes of the whole tensor, us]`"
    )
    source: str = Field("", description="where the figures come from")

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if (self.bandwidth_gb_per_s is None) == (self.gbit_per_s is None):
            raise ValueError("give bandwidth_gb_per_s or gbit_per_s, one of them")
        key = "bandwidth_gb_per_s" if self.bandwidth_gb_per_s is not None else "gbit_per_s"
        given = self.bandwidth_gb_per_s if self.bandwidth_gb_per_s is not None else self.gbit_per_s
        assert given is not None
        check_link(key, given, self.bandwidth / GIGA, self.latency_microseconds)
        check_times(self.bandwidth / GIGA, self.bytes_microseconds)
        return self

    @property
    def bandwidth(self) -> Decimal:
        """Bytes/s, whichever unit it was given in."""
        if self.bandwidth_gb_per_s is not None:
            return self.bandwidth_gb_per_s * GIGA
        return (self.gbit_per_s or Decimal(0)) * GIGA / BITS

    def to_link(self) -> Link:
        """The value, in bytes and seconds."""
        return Link(
            name=self.name,
            bandwidth=float(self.bandwidth),
            latency_seconds=float(self.latency_microseconds * MICRO),
            measured={
                collective: {
                    size: tuple((float(count), float(time * MICRO)) for count, time in rows)
                    for size, rows in groups.items()
                }
                for collective, groups in self.bytes_microseconds.items()
            },
            source=self.source,
        )

    @staticmethod
    def from_link(link: Link) -> dict[str, Any]:
        """What `to_link` reads back as the same value, bit for bit."""
        return {
            "name": link.name,
            "bandwidth_gb_per_s": exactly(link.bandwidth, GIGA),
            "latency_microseconds": exactly(link.latency_seconds, MICRO),
            "source": link.source,
            "bytes_microseconds": {
                collective: {
                    str(size): [[exactly(count, Decimal(1)), exactly(time, MICRO)] for count, time in rows]
                    for size, rows in groups.items()
                }
                for collective, groups in link.measured.items()
            },
        }


def exactly(value: float | None, unit: Decimal) -> Decimal | None:
    """`value` counted in `unit`, a power of ten: the decimal that `float(decimal * unit)` makes `value` again."""
    return None if value is None else (Decimal(repr(value)) / unit).normalize()


def over(below: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """`own` over `below`; a figure in another unit displaces the one below."""
    displaced = {OTHER_UNITS.get(key) for key in own}
    kept = {key: value for key, value in without_nothing(below).items() if key not in displaced}
    merged = {
        key: {**kept[key], **value} if isinstance(value, Mapping) and isinstance(kept.get(key), Mapping) else value
        for key, value in own.items()
    }
    return {**kept, **merged}


def without_nothing(values: Mapping[str, Any]) -> dict[str, Any]:
    """Without what TOML cannot say, and without empty tables, lists and texts."""
    found = {}
    for key, value in values.items():
        inner = without_nothing(value) if isinstance(value, Mapping) else value
        if inner is not None and inner not in ({}, [], ""):
            found[key] = inner
    return found


def _float(value: Decimal | None) -> float | None:
    return None if value is None else float(value)


def _scaled(rates: Mapping[Precision, Decimal], unit: Decimal) -> dict[str, float]:
    return {precision: float(rate * unit) for precision, rate in rates.items()}
