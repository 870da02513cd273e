"""Device, backend and interface of a process: chosen with because, and started in the order that is safe."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from allranks.errors import ConfigError, ProcessError
from allranks.layout import Layout
from allranks.parallel.allocator import keep_memory, prove_growth
from allranks.parallel.ended_groups import destroy_groups
from allranks.parallel.host_messages import carry_messages
from allranks.parallel.interface import NCCL_VARIABLE, advise_on_start, choose_for_nccl, choose_interface
from allranks.parallel.own_gpus import share_gpus, uuids_of
from allranks.parallel.reachable import check_reachable
from allranks.parallel.share import Share, share_of
from allranks.parallel.store import open_store
from allranks.process_environment import ProcessEnvironment
from allranks.verdict import Decision

Requested = Literal["auto", "cpu", "cuda"]
Backend = Literal["auto", "nccl", "gloo", "mpi"]

CONNECT_SECONDS = 60.0
SAME_DEVICES = ("allranks", "torchrun")  # launchers that give all processes of a host the same environment
SHARING = "NCCL takes one process a GPU: several on one save no memory and are slow; start one a GPU"

_set_by_us: list[str] = []
_ends: list[Callable[[], None]] = []


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """What a process computes on, and how it speaks to the others.

    Attributes:
        device: "cpu", or this process's GPU with its number.
        backend: "gloo", "nccl" or "mpi"; unused in a world of one process.
        interface: the network interface of gloo; None: its own choice.
        decisions: one for each of the above, for the banner.
        share: under placement the devices of this process.
        beside: the other GPUs that this process uses, under placement and data_parallel.
        nccl_interface: what NCCL is told of interfaces, in its own words; None: nothing.
        unsettled: whether `start` has yet to see if each process has a GPU of its own, and choose the backend by that.
    """

    device: torch.device
    backend: str
    interface: str | None
    decisions: tuple[Decision, ...]
    share: Share | None = None
    beside: tuple[torch.device, ...] = ()
    nccl_interface: str | None = None
    unsettled: bool = False

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """All that this process computes on, `device` first."""
        return (self.device, *self.beside)


def choose_device(
    environment: ProcessEnvironment, requested: str, backend: str, layout: Layout | None = None
) -> DeviceChoice:
    """The DeviceChoice of this process; every rank of a host decides alike. Initialises no device.

    Args:
        requested: "auto", "cpu" or "cuda".
        backend: "auto", "nccl", "gloo" or "mpi".
        layout: under placement a process takes a share of the GPUs, under data_parallel all of them.

    Raises:
        ConfigError: what is asked for is not there, or NCCL would have to serve two processes on one GPU.
        LayoutError: a rule of the placement names a device that is not in the share.
    """
    num_gpus = torch.cuda.device_count()
    device, device_decision = _choose_device(environment, requested, num_gpus)
    share = None
    if layout is not None and layout.kind == "placement":
        device, device_decision, share = _take_share(environment, layout, device, device_decision, num_gpus)
    shared = device.type == "cuda" and not environment.own_device and environment.local_world_size > num_gpus
    name, backend_decision = _choose_backend(environment, backend, device, num_gpus if shared else None)
    beside = _find_beside(device, layout, share, num_gpus)
    if environment.world_size == 1:
        return DeviceChoice(device, name, None, (device_decision,), share, beside)
    interface, interface_decision = choose_interface(environment)
    # Of the world, so that all ranks ask, or none: one of them may see enough GPUs where another does not.
    unsettled = backend == "auto" and device.type == "cuda" and dist.is_nccl_available()
    unsettled = unsettled and not environment.own_device and environment.launcher not in SAME_DEVICES
    decisions = (device_decision, backend_decision, interface_decision)
    choice = DeviceChoice(device, name, interface, decisions, share, beside, unsettled=unsettled)
    return _tell_nccl(environment, choice)


def _tell_nccl(environment: ProcessEnvironment, choice: DeviceChoice) -> DeviceChoice:
    """Where NCCL is the backend: with what it is told of interfaces."""
    if choice.backend != "nccl":
        return choice
    told, decision = choose_for_nccl(environment, choice.interface)
    return replace(choice, nccl_interface=told, decisions=choice.decisions + (() if decision is None else (decision,)))


def _settle(environment: ProcessEnvironment, choice: DeviceChoice, *, shared: bool) -> DeviceChoice:
    """The choice once it is known whether processes share GPUs."""
    name = "gloo" if shared else "nccl"
    because = f"processes of this world share GPUs, and {SHARING}" if shared else "no two processes have the same GPU"
    decisions = (choice.decisions[0], Decision(f"backend {name}", because), choice.decisions[2])
    settled = replace(choice, backend=name, decisions=decisions, nccl_interface=None, unsettled=False)
    return _tell_nccl(environment, settled)


def _choose_device(environment: ProcessEnvironment, requested: str, num_gpus: int) -> tuple[torch.device, Decision]:
    if requested == "cpu":
        return torch.device("cpu"), Decision("device cpu", "it was asked for")
    if num_gpus == 0:
        why = "torch sees no CUDA device" if torch.version.cuda else f"torch {torch.__version__} is built without CUDA"
        if requested == "cuda":
            raise ConfigError(f"--device cuda, but {why}; take --device cpu, or see what nvidia-smi says")
        return torch.device("cpu"), Decision("device cpu", why)
    if environment.own_device and num_gpus == 1:
        return torch.device("cuda", 0), Decision("device cuda:0", "the launcher gave each process a GPU of its own")
    index = environment.local_rank % num_gpus
    because = f"local rank {environment.local_rank} of {environment.local_world_size}, and torch sees {num_gpus} GPUs"
    return torch.device("cuda", index), Decision(f"device cuda:{index}", because)


def _take_share(
    environment: ProcessEnvironment, layout: Layout, device: torch.device, decision: Decision, num_gpus: int
) -> tuple[torch.device, Decision, Share]:
    """The GPUs of a host are dealt out in contiguous shares, in the order of the local ranks; batch and loss on one."""
    if device.type != "cuda":
        return device, decision, share_of(layout)
    size, start = num_gpus, 0
    if not environment.own_device:
        size = max(1, num_gpus // environment.local_world_size)
        start = environment.local_rank * size % num_gpus
    share = share_of(layout, tuple(torch.device("cuda", start + index) for index in range(size)))
    what = f"{size} GPUs from cuda:{start} on, batch and loss on {share.home.device}"
    because = f"local rank {environment.local_rank} of {environment.local_world_size}, and torch sees {num_gpus} GPUs"
    return share.home.device, Decision(what, because), share


def _find_beside(
    device: torch.device, layout: Layout | None, share: Share | None, num_gpus: int
) -> tuple[torch.device, ...]:
    """The GPUs on which a process computes beside `device`."""
    if device.type != "cuda":
        return ()
    used = [] if share is None else [place.device for place in share.places if place.device.type == "cuda"]
    if layout is not None and layout.kind == "data_parallel":
        used = [torch.device("cuda", index) for index in range(num_gpus)]  # nn.DataParallel takes all that it sees
    return tuple(other for other in used if other != device)


def _choose_backend(
    environment: ProcessEnvironment, asked: str, device: torch.device, shared_gpus: int | None
) -> tuple[str, Decision]:
    """The backend; `shared_gpus` is how many GPUs the host's processes have to share, or None where they need not."""
    crowd = f"{environment.local_world_size} processes of this host share {shared_gpus} GPUs"
    if asked == "mpi" and not dist.is_mpi_available():
        raise ConfigError(f"train.backend=mpi, but torch {torch.__version__} is built without MPI; take gloo")
    if asked == "nccl" and device.type == "cpu":
        raise ConfigError("train.backend=nccl, but the device is cpu and NCCL serves GPUs only; take gloo")
    if asked == "nccl" and not dist.is_nccl_available():
        raise ConfigError(f"train.backend=nccl, but torch {torch.__version__} is built without NCCL; take gloo")
    if asked == "nccl" and shared_gpus is not None and environment.launcher in SAME_DEVICES:
        raise ConfigError(f"train.backend=nccl, but {crowd} and NCCL takes one process a GPU; take gloo or fewer")
    if asked != "auto":
        return asked, Decision(f"backend {asked}", "train.backend says so")
    if device.type == "cpu":
        return "gloo", Decision("backend gloo", "the device is cpu")
    if shared_gpus is not None:
        return "gloo", Decision("backend gloo", f"{crowd}, and {SHARING}")
    if not dist.is_nccl_available():
        return "gloo", Decision("backend gloo", "this torch is built without NCCL")
    return "nccl", Decision("backend nccl", "each process has a GPU of its own")


