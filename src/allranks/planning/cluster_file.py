"""A Cluster as a TOML file: read with every figure checked, written so that it reads back bit for bit."""

import re
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any, final

import tomli_w
from pydantic import Field, ValidationError

from allranks.cluster import Cluster, Device, Link
from allranks.config_toml import find_line, read_toml
from allranks.durable import replacing
from allranks.errors import ConfigError
from allranks.planning.assembly import MOST_GBIT, build_cluster, find_fabric
from allranks.planning.catalog import CatalogDevice, find_device, find_link, nearest
from allranks.planning.cluster_tables import GIGA, DeviceTable, Figure, LinkTable, Table, exactly

HEADING = "# A cluster of allranks. GB are 1e9 bytes; docs/reference/clusters.md says what each key means.\n\n"
LATENCY_MICROSECONDS = {"inside": Decimal("3.4"), "between": Decimal("4.7")}  # NVLink and InfiniBand of the catalog
OTHER_UNITS = {
    "memory_gb": "memory_mib",
    "memory_mib": "memory_gb",
    "bandwidth_gb_per_s": "gbit_per_s",
    "gbit_per_s": "bandwidth_gb_per_s",
}


@final
class ClusterTable(Table):
    """What stands above the tables of a cluster file; `device`, `inside` and `between` are read on their own."""

    name: str | None = None
    nodes: int = Field(ge=1, strict=True)
    devices_per_node: int = Field(ge=1, strict=True)
    domain: int | None = Field(None, ge=1, strict=True)
    host_memory_gb: Figure | None = None
    host_bandwidth_gb_per_s: Figure | None = None
    price_per_device_hour: Figure | None = None
    currency: str = "USD"
    watts_per_device: Figure | None = None
    price_source: str = ""
    notes: list[str] = Field(default_factory=list)


