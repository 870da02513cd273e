"""Measure this machine: in each process of a launch what its device does, together with all others; then one answer."""

import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

import psutil
import torch
import torch.distributed as dist

from allranks.cluster import Device, Link
from allranks.errors import ProcessError
from allranks.process_environment import num_cores
from allranks.profiling.collective_times import Gather, Scatter, collective_cases, open_groups
from allranks.profiling.compute_rates import compute_cases
from allranks.profiling.rounds import CROWDED_SECONDS, SAMPLE_SECONDS, Pace, take_rounds

ROUNDS, QUICK_ROUNDS = 9, 3
BUDGET_SECONDS, QUICK_BUDGET_SECONDS = 45.0, 8.0
"""Of the computations, and again of the collectives: after it no further case and no further round begins."""

MOST_SECONDS, QUICK_MOST_SECONDS = 1.0, 0.5
DIGITS = 6
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")

# How much of the whole tensor a device of k sends in each, at least (nccl-tests, doc/PERFORMANCE.md).
SENT: Mapping[str, Callable[[int], float]] = {
    "all_reduce": lambda k: 2 * (k - 1) / k,
    "all_gather": lambda k: (k - 1) / k,
    "reduce_scatter": lambda k: (k - 1) / k,
    "all_to_all": lambda k: (k - 1) / k,
    "send": lambda k: 1.0,
}


@final
@dataclass(frozen=True, slots=True)
class Figures:
    """What one process found.

    Attributes:
        seconds: key of a case -> seconds: the median of all rounds, or the least (`_pace`).
        memory_bytes: of its device; infinite on the CPU, where no process has memory of its own.
        num_threads: that it computed with.
        context_bytes: memory of the process before it measured anything; 0 where the device has a memory of its own.
        num_left_out: cases that took too long, or that the time did not reach.
    """

    seconds: Mapping[Hashable, float]
    memory_bytes: float
    num_threads: int
    num_left_out: int = 0
    context_bytes: float = 0.0


def measure(
    device: torch.device, rank: int, world_size: int, *, quick: bool, gather: Gather, scatter: Scatter
) -> Figures:
    """This process's figures; collective over a world whose backend runs, or alone.

    Args:
        gather, scatter: how tensors are gathered and reduce-scattered here, because gloo's own ways are not taken.
    """
    rounds = QUICK_ROUNDS if quick else ROUNDS
    context = 0.0 if device.type == "cuda" else float(psutil.Process().memory_info().rss)
    pace = _pace(device, world_size, quick=quick)
    cases = list(compute_cases(device, quick=quick))
    crowded = device.type == "cpu" and world_size > num_cores()
    alone = replace(pace, sample_seconds=CROWDED_SECONDS if crowded else SAMPLE_SECONDS)
    share = 1.0
    if device.type == "cpu" and torch.get_num_threads() == 1:  # of several some wait, which is their time as well
        alone, share = replace(alone, processor_time=True, figure=min), min(1.0, num_cores() / world_size)
        # Who waits for another leaves its core to it: what all compute is what all take.
        pace = replace(pace, processor_time=True, figure=min) if crowded else pace
    seconds, num_cases = take_rounds(cases, rounds, alone), len(cases)
    seconds = {key: time / share for key, time in seconds.items()}
    if world_size > 1:
        groups = open_groups(world_size, rank)
        cases = list(collective_cases(groups, device, quick=quick, gather=gather, scatter=scatter))
        told = {key: time / share for key, time in take_rounds(cases, rounds, pace).items()}
        seconds, num_cases = seconds | told, num_cases + len(cases)
    return Figures(seconds, _memory_bytes(device), torch.get_num_threads(), num_cases - len(seconds), context)


