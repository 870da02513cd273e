"""Seconds of a collective among the ranks of an axis on the nodes of a Cluster."""

import math
from dataclasses import dataclass
from typing import final

from allranks.cluster import Cluster, Link
from allranks.planning.constants import Constants
from allranks.planning.group_places import Steps, places_of

NETWORK_HOP_SECONDS = 1.4e-5
"""From node to node in a ring of NCCL's simple protocol (nccl/src/graph/tuning.cc)."""


@final
@dataclass(frozen=True, slots=True)
class Group:
    """Ranks of one axis: `size` of them.

    Attributes:
        near: how many of them share a domain (the fast links), where the fewest do.
        domains: over which they are spread.
        link: that the group's slowest step takes.
        bandwidth: bytes/s that a ring over the group reaches per rank, efficiencies counted.
        inside: bytes/s of one rank to others of its domain; card: to those of other domains.
        latency_seconds: of one all-reduce or all-to-all, whatever its size; ring_seconds: of one gather or scatter.
    """

    size: int
    near: int
    domains: int
    link: Link
    bandwidth: float
    inside: float
    card: float
    latency_seconds: float
    ring_seconds: float

    @property
    def crosses(self) -> bool:
        """Whether the group leaves the domain."""
        return self.domains > 1


def group_of(cluster: Cluster, constants: Constants, world: int, steps: Steps) -> Group:
    """The group of `steps` that lies worst among `world` ranks: one that does not line up with the domains may leave
    them where that of rank 0 does not.

    A ring that leaves the node enters and leaves each node once; its channels share the network cards next to the
    ranks it has there (NCCL's rings; Narayanan et al. 2104.04473, section 3). So it is as fast as the cards of the
    node with the fewest ranks, `near`, and never faster than the links inside.
    """
    size = math.prod(many for many, _ in steps)
    near, domains = places_of(cluster.domain, world, steps)
    inside = cluster.inside.bandwidth * constants.inside
    card = min(inside, cluster.between.bandwidth * constants.between)
    there = constants.hop_seconds * (size / domains - 1)  # through the ranks of a node
    latency = constants.base_seconds + there
    if domains == 1:
        return Group(size, near, 1, cluster.inside, inside, inside, card, latency, latency)
    # A ring takes a hop for each node, a tree one for each doubling; NCCL has trees for all-reduces alone.
    hop = max(cluster.between.latency_seconds, NETWORK_HOP_SECONDS)
    return Group(
        size=size,
        near=near,
        domains=domains,
        link=cluster.between,
        bandwidth=min(inside, cluster.between.bandwidth * constants.between * near),
        inside=inside,
        card=card,
        latency_seconds=latency + hop * min(domains, 2 * math.log2(domains) + 2),
        ring_seconds=constants.base_seconds + domains * (hop + there),
    )


def all_reduce_seconds(group: Group, num_bytes: float) -> float:
    """2 (n - 1) / n of the tensor passes each rank (Thakur et al. 2005; NCCL's bus bandwidth)."""
    return _measured(group, "all_reduce", num_bytes) or _ring(group, num_bytes, 2.0, group.latency_seconds)


def all_gather_seconds(group: Group, num_bytes: float) -> float:
    """(n - 1) / n of the whole tensor of `num_bytes` passes each rank; reduce-scatter takes as long.

    The ring of Thakur et al. 2005 (Optimization of Collective Communication Operations in MPICH), and the factor of
    NCCL's bus bandwidth (nccl-tests, doc/PERFORMANCE.md).
    """
    return _measured(group, "all_gather", num_bytes) or _ring(group, num_bytes, 1.0, group.ring_seconds)


def reduce_scatter_seconds(group: Group, num_bytes: float) -> float:
    """As a gather of the same bytes (nccl-tests, doc/PERFORMANCE.md: the same factor), unless somebody measured it."""
    return _measured(group, "reduce_scatter", num_bytes) or all_gather_seconds(group, num_bytes)


def all_to_all_seconds(group: Group, num_bytes: float, outside_share: float = 1.0) -> float:
    """Each rank sends `num_bytes` (n - 1) / n: to peers in its domain by the fast links, to the others by its own card,
    at the same time.

    The bytes are those of nccl-tests, doc/PERFORMANCE.md. `outside_share` of what goes to other nodes goes over the
    network, where the rest is a copy that the node makes over the fast links (DeepSeek-V3 2412.19437, section 3.2.2).
    """
    if group.size < 2 or not num_bytes:
        return 0.0
    outside = num_bytes * (group.size - group.near) / group.size
    inside = num_bytes * (group.near - 1) / group.size + (1 - outside_share) * outside
    return max(outside_share * outside / group.card, inside / group.inside) + group.latency_seconds


def swap_seconds(group: Group, num_bytes: float) -> float:
    """An all-to-all of `num_bytes` on each rank, its own part among them: as measured, where somebody did."""
    return _measured(group, "all_to_all", num_bytes) or all_to_all_seconds(group, num_bytes)


def send_seconds(group: Group, num_bytes: float, adjacent_crosses: bool) -> float:
    """One message to the next rank of the group: latency and bytes over bandwidth (Hockney 1994, The communication
    challenge for MPP); the latency of 10 microseconds is an assumption, until `doctor --calibrate` has measured sends.
    """
    if group.size < 2:
        return 0.0
    if adjacent_crosses == group.crosses and (measured := _measured(group, "send", num_bytes)):
        return measured
    return num_bytes / (group.card if adjacent_crosses else group.inside) + 1e-5


def _ring(group: Group, num_bytes: float, passes: float, latency: float) -> float:
    """A ring passes (n - 1) / n of a tensor on, `passes` times (Thakur et al. 2005)."""
    if group.size < 2 or not num_bytes:
        return 0.0
    return passes * (group.size - 1) / group.size * num_bytes / group.bandwidth + latency


def _measured(group: Group, collective: str, num_bytes: float) -> float:
    """From the link's table where somebody measured this collective in a group of this size; 0 where nobody did."""
    table = group.link.measured.get(collective, {}).get(group.size) if group.domains in (1, group.size) else None
    if not table or not num_bytes:
        return 0.0
    sizes = [size for size, _ in table]
    if num_bytes <= sizes[0]:
        return table[0][1]
    if num_bytes >= sizes[-1]:
        return table[-1][1] * num_bytes / sizes[-1]
    upper = next(index for index, size in enumerate(sizes) if size >= num_bytes)
    (size0, time0), (size1, time1) = table[upper - 1], table[upper]
    return time0 + (time1 - time0) * (num_bytes - size0) / (size1 - size0)
