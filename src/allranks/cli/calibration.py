"""What `allranks doctor --calibrate` runs in its processes, and the Cluster that comes of it."""

import faulthandler
import os
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, final

from allranks.cluster import Cluster, Device
from allranks.errors import ConfigError

if TYPE_CHECKING:
    from allranks.parallel.backend import DeviceChoice
    from allranks.process_environment import ProcessEnvironment
    from allranks.profiling.calibrate import Figures

LIMIT_SECONDS, QUICK_LIMIT_SECONDS = 300.0, 120.0
"""After which a process that still measures ends itself, with where it stood on standard error."""

MOST_PROCESSES = 64
NO_GPU = "--device cuda, but torch sees no CUDA device; take --device cpu, or see what nvidia-smi says"


@final
@dataclass(frozen=True, slots=True)
class Start:
    """What is measured, as it stands before anything starts: "cuda" or "cpu", and the Cluster but for its figures."""

    device: str
    nproc: int
    cluster: Cluster
    path: Path


def choose_start(requested: str, nproc: int | None, output: Path | None) -> Start:
    """What `--device` and `--nproc` mean on this machine.

    Args:
        nproc: None: one process a GPU, or one a core where there is none.
        output: None: where `find_cluster` looks for it, in the user's configuration.

    Raises:
        ConfigError: no CUDA device, or more processes than GPUs; torch cannot use them; the devices differ.
    """
    import torch

    from allranks.parallel.backend import cuda_explained
    from allranks.planning.catalog import find_device, find_device_by_driver_name
    from allranks.planning.this_machine import calibrated_path, cpu_cluster, guess_link, look

    num_gpus = torch.cuda.device_count() if requested != "cpu" else 0
    if requested == "cuda" and num_gpus == 0:
        raise ConfigError(NO_GPU)
    if num_gpus and nproc is not None and nproc > num_gpus:
        raise ConfigError(f"--nproc {nproc}, but torch sees {num_gpus} GPUs and a figure of shared ones misleads")
    count = nproc or num_gpus or min(look().cores, MOST_PROCESSES)
    if count > MOST_PROCESSES:
        raise ConfigError(f"--nproc {count}: at most {MOST_PROCESSES} processes are measured on one machine")
    if not num_gpus:
        guess = cpu_cluster(1, count, None, name="local", calibrated=False)
        device = replace(guess.device, peak_flops={})
        return Start("cpu", count, replace(guess, device=device), output or calibrated_path("cpu", count))
    with cuda_explained():
        names = sorted({torch.cuda.get_device_name(index) for index in range(count)})
    if len(names) > 1:
        raise ConfigError(f"the devices differ ({', '.join(names)}); choose equal ones by CUDA_VISIBLE_DEVICES")
    known = find_device_by_driver_name(names[0])
    if known is not None:
        from allranks.planning.assembly import build_cluster

        cluster = build_cluster("local", 1, count, find_device(known), None)
    else:
        device = Device(names[0], names[0], float("inf"), 0.0, {})
        link = guess_link()
        cluster = Cluster("local", 1, count, device, link, link, count)
    cluster = replace(cluster, host_memory_bytes=look().memory_bytes)
    return Start("cuda", count, cluster, output or calibrated_path(known or names[0], count))


def cluster_words(begun: Start, output: Path | None) -> str:
    """What follows `--cluster` for it: "local" where that is so many devices of this kind."""
    from allranks.planning.this_machine import look

    if output is not None:
        return str(output)
    facts = look()
    if begun.device == "cuda":
        return "local" if begun.nproc == len(facts.devices) else str(begun.path)
    local = not facts.devices and not facts.unnamed and begun.nproc == facts.cores
    return "local" if local else f"{begun.nproc}:cpu"


