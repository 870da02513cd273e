"""Other sizes of the same cluster, and the least or the most of something that still does.

Devices come and go with their nodes, but processes on this machine's processor: another number of them shares the same
cores and memory.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from allranks.cluster import Cluster
from allranks.errors import ConfigError
from allranks.even_cut import divisors
from allranks.planning.assembly import MOST_DEVICES, domain_of
from allranks.planning.catalog import device_names, find_device
from allranks.planning.this_machine import cpu_cluster, look

MOST_NODES = 4096


def cluster_of(cluster: Cluster, num_devices: int) -> Cluster:
    """The same nodes, so many that they have `num_devices`; fewer than a node's are a part of one.

    Of this machine's processor: the same machine with so many processes.

    Raises ConfigError where they are no whole number of nodes.
    """
    each = cluster.devices_per_node
    if num_devices < 1:
        raise ConfigError(f"--gpus {num_devices}: no devices; at least 1")
    if num_devices > MOST_DEVICES:
        raise ConfigError(f"--gpus {num_devices}: more than the {MOST_DEVICES} devices that a plan takes")
    if num_devices != cluster.num_devices and _shares_this_processor(cluster):
        return _with_processes(cluster, num_devices)
    nodes, left = divmod(num_devices, each)
    if nodes and left:
        near = f"{nodes * each} or {(nodes + 1) * each}"
        raise ConfigError(f"--gpus {num_devices}: {cluster.name} has nodes of {each} devices; use {near}")
    nodes, each = (nodes, each) if nodes else (1, num_devices)
    name = f"{nodes}x{each}:{cluster.device.name}"
    if num_devices == cluster.num_devices:
        name = cluster.name
    domain = _domain(cluster, nodes, each)
    found = replace(cluster, name=name, nodes=nodes, devices_per_node=each, domain=domain)
    # Another number of this machine's devices is not what its runs were measured with.
    return found if num_devices == cluster.num_devices else replace(found, machine="", corrections={})


def _domain(cluster: Cluster, nodes: int, each: int) -> int:
    """How many devices `inside` joins where there are so many nodes.

    As the catalog says where it says what `cluster` has: four devices of a rack of 72 say nothing of the rack.
    """
    if cluster.device.name in device_names():
        known = find_device(cluster.device.name)
        if cluster.inside.name == known.inside and cluster.domain == domain_of(
            cluster.nodes, cluster.devices_per_node, known
        ):
            return domain_of(nodes, each, known)
    return min(max(cluster.domain, each), nodes * each)


def _shares_this_processor(cluster: Cluster) -> bool:
    """Whether its devices are processes of the machine at hand, and no node of its own kind can be added."""
    return bool(cluster.machine) and cluster.device.kind == "cpu"


def _with_processes(cluster: Cluster, number: int) -> Cluster:
    """This machine as `1xN:cpu` names it, at the price and the watts that `cluster` has."""
    found = cpu_cluster(1, number, None, name=f"1x{number}:cpu")
    return replace(
        found,
        device_hour_price=cluster.device_hour_price,
        currency=cluster.currency,
        device_watts=cluster.device_watts,
        price_source=cluster.price_source,
    )


def step_of(cluster: Cluster) -> int:
    """How many devices come and go together: those of a node, or one process on this machine's processor."""
    return 1 if _shares_this_processor(cluster) else cluster.devices_per_node


def sizes_of(cluster: Cluster) -> Iterator[int]:
    """Numbers of devices worth a look, ascending: parts of a node, then nodes by steps of at most a half.

    Of this machine's processor no more than it has cores, or than were asked for; of any cluster no more than a plan
    takes.
    """
    step = step_of(cluster)
    most = max(look().cores, cluster.num_devices) if _shares_this_processor(cluster) else MOST_NODES
    most = min(most, MOST_DEVICES // step)
    yield from divisors(step)
    nodes = 2
    while nodes <= most:
        yield nodes * step
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
