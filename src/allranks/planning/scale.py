"""Other sizes of the same cluster, and the least or the most of something that still does."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from allranks.cluster import Cluster
from allranks.errors import ConfigError
from allranks.even_cut import divisors

MOST_NODES = 4096


def cluster_of(cluster: Cluster, num_devices: int) -> Cluster:
    """The same nodes, so many that they have `num_devices`; fewer than a node's are a part of one.

    Raises ConfigError where they are no whole number of nodes.
    """
    each = cluster.devices_per_node
    if num_devices < 1:
        raise ConfigError(f"--gpus {num_devices}: no devices; at least 1")
    nodes, left = divmod(num_devices, each)
    if nodes and left:
        near = f"{nodes * each} or {(nodes + 1) * each}"
        raise ConfigError(f"--gpus {num_devices}: {cluster.name} has nodes of {each} devices; use {near}")
    nodes, each = (nodes, each) if nodes else (1, num_devices)
    name = f"{nodes}x{each}:{cluster.device.name}"
    if num_devices == cluster.num_devices:
        name = cluster.name
    domain = min(max(cluster.domain, each), num_devices)
    found = replace(cluster, name=name, nodes=nodes, devices_per_node=each, domain=domain)
    # Another number of this machine's devices is not what its runs were measured with.
    return found if num_devices == cluster.num_devices else replace(found, machine="", corrections={})


def sizes_of(cluster: Cluster) -> Iterator[int]:
    """Numbers of devices worth a look, ascending: parts of a node, then nodes by steps of at most a half."""
    yield from divisors(cluster.devices_per_node)
    nodes = 2
    while nodes <= MOST_NODES:
        yield nodes * cluster.devices_per_node
        nodes += max(1, 2 ** (nodes.bit_length() - 2))


def fewest_nodes(does: Callable[[int], bool], failed: int, found: int, each: int) -> int:
    """The least of the numbers of devices between `failed` and `found` that a bisection over nodes finds to do.

    `found` does and `failed` does not. The numbers between need not rise from one that fails to one that does, since a
    number of nodes may not divide what another divides: it is the least of those that were asked for.

    Args:
        each: devices of a node. Less than two nodes, or a part of one, leave nothing to ask for.
    """
    low, high = failed // each, found // each
    while low and high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if does(middle * each) else (middle, high)
    return high * each if low else found


def largest(does: Callable[[int], bool], step: int, most: int) -> int:
    """The largest multiple of `step` up to `most` for which `does` holds, 0 where none does.

    `does` holds up to somewhere and nowhere above.
    """
    low, high = 0, step
    while high <= most and does(high):
        low, high = high, 2 * high
    high = min(high, (most // step + 1) * step)
    while high - low > step:
        middle = (low + high) // 2 // step * step
        low, high = (middle, high) if does(middle) else (low, middle)
    return low