def start(
    environment: ProcessEnvironment,
    choice: DeviceChoice,
    timeout_seconds: float,
    connect_seconds: float = CONNECT_SECONDS,
) -> DeviceChoice:
    """Take the device, then start the backend; collective. A world of one process takes its device only.

    Args:
        timeout_seconds: after which a collective that a peer does not join fails (gloo's own default is 30 minutes).
        connect_seconds: how long to wait for rank 0's store.

    Returns:
        The choice, with what only the devices could tell.

    Raises:
        ConfigError: there are GPUs that this torch cannot use; with torch's reason.
        ProcessError: the port is in use, or a host or peer cannot be reached; names host and port.
    """
    grows = keep_memory(choice.device)
    take_device(choice.device)
    found = prove_growth(choice.device) if grows else None
    if environment.world_size > 1:
        choice = _start_backend(environment, choice, timeout_seconds, min(connect_seconds, timeout_seconds))
    return choice if found is None else replace(choice, decisions=(*choice.decisions, found))


def _start_backend(
    environment: ProcessEnvironment, choice: DeviceChoice, timeout_seconds: float, connect_seconds: float
) -> DeviceChoice:
    """As `start`, once the device is taken."""
    if choice.interface is not None:
        _set_default("GLOO_SOCKET_IFNAME", choice.interface)
    timeout = timedelta(seconds=timeout_seconds)
    if choice.backend == "mpi":
        dist.init_process_group("mpi", timeout=timeout)  # MPI itself knows ranks and addresses
        return choice
    store = open_store(environment, connect_seconds=connect_seconds, timeout_seconds=timeout_seconds)
    check_reachable(store, environment, choice.interface, arrive_seconds=connect_seconds)
    if choice.unsettled:
        shared = share_gpus(store, uuids_of(choice.devices), environment.world_size, timeout_seconds)
        choice = _settle(environment, choice, shared=shared)
    if choice.nccl_interface is not None:
        _set_default(NCCL_VARIABLE, choice.nccl_interface)
    name = "cuda:nccl,cpu:gloo" if choice.backend == "nccl" else choice.backend
    try:
        dist.init_process_group(
            name, store=store, rank=environment.rank, world_size=environment.world_size, timeout=timeout
        )
    except (dist.DistError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        where = f"{environment.master_addr}:{environment.master_port}"
        advice = advise_on_start(reason, choice.interface)
        raise ProcessError(
            f"rank {environment.rank} found the store at {where}, but {name} did not start: {reason}; {advice}"
        ) from error
    if choice.backend == "gloo" and choice.device.type != "cpu":
        _ends.append(carry_messages(choice.device.type))
    return choice


def take_device(device: torch.device) -> None:
    """Make a GPU the current one, which is where torch's sharding puts parameters; nothing on the CPU.

    Raises ConfigError where this torch cannot use the GPUs that it sees.
    """
    if device.type == "cuda":
        with cuda_explained():
            torch.cuda.set_device(device)


@contextlib.contextmanager
def cuda_explained() -> Iterator[None]:
    """Around what initialises CUDA. GPUs are counted without that, so that here is where an unfit driver shows.

    Errors of a device once CUDA is there (its memory is full, it is broken) pass as they are.

    Raises ConfigError: torch's reason and the ways out, in one line.
    """
    try:
        yield
    except RuntimeError as error:
        if torch.cuda.is_initialized() or torch.cuda._is_in_bad_fork():
            raise
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")
        raise ConfigError(
            f"torch {torch.__version__} sees {torch.cuda.device_count()} GPU(s) and cannot use them: {reason}; update "
            "the driver, start its fabric manager (error 802), install a torch for an older CUDA, or take --device cpu"
        ) from error


def stop() -> None:
    """End the backend of this process, after the last collective; nothing where none was started.

    While an error is on its way (in a `finally`) nothing happens: with a collective under way, destroying a process
    group can wait for peers that may never come.
    """
    if sys.exception() is not None:
        return
    destroy_groups()
    while _ends:
        _ends.pop()()
    while _set_by_us:
        os.environ.pop(_set_by_us.pop(), None)


def _set_default(name: str, value: str) -> None:
    if name not in os.environ:
        os.environ[name] = value
        _set_by_us.append(name)
