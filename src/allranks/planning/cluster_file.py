"""A Cluster as a TOML file: read with every figure checked, written so that it reads back bit for bit."""

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any, Self, final

import tomli_w
from pydantic import Field, model_validator

from allranks.cluster import Cluster, Device, Link
from allranks.config_toml import read_toml
from allranks.durable import replacing
from allranks.errors import ConfigError
from allranks.planning.assembly import build_cluster, check_count, find_fabric
from allranks.planning.catalog import CatalogDevice, find_device, find_link
from allranks.planning.cluster_limits import (
    GIGA,
    MOST_HOST_GB,
    MOST_LINK_GB,
    TERA,
    check_between,
    check_host,
    check_inside,
    check_like,
    check_most,
    check_sparse,
    check_storage,
    check_watts,
)
from allranks.planning.cluster_suspicions import suspicions
from allranks.planning.cluster_tables import MEBI, DeviceTable, Figure, LinkTable, Table, exactly, over, without_nothing
from allranks.planning.wrong_keys import LIKE, NEEDED, WrongKey, as_toml, naming, validate

HEADING = "# A cluster of allranks. GB are 1e9 bytes; docs/reference/clusters.md says what each key means.\n\n"
LATENCY_MICROSECONDS = {"inside": Decimal("3.4"), "between": Decimal("4.7")}  # NVLink and InfiniBand of the catalog
AMOUNTS = ("host_memory_gb", "host_bandwidth_gb_per_s", "storage_gb_per_s")


@final
class ClusterTable(Table):
    """What stands above the tables of a cluster file; `device`, `inside` and `between` are read on their own."""

    name: str | None = Field(None, description="what a plan calls it; by default the file's name")
    nodes: int = Field(ge=1, strict=True, description="machines")
    devices_per_node: int = Field(ge=1, strict=True, description="GPUs of one, or processes on a CPU")
    domain: int | None = Field(
        None, ge=1, strict=True, description="devices that `inside` joins: whole nodes; by default one, or the rack's"
    )
    host_memory_gb: Figure | None = Field(None, description="memory of a node; by default the catalog's share a device")
    host_bandwidth_gb_per_s: Figure | None = Field(None, description="between a device and its host, one direction")
    storage_gb_per_s: Figure | None = Field(
        None, description="what a node writes to where checkpoints are kept; without it no plan counts their writing"
    )
    price_per_device_hour: Figure | None = Field(None, description="without it no plan speaks of money")
    currency: str = Field("USD", description="of the price")
    watts_per_device: Figure | None = Field(None, description="under load; without it no plan speaks of energy")
    price_source: str = Field("", description="where price and watts come from, with a date")
    notes: list[str] = Field(default_factory=list, description="what a plan repeats: assumptions, with because")

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        limits = {
            "host_memory_gb": (MOST_HOST_GB, "any host has"),
            "host_bandwidth_gb_per_s": (MOST_LINK_GB, "any device gets from its host"),
            "storage_gb_per_s": (MOST_LINK_GB, "any node writes"),
        }
        for key, (most, what) in limits.items():
            if (given := getattr(self, key)) is not None:
                check_most(key, given, given, most, what)
        if self.watts_per_device is not None:
            check_watts(self.watts_per_device)
        per_node, num_devices = self.devices_per_node, self.nodes * self.devices_per_node
        check_count(self.nodes, per_node)
        if self.domain is not None and (self.domain % per_node or self.domain > num_devices):
            raise ValueError(
                f"domain = {self.domain} devices are no whole nodes of {per_node}, at most {num_devices} in all;"
                f" {per_node} where a link ends with its node"
            )
        return self


