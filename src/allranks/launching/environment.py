"""Who started this process, and which of how many it is: read once from the environment, into one ProcessEnvironment.

    launcher      recognised by                              rank, local rank
    allranks      ALLRANKS_AGENT (our own agent)             RANK, LOCAL_RANK
    torchrun      TORCHELASTIC_RUN_ID                        RANK, LOCAL_RANK
    environment   RANK and WORLD_SIZE, set by hand           RANK, LOCAL_RANK (both LOCAL_ variables or neither)
    slurm         SLURM_STEP_ID with SLURM_STEP_NUM_TASKS>1  SLURM_PROCID, SLURM_LOCALID
    openmpi       OMPI_COMM_WORLD_SIZE>1                     OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_LOCAL_RANK
    pmi           PMI_SIZE>1 (MPICH, Intel MPI)              PMI_RANK, MPI_LOCALRANKID
    none          nothing of these                           0 of 1

The first that fits is taken. MASTER_ADDR and MASTER_PORT win over what is derived from a scheduler.
"""

import re
import zlib
from collections.abc import Mapping
from dataclasses import replace

from allranks.errors import ConfigError
from allranks.launching.hostlist import first_host
from allranks.process_environment import ALONE, LOOPBACK, Launcher, ProcessEnvironment

__all__ = ["ALONE", "ProcessEnvironment", "read_environment"]

DEFAULT_PORT = 29500  # torch's own
FIRST_DERIVED_PORT, NUM_DERIVED_PORTS = 15000, 15000  # below Linux' ephemeral ports, which start at 32768


def read_environment(environ: Mapping[str, str]) -> ProcessEnvironment:
    """What these environment variables say about this process; changes nothing and starts nothing but `scontrol`.

    Raises:
        ConfigError: a variable is missing, is no number, or contradicts another; one line.
    """
    if "TORCHELASTIC_RUN_ID" in environ:
        found = _read_elastic(environ)
    elif "RANK" in environ or "WORLD_SIZE" in environ:
        found = _read_plain(environ)
    elif "SLURM_STEP_ID" in environ and _number(environ, "SLURM_STEP_NUM_TASKS", 1) > 1:
        found = _read_slurm(environ)
    elif _number(environ, "OMPI_COMM_WORLD_SIZE", 1) > 1:
        found = _read_openmpi(environ)
    elif _number(environ, "PMI_SIZE", 1) > 1:
        found = _read_pmi(environ)
    else:
        found = ALONE
    _check(found)
    return replace(found, interface=environ.get("GLOO_SOCKET_IFNAME") or None)


def _read_elastic(environ: Mapping[str, str]) -> ProcessEnvironment:
    ours = "ALLRANKS_AGENT" in environ
    because = "the allranks agent started this process" if ours else "TORCHELASTIC_RUN_ID says that torchrun started it"
    return ProcessEnvironment(
        "allranks" if ours else "torchrun",
        rank=_need(environ, "RANK", because),
        local_rank=_need(environ, "LOCAL_RANK", because),
        world_size=_need(environ, "WORLD_SIZE", because),
        local_world_size=_need(environ, "LOCAL_WORLD_SIZE", because),
        node_rank=_number(environ, "GROUP_RANK", 0),
        num_nodes=_number(environ, "GROUP_WORLD_SIZE", 1),
        master_addr=_need_text(environ, "MASTER_ADDR", because),
        master_port=_need(environ, "MASTER_PORT", because),
        restart_count=_number(environ, "TORCHELASTIC_RESTART_COUNT", 0),
        agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        layout=environ.get("ALLRANKS_LAYOUT") if ours else None,
    )