def to_device(found: Sequence[Figures], like: Device) -> Device:
    """`like` with what was measured: of all processes the median, because all of them computed at once.

    A peak is `like`'s where it has one, and never below what was measured.
    """
    seconds = {key: statistics.median(one.seconds[key] for one in found) for key in found[0].seconds}
    shapes: dict[str, list[tuple[int, int, int, float]]] = {}
    for key, time in seconds.items():
        match key:
            case ("matmul", str(precision), int(rows), int(inner), int(columns)):
                rate = tidy(2 * rows * inner * columns / time)
                shapes.setdefault(precision, []).append((rows, inner, columns, rate))
    contexts = [one.context_bytes for one in found]
    if not shapes:
        raise ProcessError(f"this machine is too busy to be measured: no product ended in {MOST_SECONDS:.0f} s")
    best = {precision: max(rate for *_, rate in rows) for precision, rows in shapes.items()}
    return replace(
        like,
        memory_bytes=min(like.memory_bytes, *(one.memory_bytes for one in found)),
        memory_bandwidth=tidy(2 * _amount("copy", seconds)),
        peak_flops={
            **like.peak_flops,
            **{name: max(rate, like.peak_flops.get(name, 0)) for name, rate in best.items()},
        },
        matmul_flops=best,
        measured=True,
        matmul_shapes={precision: tuple(rows) for precision, rows in shapes.items()},
        kernel_seconds=tidy(seconds[("kernel",)]),
        update_rate=tidy(_amount("update", seconds)),
        pass_rates=_pass_rates(seconds),
        context_bytes=tidy(statistics.median(contexts)) if all(contexts) else None,
    )


def to_link(found: Sequence[Figures], like: Link) -> Link:
    """`like` with the measured times, of the slowest process each; its bandwidth and latency are the best of them."""
    measured: dict[str, dict[int, list[tuple[float, float]]]] = {}
    bandwidth, latency = 0.0, float("inf")
    for key in found[0].seconds:
        match key:
            case (str(collective), int(size), int(num_bytes)) if collective in COLLECTIVES:
                time = tidy(max(one.seconds[key] for one in found))
                measured.setdefault(collective, {}).setdefault(size, []).append((float(num_bytes), time))
                if collective in SENT:
                    bandwidth = max(bandwidth, SENT[collective](size) * num_bytes / time)
                if collective == "all_reduce":
                    latency = min(latency, time / (2 * (size - 1)))  # the steps of a ring
    if not measured:
        return like
    tables = {name: {size: tuple(sorted(rows)) for size, rows in sizes.items()} for name, sizes in measured.items()}
    return replace(like, bandwidth=tidy(bandwidth), latency_seconds=tidy(latency), measured=tables)


def host_bandwidth(found: Sequence[Figures]) -> float | None:
    """Bytes/s from the host to a device, all at once; None where the device is the host."""
    on_gpu = any(isinstance(key, tuple) and key[0] == "host" for key in found[0].seconds)
    return tidy(statistics.median(_amount("host", one.seconds) for one in found)) if on_gpu else None


def tidy(value: float) -> float:
    """Six digits: what is behind them is noise, and a person reads the file."""
    return float(f"{value:.{DIGITS}g}")


def _amount(name: str, seconds: Mapping[Hashable, float]) -> float:
    """What the case (name, amount) did per second; it is needed, so that it is there."""
    ((amount, time),) = [(key[1], time) for key, time in seconds.items() if isinstance(key, tuple) and key[0] == name]
    assert isinstance(amount, int)
    return amount / time


def _pass_rates(seconds: Mapping[Hashable, float]) -> tuple[tuple[float, float], ...]:
    """Of the cases ("pass", bytes): the bytes, and bytes/s read and written."""
    found = []
    for key, time in seconds.items():
        match key:
            case ("pass", int(num_bytes)):
                found.append((float(num_bytes), tidy(2 * num_bytes / time)))
    return tuple(sorted(found))


def _pace(device: torch.device, world_size: int, *, quick: bool) -> Pace:
    def barrier() -> None:
        if world_size > 1:
            dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def agree(numbers: Sequence[float]) -> list[float]:
        if world_size == 1:
            return list(numbers)
        together = torch.tensor(numbers, dtype=torch.float64, device=device)
        dist.all_reduce(together, dist.ReduceOp.MAX)
        return [float(number) for number in together.tolist()]

    # What else runs on a processor takes whole turns of it, which are nobody's figure where each process has a core.
    undisturbed = device.type == "cpu" and world_size <= num_cores()
    return Pace(
        barrier,
        finish,
        agree,
        budget_seconds=QUICK_BUDGET_SECONDS if quick else BUDGET_SECONDS,
        most_seconds=QUICK_MOST_SECONDS if quick else MOST_SECONDS,
        figure=min if undisturbed else statistics.median,
    )


def _memory_bytes(device: torch.device) -> float:
    return float(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else float("inf")