def read_cluster(path: Path) -> Cluster:
    """The Cluster of a TOML file. Raises ConfigError: the file, the line where it can be told, what is wrong."""
    values = read_toml(path, parse_float=Decimal)
    try:
        return _to_cluster(values, path.stem)
    except WrongKey as error:
        raise ConfigError(f"{path}{error.line(path)}: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def preflight(path: Path) -> None:
    """Before hours of work: can `write_cluster` write there? Raises ConfigError where it cannot."""
    if path.is_dir():
        raise ConfigError(f"'{path}' is a directory; name a file with --output FILE.toml")
    with _refusing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass


def write_cluster(cluster: Cluster, path: Path) -> None:
    """Write `cluster` in the place of what is there, so that `read_cluster` gives the same value.

    Raises ConfigError where it cannot be written.
    """
    with _refusing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as draft:
            draft.write_text(render_cluster(cluster), encoding="utf-8")


@contextlib.contextmanager
def _refusing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        in_the_way = isinstance(error, FileExistsError | NotADirectoryError)
        reason = "what should hold it is a file" if in_the_way else error.strerror
        raise ConfigError(f"'{path}' cannot be written: {reason}; name another with --output FILE.toml") from None


def render_cluster(cluster: Cluster) -> str:
    """The text of the file."""
    values: dict[str, Any] = {
        "name": cluster.name,
        "nodes": cluster.nodes,
        "devices_per_node": cluster.devices_per_node,
        "domain": cluster.domain,
        "host_memory_gb": exactly(cluster.host_memory_bytes, GIGA),
        "host_bandwidth_gb_per_s": exactly(cluster.host_bandwidth, GIGA),
        "storage_gb_per_s": exactly(cluster.storage_bandwidth, GIGA),
        "price_per_device_hour": exactly(cluster.device_hour_price, Decimal(1)),
        "currency": cluster.currency,
        "watts_per_device": exactly(cluster.device_watts, Decimal(1)),
        "price_source": cluster.price_source,
        "notes": list(cluster.notes),
        "device": DeviceTable.from_device(cluster.device),
        "inside": LinkTable.from_link(cluster.inside),
        "between": LinkTable.from_link(cluster.between),
    }
    return HEADING + tomli_w.dumps(without_nothing(values))


def _to_cluster(values: Mapping[str, Any], stem: str) -> Cluster:
    given = dict(values)
    device, inside, between = (given.pop(name, None) for name in ("device", "inside", "between"))
    known = (*ClusterTable.model_fields, "device", "inside", "between")
    table = validate(ClusterTable, given, "", known=known, missing=NEEDED)
    if device is None:
        raise WrongKey("device", 'device is missing: device = "a100-80g", or a [device] table')
    with naming("device"):
        base = _catalog_base(device)
        built = _to_device(device, base)
    name = table.name or stem
    drawn = None if base is None else build_cluster(name, table.nodes, table.devices_per_node, base, None)
    links = {which: _to_link(which, link, drawn) for which, link in (("inside", inside), ("between", between))}
    _check_links(table, built, links, between)
    scale = {key: getattr(table, key) for key in AMOUNTS}
    amounts = {key: None if value is None else float(value * GIGA) for key, value in scale.items()}
    assumed = drawn.notes if drawn is not None and between is None and not table.notes else ()
    cluster = Cluster(
        name=name,
        nodes=table.nodes,
        devices_per_node=table.devices_per_node,
        device=built,
        inside=links["inside"],
        between=links["between"],
        domain=table.domain or (drawn.domain if drawn is not None else table.devices_per_node),
        host_memory_bytes=amounts["host_memory_gb"],
        host_bandwidth=amounts["host_bandwidth_gb_per_s"] or (base.host_bandwidth if base is not None else None),
        storage_bandwidth=amounts["storage_gb_per_s"],
        device_hour_price=_float(table.price_per_device_hour),
        currency=table.currency,
        device_watts=_float(table.watts_per_device),
        price_source=table.price_source,
        notes=(*table.notes, *assumed),
    )
    suspected = suspicions(cluster, between, base)
    return replace(cluster, notes=tuple(dict.fromkeys((*cluster.notes, *suspected))))


def _check_links(table: ClusterTable, device: Device, links: Mapping[str, Link], between: Any) -> None:
    """What only shows beside the device, and beside how many there are; what was measured is believed."""
    if table.devices_per_node > 1 and not device.measured:
        with naming("inside"):
            check_inside(_in(links["inside"].bandwidth, GIGA), _in(max(device.peak_flops.values()), TERA))
    with naming(""):
        if table.host_bandwidth_gb_per_s is not None and not device.measured:
            check_host(table.host_bandwidth_gb_per_s, _in(max(device.peak_flops.values()), TERA))
        if table.storage_gb_per_s is not None and not device.measured:
            check_storage(table.storage_gb_per_s)
    if table.nodes > 1:
        given_in_bits = isinstance(between, Mapping) and "gbit_per_s" in between
        with naming("between"):
            check_between(
                _in(links["between"].bandwidth, GIGA),
                given_in_bits=given_in_bits,
                devices_per_node=table.devices_per_node,
            )


def _in(value: float, unit: Decimal) -> Decimal:
    return Decimal(repr(value)) / unit


def _catalog_base(device: Any) -> CatalogDevice | None:
    name = device.get("like") if isinstance(device, Mapping) else device
    if name is None:
        return None
    if not isinstance(name, str):
        raise WrongKey("device", f"device = {as_toml(name)}: the name of a device, or a table, is expected")
    return find_device(name)


def _to_device(given: Any, base: CatalogDevice | None) -> Device:
    if not isinstance(given, Mapping):
        assert base is not None
        return base.device
    own = {key: value for key, value in given.items() if key != "like"}
    below = {} if base is None else DeviceTable.from_device(base.device)
    if "peak_tflops" in own:
        below.pop("matmul_tflops", None)  # of another peak
    known = ("like", *DeviceTable.model_fields)
    table = validate(DeviceTable, over(below, own), "device", known=known, missing=LIKE)
    if base is not None and not table.measured:
        _check_like(table, own, base.device)
    return table.to_device()


def _check_like(table: DeviceTable, own: Mapping[str, Any], base: Device) -> None:
    """What the file gives for a device of the catalog against the catalog's."""
    check_sparse(base.name, table.peak_tflops, {name: _in(rate, TERA) for name, rate in base.peak_flops.items()})
    memory = Decimal(repr(base.memory_bytes))
    alike = {
        "memory_gb": memory / GIGA,
        "memory_mib": memory / MEBI,
        "bandwidth_gb_per_s": _in(base.memory_bandwidth, GIGA),
    }
    for key in alike.keys() & own.keys():
        check_like(base.name, key, getattr(table, key), alike[key])


def _to_link(which: str, given: Any, drawn: Cluster | None) -> Link:
    """`inside` or `between`: a name, a table, or what the catalog draws for the device."""
    if given is None and drawn is not None:
        return drawn.inside if which == "inside" else drawn.between
    if given is None:
        example = "nvlink4" if which == "inside" else "ndr400"
        raise WrongKey(which, f'{which} is missing: {which} = "{example}", or a table [{which}]')
    like = given.get("like") if isinstance(given, Mapping) else given
    with naming(which):
        if like is not None and not isinstance(like, str):
            raise WrongKey(which, f"{which} = {as_toml(like)}: the name of a link, or a table, is expected")
        found = None if like is None else find_fabric(like) if which == "between" else find_link(like)
    if not isinstance(given, Mapping):
        assert found is not None
        return found
    own = {key: value for key, value in given.items() if key != "like"}
    below: dict[str, Any] = {"name": which, "latency_microseconds": LATENCY_MICROSECONDS[which]}
    if found is not None:
        below = LinkTable.from_link(found)
        if own.keys() & {"bandwidth_gb_per_s", "gbit_per_s"}:
            below.pop("bytes_microseconds")  # of another bandwidth
    return validate(LinkTable, over(below, own), which, known=("like", *LinkTable.model_fields)).to_link()


def _float(value: Decimal | None) -> float | None:
    return None if value is None else float(value)