def _read_plain(environ: Mapping[str, str]) -> ProcessEnvironment:
    rank = _need(environ, "RANK", "WORLD_SIZE is set")
    world_size = _need(environ, "WORLD_SIZE", "RANK is set")
    because = "RANK and WORLD_SIZE are set"
    address = "" if world_size == 1 else _need_text(environ, "MASTER_ADDR", because)
    local_world_size = _plain_local_world_size(environ, world_size, address)
    return ProcessEnvironment(
        "environment",
        rank=rank,
        local_rank=_number(environ, "LOCAL_RANK", rank % local_world_size),
        world_size=world_size,
        local_world_size=local_world_size,
        node_rank=_number(environ, "GROUP_RANK", rank // local_world_size),
        num_nodes=_number(environ, "GROUP_WORLD_SIZE", -(-world_size // local_world_size)),
        master_addr=address,
        master_port=0 if world_size == 1 else _need(environ, "MASTER_PORT", because),
    )


def _plain_local_world_size(environ: Mapping[str, str], world_size: int, address: str) -> int:
    """Where nobody says it: all processes where rank 0 is at a loopback address, else one a host (Kubeflow's pods)."""
    if "LOCAL_WORLD_SIZE" in environ or "LOCAL_RANK" in environ:
        found = _need(environ, "LOCAL_WORLD_SIZE", "RANK and LOCAL_RANK are set")
        if found < 1:
            raise ConfigError(f"LOCAL_WORLD_SIZE={found} is not a number of processes; it is at least 1")
        return found
    return world_size if address in ("", "localhost", "::1") or address.startswith("127.") else 1


def _read_slurm(environ: Mapping[str, str]) -> ProcessEnvironment:
    because = "SLURM_STEP_ID says that srun started this process"
    node_rank = _need(environ, "SLURM_NODEID", because)
    hosts = _need_text(environ, "SLURM_STEP_NODELIST", because)
    step = f"{environ.get('SLURM_JOB_ID', '0')}.{environ['SLURM_STEP_ID']}"
    per_task = environ.get("SLURM_TRES_PER_TASK", "")
    return ProcessEnvironment(
        "slurm",
        rank=_need(environ, "SLURM_PROCID", because),
        local_rank=_need(environ, "SLURM_LOCALID", because),
        world_size=_need(environ, "SLURM_STEP_NUM_TASKS", because),
        local_world_size=_tasks_of_node(_need_text(environ, "SLURM_STEP_TASKS_PER_NODE", because), node_rank),
        node_rank=node_rank,
        num_nodes=_need(environ, "SLURM_STEP_NUM_NODES", because),
        master_addr=environ.get("MASTER_ADDR") or first_host(hosts),
        master_port=_number(environ, "MASTER_PORT", _derive_port(step)),
        restart_count=_number(environ, "SLURM_RESTART_COUNT", 0),
        own_device="SLURM_GPUS_PER_TASK" in environ or "gpu" in per_task,
    )


def _read_openmpi(environ: Mapping[str, str]) -> ProcessEnvironment:
    because = "OMPI_COMM_WORLD_SIZE says that Open MPI's mpirun started this process"
    world_size = _need(environ, "OMPI_COMM_WORLD_SIZE", because)
    local_world_size = _need(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", because)
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid")
    rank = _need(environ, "OMPI_COMM_WORLD_RANK", because)
    local_rank = _need(environ, "OMPI_COMM_WORLD_LOCAL_RANK", because)
    return _read_mpi("openmpi", environ, (rank, world_size, local_rank, local_world_size), job)


def _read_pmi(environ: Mapping[str, str]) -> ProcessEnvironment:
    because = "PMI_SIZE says that MPI's mpiexec started this process"
    world_size = _need(environ, "PMI_SIZE", because)
    local_world_size = _need(environ, "MPI_LOCALNRANKS", because)
    rank = _need(environ, "PMI_RANK", because)
    local_rank = _need(environ, "MPI_LOCALRANKID", because)
    return _read_mpi("pmi", environ, (rank, world_size, local_rank, local_world_size), environ.get("PMI_JOBID"))


def _read_mpi(
    launcher: Launcher, environ: Mapping[str, str], numbers: tuple[int, int, int, int], job: str | None
) -> ProcessEnvironment:
    rank, world_size, local_rank, local_world_size = numbers
    one_host = world_size == local_world_size
    address = environ.get("MASTER_ADDR") or (LOOPBACK if one_host else "")
    if not address:
        raise ConfigError(
            f"{world_size} processes on several hosts, but MPI does not say where rank 0 is: give its host name to all,"
            " as in `mpirun -x MASTER_ADDR=HOST` (Open MPI) or `mpiexec -genv MASTER_ADDR HOST`"
        )
    return ProcessEnvironment(
        launcher,
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        node_rank=rank // max(local_world_size, 1),
        num_nodes=-(-world_size // max(local_world_size, 1)),
        master_addr=address,
        master_port=_number(environ, "MASTER_PORT", _derive_port(job) if job else DEFAULT_PORT),
    )


def _tasks_of_node(tasks_per_node: str, node_rank: int) -> int:
    """The node's entry of a list like `4(x2),3`: nodes 0 and 1 have 4 tasks, node 2 has 3."""
    counts: list[int] = []
    for entry in tasks_per_node.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry)
        if match is None:
            break
        counts += [int(match[1])] * int(match[2] or 1)
    if not 0 <= node_rank < len(counts):
        raise ConfigError(f"SLURM_STEP_TASKS_PER_NODE={tasks_per_node} has no entry for SLURM_NODEID={node_rank}")
    return counts[node_rank]


def _derive_port(job: str) -> int:
    return FIRST_DERIVED_PORT + zlib.crc32(job.encode()) % NUM_DERIVED_PORTS


def _need_text(environ: Mapping[str, str], name: str, because: str) -> str:
    value = environ.get(name, "")
    if not value:
        raise ConfigError(f"{because}, but {name} is not set; set it, or unset what asks for it")
    return value


def _need(environ: Mapping[str, str], name: str, because: str) -> int:
    _need_text(environ, name, because)
    return _number(environ, name, 0)


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "")
    if not text:
        return default
    if not text.isdecimal():
        raise ConfigError(f"{name}={text!r} is not a number that counts processes, hosts or ports")
    return int(text)


def _check(found: ProcessEnvironment) -> None:
    limits = [
        ("world size", found.world_size, 1, None),
        ("rank", found.rank, 0, ("world size", found.world_size)),
        ("local world size", found.local_world_size, 1, ("world size + 1", found.world_size + 1)),
        ("local rank", found.local_rank, 0, ("local world size", found.local_world_size)),
        ("number of nodes", found.num_nodes, 1, ("world size + 1", found.world_size + 1)),
        ("node rank", found.node_rank, 0, ("number of nodes", found.num_nodes)),
        ("master port", found.master_port, 0, ("end of the ports", 65536)),
    ]
    for name, value, least, limit in limits:
        if value < least or (limit is not None and value >= limit[1]):
            expected = f"at least {least}" + (f" and below the {limit[0]}, {limit[1]}" if limit else "")
            raise ConfigError(f"{name} is {value}, but must be {expected} (launcher: {found.launcher})")
