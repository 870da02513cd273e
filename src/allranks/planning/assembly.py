"""A Cluster put together: a catalog device, the link inside its nodes, and a fabric between them."""

import re
from decimal import Decimal

from allranks.cluster import Cluster, Link
from allranks.errors import ConfigError
from allranks.even_cut import divisors
from allranks.planning.catalog import CatalogDevice, fabric_names, find_link, nearest, tidy
from allranks.planning.cluster_limits import MOST_GBIT

MOST_DEVICES = 10_000_000

CUSTOM_LATENCY_SECONDS = 4.7e-6  # as the catalog's InfiniBand and RoCE
_GBIT = re.compile(r"(\d+(?:\.\d+)?)g")


def build_cluster(name: str, nodes: int, devices: int, found: CatalogDevice, fabric: str | None) -> Cluster:
    """A Cluster of a catalog device, with what the catalog says of its links where `fabric` is None."""
    notes = []
    if fabric is None and nodes * devices > 1 and nodes > 1:
        notes.append(f"fabric {found.between} between nodes, because {found.because}; another one: @FABRIC")
    if devices > max(found.devices_per_node, found.domain):
        notes.append(
            f"all {devices} devices of a node are taken as joined by {found.inside}, because the string says so;"
            f" a vendor's node joins {max(found.devices_per_node, found.domain)}"
        )
    domain = domain_of(nodes, devices, found)
    if devices < domain < min(nodes * devices, found.domain // devices * devices):
        notes.append(
            f"{domain} devices of each rack, because {nodes * devices} are taken in equal numbers from racks of"
            f" {found.domain}; otherwise: domain in a cluster file"
        )
    return Cluster(
        name=name,
        nodes=nodes,
        devices_per_node=devices,
        device=found.device,
        inside=find_link(found.inside),
        between=find_fabric(fabric or found.between),
        domain=domain,
        host_bandwidth=found.host_bandwidth,
        notes=tuple(notes),
    )


def check_count(nodes: int, devices: int) -> None:
    """Raises ConfigError where so many nodes of so many devices are none, or more than a plan takes."""
    if nodes * devices == 0:
        given = f"{nodes} {'node' if nodes == 1 else 'nodes'} of {devices} {'device' if devices == 1 else 'devices'}"
        raise ConfigError(f"{given}: no devices; give at least 1 of each")
    if nodes * devices > MOST_DEVICES:
        raise ConfigError(f"{nodes * devices} devices are more than the {MOST_DEVICES} that a plan takes")


def domain_of(nodes: int, devices: int, found: CatalogDevice) -> int:
    """How many devices `inside` joins: a node's, or as many whole nodes as come from one of the vendor's racks."""
    if found.domain <= found.devices_per_node:
        return devices
    return devices * nodes_of_rack(nodes, max(1, found.domain // devices))


def nodes_of_rack(nodes: int, room: int) -> int:
    """How many of so many nodes are in each rack, which has room for so many: as many in one as in another, where that
    leaves no rack more than half empty, as schedulers place jobs (Slurm's `--segment`); else racks are full.
    """
    if nodes <= room:
        return nodes
    equal = max(each for each in divisors(nodes) if each <= room)
    return equal if 2 * equal >= room else room


def find_fabric(text: str) -> Link:
    """A fabric by its catalog name, or `<Gbit/s per device>g`. Raises ConfigError with the nearest names."""
    name = tidy(text)
    if match := _GBIT.fullmatch(name):
        return custom_fabric(name, Decimal(match[1]))
    if name in fabric_names():
        return find_link(name)
    if re.match(r"-?\d", name):
        raise ConfigError(f"fabric '{text}' is no figure: write 400g for 400 Gbit/s a device")
    raise ConfigError(f"unknown fabric '{text}'{nearest(name, fabric_names(), fabric_names())}")


def custom_fabric(name: str, gbit: Decimal) -> Link:
    """A fabric of `gbit` Gbit/s a device. Raises ConfigError where no adapter has that."""
    if gbit <= 0:
        raise ConfigError(
            f"fabric '{name}': a link without bandwidth joins nothing; write 400g for 400 Gbit/s a device"
        )
    if gbit > MOST_GBIT:
        raise ConfigError(
            f"fabric '{name}': {gbit} Gbit/s a device is more than any network adapter sold; is that of a node? Divide"
            " by its devices"
        )
    return Link(
        name, float(gbit * 10**9 / 8), CUSTOM_LATENCY_SECONDS, source="as given; latency as InfiniBand in the catalog"
    )