def measure_here(device: str, quick: bool) -> "Figures":
    """One process of the launch: starts the backend, measures, stops; ended by force after the limit."""
    limit = QUICK_LIMIT_SECONDS if quick else LIMIT_SECONDS
    faulthandler.dump_traceback_later(limit, exit=True)
    try:
        return _measure(device, quick, limit)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _measure(device: str, quick: bool, limit: float) -> "Figures":
    from allranks.launching.environment import read_environment
    from allranks.parallel.backend import choose_device, start, stop

    environment = read_environment(os.environ)
    choice = choose_device(environment, device, "auto")
    choice = start(environment, choice, limit)
    try:
        return measure_in(environment, choice, quick=quick)
    finally:
        stop()


def measure_in(environment: "ProcessEnvironment", choice: "DeviceChoice", *, quick: bool) -> "Figures":
    """This process's figures, in a backend that runs; collective. On a processor with its small programs."""
    import torch
    import torch.distributed as dist

    from allranks.parallel.gloo_ops import exchange_and_sum, gather_by_broadcasts, is_gloo
    from allranks.profiling.calibrate import measure

    def gather(whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> None:
        if is_gloo(group, choice.device.type):
            gather_by_broadcasts(whole, part, group).wait()
        else:
            dist.all_gather_into_tensor(whole, part, group=group)

    def scatter(part: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup) -> None:
        if is_gloo(group, choice.device.type):
            exchange_and_sum(part, whole, group, average=False)
        else:
            dist.reduce_scatter_tensor(part, whole, group=group)

    rank, world = environment.rank, environment.world_size
    found = measure(choice.device, rank, world, quick=quick, gather=gather, scatter=scatter)
    if choice.device.type == "cuda":
        return found
    from allranks.benchmarking.small_programs import measure_programs

    measured = measure_programs(environment, choice, quick=quick)
    programs: dict[Hashable, float] = {program: seconds for program, seconds in measured.items()}
    return replace(found, seconds={**found.seconds, **programs})


def finish_cluster(begun: Start, found: "Sequence[Figures]", *, quick: bool) -> Cluster:
    """The Cluster of `begun` with the figures that the processes found."""
    import torch

    from allranks.profiling.calibrate import host_bandwidth, to_device, to_link

    today = date.today().isoformat()
    how = "allranks doctor --calibrate" + (" --quick" if quick else "")
    many = f"processes at once: {begun.nproc}, threads of each: {found[0].num_threads}"
    source = f"measured on {today} by {how}, torch {torch.__version__}, {many}"
    link = to_link(found, begun.cluster.inside)
    inside = replace(link, source=source) if link.measured else link
    notes = []
    if not link.measured:
        notes.append(f"link {link.name} is not measured, because one process has nobody to talk to")
    if left_out := max(one.num_left_out for one in found):
        notes.append(f"{left_out} measurements were left out, because they took too long or the time was up")
    cluster = replace(
        begun.cluster,
        name=begun.path.stem,
        device=replace(to_device(found, begun.cluster.device), source=source),
        inside=inside,
        between=inside if begun.device == "cpu" else begun.cluster.between,
        host_bandwidth=host_bandwidth(found) or begun.cluster.host_bandwidth,
        notes=tuple(notes),
    )
    return cluster if begun.device == "cuda" else _with_fixed(cluster, found)


def _with_fixed(cluster: Cluster, found: "Sequence[Figures]") -> Cluster:
    """With what the small programs took besides kernels and bytes."""
    from allranks.benchmarking.small_programs import Chain
    from allranks.planning.fixed_costs import programs, solve
    from allranks.stepping.profile import trace_task

    count = cluster.num_devices
    seconds = {
        program: max(one.seconds[program] for one in found)
        for program in programs(count)
        if all(program in one.seconds for one in found)
    }
    if not seconds:
        return cluster
    depths = {program.depth for program in seconds}
    profiles = {depth: trace_task(Chain(depth=depth, parts=count), "float32") for depth in depths}
    return replace(cluster, device=replace(cluster.device, fixed=solve(cluster, profiles, seconds)))
