"""The catalog: devices, links and fabrics by name, read from catalog.toml, where each figure stands with its source."""

import difflib
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from importlib import resources
from typing import Any, final

from allranks.cluster import Device, Link
from allranks.errors import ConfigError
from allranks.planning.cluster_tables import DeviceTable, LinkTable

INSIDE = ("nvlink", "infinity-fabric", "pcie", "ici")
"""What the names of links inside a node start with; all others are fabrics between nodes."""


@final
@dataclass(frozen=True, slots=True)
class CatalogDevice:
    """A device with what comes with it.

    Attributes:
        inside: the name of the link between devices of one domain.
        between: the fabric between nodes where nothing else is said, and `because` why this one.
        devices_per_node: in the vendor's node; domain: how many devices `inside` joins there.
        host_bandwidth: bytes/s between the device and its host; None where unknown.
    """

    device: Device
    inside: str
    between: str
    because: str
    devices_per_node: int
    domain: int
    host_bandwidth: float | None


def find_device(name: str) -> CatalogDevice:
    """A device by its name or an alias, in any case. Raises ConfigError with the nearest names."""
    known = _aliases()
    found = known.get(tidy(name))
    if found is None:
        raise ConfigError(f"unknown device '{name}'{nearest(name, known, device_names())}")
    row = dict(_catalog()["devices"][found])
    extra = {key: row.pop(key, None) for key in ("aliases", "driver_names", "inside", "between", "between_because")}
    per_node, domain = row.pop("devices_per_node"), row.pop("domain", None)
    host = row.pop("host_bandwidth_gb_per_s", None)
    return CatalogDevice(
        device=DeviceTable.model_validate({"name": found, **row}).to_device(),
        inside=extra["inside"],
        between=extra["between"],
        because=extra["between_because"],
        devices_per_node=per_node,
        domain=domain or per_node,
        host_bandwidth=None if host is None else float(Decimal(host) * 10**9),
    )


def find_link(name: str) -> Link:
    """A link inside a node or a fabric, in any case. Raises ConfigError with the nearest names."""
    row = _catalog()["links"].get(tidy(name))
    if row is None:
        raise ConfigError(f"unknown link '{name}'{nearest(name, link_names(), link_names())}")
    return LinkTable.model_validate({"name": tidy(name), **row}).to_link()


def find_device_by_driver_name(name: str) -> str | None:
    """The catalog's name of what a driver calls "NVIDIA H100 80GB HBM3"; None where the catalog has none."""
    rows = _catalog()["devices"].items()
    return next((own for own, row in rows if name.strip() in row.get("driver_names", ())), None)


def device_names() -> list[str]:
    """The names of all devices, in the order of the catalog."""
    return list(_catalog()["devices"])


def device_aliases(name: str) -> list[str]:
    """The other names of a device."""
    return list(_catalog()["devices"][name]["aliases"])


def link_names() -> list[str]:
    """The names of all links."""
    return list(_catalog()["links"])


def fabric_names() -> list[str]:
    """The names of the links between nodes."""
    return [name for name in link_names() if not name.startswith(INSIDE)]


def link_label(name: str) -> str:
    """A link's name for people."""
    return str(_catalog()["links"][name]["label"])


def tidy(name: str) -> str:
    """A name as the catalog writes it: small, hyphens for blanks and underscores."""
    return name.strip().lower().replace("_", "-").replace(" ", "-")


def nearest(name: str, known: Iterable[str], names: Iterable[str]) -> str:
    """`; did you mean 'a' or 'b'?`, or the names to choose from where nothing is near."""
    near = difflib.get_close_matches(tidy(name), list(known), n=3, cutoff=0.6)
    if not near:
        near = [other for other in known if tidy(name) and other.startswith(tidy(name))][:3]
    if near:
        return "; did you mean " + " or ".join(f"'{other}'" for other in near) + "?"
    return "; there are " + ", ".join(names)


@cache
def _catalog() -> dict[str, Any]:
    text = resources.files("allranks.planning").joinpath("catalog.toml").read_text(encoding="utf-8")
    return tomllib.loads(text, parse_float=Decimal)


@cache
def _aliases() -> dict[str, str]:
    rows = _catalog()["devices"].items()
    return {word: name for name, row in rows for word in (name, *row["aliases"])}