def read_cluster(path: Path) -> Cluster:
    """The Cluster of a TOML file. Raises ConfigError: the file, the line where it can be told, what is wrong."""
    values = read_toml(path, parse_float=Decimal)
    try:
        return _to_cluster(values, path.stem)
    except _WrongKey as error:
        leaf = error.key.rpartition(".")[2]
        raise ConfigError(f"{path}{find_line(path, leaf)}: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def write_cluster(cluster: Cluster, path: Path) -> None:
    """Write `cluster` in the place of what is there, so that `read_cluster` gives the same value.

    Raises ConfigError where it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as draft:
            draft.write_text(render_cluster(cluster), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"'{path}' cannot be written: {error.strerror}; name another file with --out FILE") from None


def render_cluster(cluster: Cluster) -> str:
    """The text of the file."""
    values: dict[str, Any] = {
        "name": cluster.name,
        "nodes": cluster.nodes,
        "devices_per_node": cluster.devices_per_node,
        "domain": cluster.domain,
        "host_memory_gb": exactly(cluster.host_memory_bytes, GIGA),
        "host_bandwidth_gb_per_s": exactly(cluster.host_bandwidth, GIGA),
        "price_per_device_hour": exactly(cluster.device_hour_price, Decimal(1)),
        "currency": cluster.currency,
        "watts_per_device": exactly(cluster.device_watts, Decimal(1)),
        "price_source": cluster.price_source,
        "notes": list(cluster.notes),
        "device": DeviceTable.from_device(cluster.device),
        "inside": LinkTable.from_link(cluster.inside),
        "between": LinkTable.from_link(cluster.between),
    }
    return HEADING + tomli_w.dumps(_without_nothing(values))


class _WrongKey(ConfigError):
    """A ConfigError that knows its key, so that the line can be named."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


def _to_cluster(values: Mapping[str, Any], stem: str) -> Cluster:
    given = dict(values)
    device, inside, between = (given.pop(name, None) for name in ("device", "inside", "between"))
    table = _validate(ClusterTable, given, "", known=(*ClusterTable.model_fields, "device", "inside", "between"))
    if device is None:
        raise _WrongKey("device", 'device is missing: device = "a100-80g", or a [device] table')
    base = _catalog_base(device)
    name = table.name or stem
    links: dict[str, Any] = {}
    for which, link in (("inside", inside), ("between", between)):
        links[which] = None if link is None else _to_link(which, link)
    if base is not None:
        drawn = build_cluster(name, table.nodes, table.devices_per_node, base, None)
        links = {which: link or getattr(drawn, which) for which, link in links.items()}
    for which, link in links.items():
        if link is None:
            raise _WrongKey(which, f"{which} is missing, and the catalog cannot say it: the device has no `like`")
    _check_domain(table)
    several = table.nodes > 1
    if several:
        _check_between(links["between"], table.devices_per_node)
    scale = {key: getattr(table, key) for key in ("host_memory_gb", "host_bandwidth_gb_per_s")}
    amounts = {key: None if value is None else float(value * GIGA) for key, value in scale.items()}
    assumed = drawn.notes if base is not None and between is None and not table.notes else ()
    return Cluster(
        name=name,
        nodes=table.nodes,
        devices_per_node=table.devices_per_node,
        device=_to_device(device, base),
        inside=links["inside"],
        between=links["between"],
        domain=table.domain or (drawn.domain if base is not None else table.devices_per_node),
        host_memory_bytes=amounts["host_memory_gb"],
        host_bandwidth=amounts["host_bandwidth_gb_per_s"] or (base.host_bandwidth if base is not None else None),
        device_hour_price=_float(table.price_per_device_hour),
        currency=table.currency,
        device_watts=_float(table.watts_per_device),
        price_source=table.price_source,
        notes=(*table.notes, *assumed),
    )


def _check_domain(table: ClusterTable) -> None:
    if table.domain is None:
        return
    per_node, num_devices = table.devices_per_node, table.nodes * table.devices_per_node
    if table.domain % per_node or table.domain > num_devices:
        raise _WrongKey(
            "domain",
            f"domain = {table.domain} devices are no whole nodes of {per_node}, at most {num_devices} in all;"
            f" {per_node} where a link ends with its node",
        )


def _check_between(link: Link, per_node: int) -> None:
    """A figure of bytes that is a figure of bits, or one of a node that is one of a device."""
    gbit = link.bandwidth * 8 / 1e9
    if gbit <= MOST_GBIT:
        return
    as_bytes = f"{link.bandwidth / 1e9:.6g}"
    advice = f"did you mean {as_bytes} Gbit/s = {link.bandwidth / 8e9:.6g} GB/s?"
    if link.bandwidth / 1e9 > MOST_GBIT or gbit / per_node in (100, 200, 400, 800):
        advice = f"is it that of a node? {gbit:.6g} Gbit/s over {per_node} devices are {gbit / per_node:.6g} a device"
    raise _WrongKey(
        "between",
        f"between: {as_bytes} GB/s ({gbit:.6g} Gbit/s) a device is more than any network adapter sold; {advice}",
    )


def _catalog_base(device: Any) -> CatalogDevice | None:
    name = device.get("like") if isinstance(device, Mapping) else device
    if name is None:
        return None
    if not isinstance(name, str):
        raise _WrongKey("device", f"device = {name!r}: the name of a device, or a table, is expected")
    return find_device(name)


def _to_device(given: Any, base: CatalogDevice | None) -> Device:
    if not isinstance(given, Mapping):
        assert base is not None
        return base.device
    own = {key: value for key, value in given.items() if key != "like"}
    below = {} if base is None else DeviceTable.from_device(base.device)
    hint = "" if base is not None else '; or say like = "a100-80g" to take from the catalog what is not given'
    table: DeviceTable = _validate(DeviceTable, _over(below, own), "device", hint=hint)
    return table.to_device()


def _to_link(which: str, given: Any) -> Link:
    if isinstance(given, str):
        return find_fabric(given) if which == "between" else find_link(given)
    if not isinstance(given, Mapping):
        raise _WrongKey(which, f"{which} = {given!r}: the name of a link, or a table, is expected")
    own = {key: value for key, value in given.items() if key != "like"}
    below: dict[str, Any] = {"name": which, "latency_microseconds": LATENCY_MICROSECONDS[which]}
    if "like" in given:
        below = LinkTable.from_link(find_link(str(given["like"])))
        if own.keys() & {"bandwidth_gb_per_s", "gbit_per_s"}:
            below.pop("bytes_microseconds")  # of another bandwidth
    table: LinkTable = _validate(LinkTable, _over(below, own), which)
    return table.to_link()


def _over(below: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """`own` over `below`; a figure in another unit displaces the one below."""
    displaced = {OTHER_UNITS.get(key) for key in own}
    kept = {key: value for key, value in _without_nothing(below).items() if key not in displaced}
    merged = {
        key: {**kept[key], **value} if isinstance(value, Mapping) and isinstance(kept.get(key), Mapping) else value
        for key, value in own.items()
    }
    return {**kept, **merged}


def _validate(model: Any, values: Mapping[str, Any], where: str, *, known: tuple[str, ...] = (), hint: str = "") -> Any:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        path = [str(part) for part in first["loc"] if str(part) != "[key]"]
        key = ".".join(filter(None, [where, *path]))
        raise _WrongKey(key, _explain(first, key, known or tuple(model.model_fields), hint)) from None


def _explain(error: Any, key: str, known: tuple[str, ...], hint: str) -> str:
    message = str(error["msg"]).removeprefix("Value error, ")
    match error["type"]:
        case "extra_forbidden":
            return f"unknown key '{key}'{nearest_key(key, known)}"
        case "missing":
            return f"{key} is missing{hint}"
    if not re.search(r"^\w+\.?\w* = ", message) and not isinstance(error["input"], Mapping):
        return f"{key} = {error['input']}: {message[:1].lower()}{message[1:]}"
    return f"{key}: {message}" if key else message


def nearest_key(key: str, known: tuple[str, ...]) -> str:
    """What the nearest key to the last word of `key` is, of a file's `known` ones."""
    leaf = key.rpartition(".")[2].lower()
    return nearest(leaf, {name.replace("_", "-") for name in known}, sorted(known)).replace("-", "_")


def _without_nothing(values: Mapping[str, Any]) -> dict[str, Any]:
    """Without what TOML cannot say, and without empty tables, lists and texts."""
    found = {}
    for key, value in values.items():
        inner = _without_nothing(value) if isinstance(value, Mapping) else value
        if inner is not None and inner not in ({}, [], ""):
            found[key] = inner
    return found


def _float(value: Decimal | None) -> float | None:
    return None if value is None else float(value)
