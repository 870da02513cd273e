"""The cluster that processes run on, as one of them sees it: machines like its own, with a device for each process."""

from dataclasses import replace

from allranks.cluster import Cluster
from allranks.errors import ConfigError
from allranks.planning.scale import cluster_of
from allranks.planning.this_machine import cpu_cluster, local_cluster, look


def like_this_machine(on_gpu: bool, num_processes: int, num_nodes: int, own_gpus: bool = False) -> Cluster:
    """`num_nodes` machines like this one, as it was measured where it was, with a device for each process in all.

    Args:
        own_gpus: whether each process is known to have a GPU of its own, also where this one is shown fewer.

    Raises ConfigError where nobody says what its GPUs are, processes share them, or the machines cannot have the same
    number of processes.
    """
    each, left = divmod(num_processes, num_nodes)
    if left:
        raise ConfigError(f"{num_processes} processes on {num_nodes} hosts are not the same number on each")
    name = "local" if num_nodes == 1 else f"{num_nodes} hosts like this one"
    if not on_gpu:
        return cpu_cluster(num_nodes, each, None, name=name)
    unnamed = look().unnamed
    found = None if unnamed else local_cluster(each)
    if found is None or found.device.kind == "cpu":
        raise ConfigError(f"nvidia-smi does not name the GPUs that torch sees{unnamed and f': {unnamed}'}")
    one = _with_gpus_unseen(found, each, own_gpus) if each > found.num_devices else cluster_of(found, each)
    if num_nodes == 1:
        return one
    joined = f"{one.between.name} between nodes, because nobody said what joins them"
    return replace(one, name=name, nodes=num_nodes, machine="", corrections={}, notes=(*one.notes, joined))


def _with_gpus_unseen(found: Cluster, each: int, own_gpus: bool) -> Cluster:
    """This machine with a GPU for each of its processes, of which this one was shown a part."""
    if not own_gpus:
        raise ConfigError(
            f"{each} processes on a host whose GPUs in sight are {found.num_devices}, and a plan is for one process "
            "a GPU"
        )
    name = f"1x{each}:{found.device.name}"
    return replace(found, name=name, devices_per_node=each, domain=each, machine="", corrections={})
