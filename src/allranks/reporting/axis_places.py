"""Which ranks form the groups of a Layout's axes, and on which nodes they are."""

import math
from dataclasses import dataclass
from typing import final

from allranks.layout import Layout

MESH_ORDER = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Outermost first, as the engine counts ranks (`parallel.mesh.MESH_AXES`, which imports torch; a test compares)."""

MOST_DEVICES = 64
"""That one picture shows."""


@final
@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a layout.

    Attributes:
        degree: ranks of a group; num_groups: of them.
        ranks: of the group that is spread over the most nodes, the first of those, in order.
        num_nodes: over which that one is spread.
    """

    name: str
    degree: int
    num_groups: int
    ranks: tuple[int, ...]
    num_nodes: int


@final
@dataclass(frozen=True, slots=True)
class Node:
    """A node in a picture.

    Attributes:
        number: from 0.
        devices: (rank, or None where the layout leaves the device idle; whether it is in the group), as far as shown.
        left_out: devices of the node that are not shown.
    """

    number: int
    devices: tuple[tuple[int | None, bool], ...]
    left_out: int = 0


def place_axes(layout: Layout, devices_per_node: int) -> tuple[Axis, ...]:
    """Every axis of more than one rank, outermost first; ep, which cuts the data-parallel ranks again, at the end."""
    stride, found = layout.world_size, []
    for name in MESH_ORDER:
        degree = getattr(layout, name)
        stride //= degree
        found.append((name, degree, stride))
    # Experts are cut over data-parallel ranks next to each other: dp_shard first, then dp_replicate.
    found.append(("ep", layout.ep, layout.cp * layout.tp))
    return tuple(
        _axis(name, degree, step, layout.world_size, devices_per_node) for name, degree, step in found if degree > 1
    )


def _axis(name: str, degree: int, step: int, world_size: int, devices_per_node: int) -> Axis:
    """The axis along which neighbours are `step` ranks apart."""
    firsts = (rank for rank in range(world_size) if rank // step % degree == 0)
    groups = (range(first, first + degree * step, step) for first in firsts)
    num_nodes, ranks = max(
        ((len({rank // devices_per_node for rank in ranks}), ranks) for ranks in groups), key=lambda pair: pair[0]
    )
    return Axis(name, degree, world_size // degree, tuple(ranks), num_nodes)


def show_nodes(axis: Axis, world_size: int, num_nodes: int, devices_per_node: int) -> tuple[Node, ...]:
    """All nodes where they have at most 64 devices together; else the first ones that the axis's group is on."""
    room = max(1, MOST_DEVICES // devices_per_node)
    numbers = list(range(num_nodes))
    if num_nodes > room:
        numbers = sorted({rank // devices_per_node for rank in axis.ranks})[:room]
    shown, group = min(devices_per_node, MOST_DEVICES), set(axis.ranks)
    nodes = []
    for number in numbers:
        ranks = range(number * devices_per_node, number * devices_per_node + shown)
        devices = tuple((rank if rank < world_size else None, rank in group) for rank in ranks)
        nodes.append(Node(number, devices, devices_per_node - shown))
    return tuple(nodes)


def devices_on_node(num_devices: int, num_nodes: int) -> int:
    """Of equal nodes."""
    return math.ceil(num_devices / max(1, num_nodes))
