"""ProcessEnvironment: who started this process, and which of how many it is."""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal, final

Launcher = Literal["allranks", "torchrun", "environment", "slurm", "openmpi", "pmi", "none"]

LOOPBACK = "127.0.0.1"
ATTEMPT = "ALLRANKS_ATTEMPT"  # the variable that says to workers of several hosts of which attempt they are
HOSTS = "ALLRANKS_HOST_ADDRESSES"  # and the one with the addresses of these, parted by commas
NO_GPUS: Final = MappingProxyType({"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""})
"""Under these variables, torch sees no GPU that it has not used before."""
NO_SHADOWS: Final = MappingProxyType({"PYTHONSAFEPATH": "1"})
"""Under this, an interpreter started with -c or -m does not find a user's tokenize.py in the current folder instead of
the standard library's (`multiprocessing` starts its helpers so)."""
COMMAND: Final = (sys.executable, "-P", "-m", "allranks")
"""This command for a process of its own, with the same care."""


@final
@dataclass(frozen=True, slots=True)
class ProcessEnvironment:
    """One process of a launch, as launching/environment.py reads it.

    Attributes:
        launcher: who started it.
        rank, world_size: its number among all processes; 0 <= rank < world_size.
        local_rank, local_world_size: the same among the processes of this host (of this launcher).
        node_rank, num_nodes: the same for hosts; under torchrun, for agents.
        master_addr, master_port: where the store listens; "" and 0 in a world of one process.
        restart_count: how often the launcher has restarted this group of workers.
        agent_store: True where the launcher itself hosts that store, so that rank 0 must not.
        own_device: True where the launcher gave each process a GPU of its own, whatever number it shows as.
        layout: the layout that `allranks.launch(layout=...)` asked for, else None.
        interface: the network interface that the user chose by GLOO_SOCKET_IFNAME, else None.
    """

    launcher: Launcher
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int = 0
    num_nodes: int = 1
    master_addr: str = ""
    master_port: int = 0
    restart_count: int = 0
    agent_store: bool = False
    own_device: bool = False
    layout: str | None = None
    interface: str | None = None


ALONE = ProcessEnvironment("none", rank=0, local_rank=0, world_size=1, local_world_size=1)


def num_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


@contextmanager
def changed_environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Inside, this process's environment has these variables; afterwards they are as they were."""
    kept = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in kept.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
