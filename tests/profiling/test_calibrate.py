"""From what the processes measured to a device and a link, and the measuring itself on two real processes."""

import statistics
from collections.abc import Hashable, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from allranks.cluster import Device, Link
from allranks.errors import ProcessError
from allranks.parallel.gloo_ops import exchange_and_sum, gather_by_broadcasts
from allranks.profiling import calibrate, compute_rates
from allranks.profiling.calibrate import Figures, host_bandwidth, measure, tidy, to_device, to_link
from allranks.profiling.rounds import CROWDED_SECONDS, SAMPLE_SECONDS, Case, Pace
from tests.distributed.pool import Pools

LIKE = Device("cpu", "a processor", 16e9, 1.0, {})
LINK = Link("loopback", 1e9, 50e-6)
SECONDS: Mapping[Hashable, float] = {
    ("kernel",): 5e-6,
    ("copy", 1000): 1e-6,
    ("update", 4000): 2e-6,
    ("pass", 8000): 4e-6,
    ("pass", 1000): 1e-6,
    ("matmul", "float32", 10, 20, 30): 12e-9,
    ("matmul", "float32", 10, 20, 60): 12e-9,
    ("matmul", "bfloat16", 10, 20, 30): 6e-9,
}
COLLECTIVES: Mapping[Hashable, float] = {
    ("all_reduce", 4, 8000): 6e-6,
    ("all_reduce", 4, 4000): 3e-6,
    ("all_gather", 4, 8000): 8e-6,
    ("broadcast", 4, 8000): 1e-6,
    ("send", 2, 8000): 4e-6,
}


def figures(seconds: Mapping[Hashable, float], factor: float = 1.0, memory: float = float("inf")) -> Figures:
    return Figures({key: value * factor for key, value in seconds.items()}, memory, 1)


def test_a_device_is_the_median_of_the_processes() -> None:
    device = to_device([figures(SECONDS, factor) for factor in (1.0, 2.0, 9.0)], LIKE)
    assert device.matmul_shapes["float32"] == ((10, 20, 30, 5e11), (10, 20, 60, 1e12))
    assert device.matmul_flops == device.peak_flops == {"float32": 1e12, "bfloat16": 1e12}
    assert device.memory_bandwidth == 2 * 1000 / 2e-6  # a copy reads and writes
    assert (device.kernel_seconds, device.update_rate) == (1e-5, 1e9)
    assert device.pass_rates == ((1000.0, 1e9), (8000.0, 2e9))
    assert (device.measured, device.memory_bytes) == (True, 16e9)


def test_a_peak_that_is_known_stays_unless_more_was_measured() -> None:
    known = Device("gpu", "a GPU", 80e9, 1.0, {"float32": 3e12, "bfloat16": 1e11, "float8": 9e12})
    device = to_device([figures(SECONDS, memory=79e9)], known)
    assert device.peak_flops == {"float32": 3e12, "bfloat16": 2e12, "float8": 9e12}
    assert device.memory_bytes == 79e9


def test_a_machine_too_busy_is_said() -> None:
    without: dict[Hashable, float] = {
        key: value for key, value in SECONDS.items() if isinstance(key, tuple) and key[0] != "matmul"
    }
    with pytest.raises(ProcessError, match="too busy to be measured: no product"):
        to_device([figures(without)], LIKE)


def test_a_link_is_its_slowest_process_and_its_best_collective() -> None:
    link = to_link([figures(COLLECTIVES, factor) for factor in (1.0, 0.5)], LINK)
    assert link.measured["all_reduce"] == {4: ((4000.0, 3e-6), (8000.0, 6e-6))}
    assert link.measured["broadcast"] == {4: ((8000.0, 1e-6),)}
    assert link.bandwidth == 2e9  # both all_reduce (6/4 of the bytes) and send have it; a broadcast is not counted
    assert link.latency_seconds == 3e-6 / 6  # an all_reduce of four has six steps


def test_a_process_alone_has_no_link() -> None:
    assert to_link([figures(SECONDS)], LINK) is LINK


def test_the_host_is_far_only_from_a_gpu() -> None:
    assert host_bandwidth([figures(SECONDS)]) is None
    assert host_bandwidth([figures({("host", 1000): seconds}) for seconds in (1e-6, 2e-6, 9e-6)]) == 5e8


def test_six_digits() -> None:
    assert (tidy(123456789.0), tidy(1 / 3)) == (123457000.0, 0.333333)


def _measure() -> tuple[list[Any], int, int]:
    """In a worker: the keys that a quick measure has, with tiny shapes."""

    def scatter(part: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup) -> None:
        exchange_and_sum(part, whole, group, average=False)

    def gather(whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> None:
        gather_by_broadcasts(whole, part, group).wait()

    cpu, rank, size = torch.device("cpu"), dist.get_rank(), dist.get_world_size()
    with (
        patch.object(compute_rates, "CPU_QUICK_SHAPES", ((8, 8, 8),)),
        patch.object(compute_rates, "MEBI", 1024),
        patch.multiple(calibrate, QUICK_MOST_SECONDS=60.0, QUICK_BUDGET_SECONDS=600.0, QUICK_ROUNDS=1),
    ):
        found = measure(cpu, rank, size, quick=True, gather=gather, scatter=scatter)
    assert all(seconds > 0 for seconds in found.seconds.values())
    return list(found.seconds), found.num_left_out, found.num_threads


@pytest.mark.parametrize(
    ("cores", "threads", "sample", "figure"),
    [
        (1, 2, CROWDED_SECONDS, statistics.median), (2, 2, SAMPLE_SECONDS, min),
        (1, 1, CROWDED_SECONDS, statistics.median),
    ],
)  # fmt: skip
def test_processes_that_share_a_core_are_timed_over_several_of_their_turns(
    cores: int, threads: int, sample: float, figure: object
) -> None:
    """Or, with one thread, by what each computed: a share of a core takes the longer the smaller it is."""
    samples: list[float] = []
    figures: list[object] = []
    clocks: list[bool] = []

    def note(cases: Sequence[Case], rounds: int, pace: Pace) -> dict[Hashable, float]:
        samples.append(pace.sample_seconds)
        figures.append(pace.figure)
        clocks.append(pace.processor_time)
        return {("kernel",): 1.0} if len(samples) == 1 else {("all_reduce", 2, 4): 1.0}

    def nothing(*_: object) -> None: ...

    with (
        patch.object(calibrate, "num_cores", lambda: cores),
        patch.object(torch, "get_num_threads", lambda: threads),
        patch.object(calibrate, "take_rounds", note),
        patch.object(calibrate, "open_groups", lambda *_: {}),
        patch.object(calibrate, "collective_cases", lambda *_, **__: []),
        patch.object(calibrate, "compute_cases", lambda *_, **__: []),
    ):
        found = measure(torch.device("cpu"), 0, 2, quick=True, gather=nothing, scatter=nothing)
    shared = (cores, threads) == (1, 1)
    assert samples == [sample, SAMPLE_SECONDS] and clocks == [threads == 1, shared]
    assert figures == [min if threads == 1 else figure, min if shared else figure]
    assert found.seconds == dict.fromkeys([("kernel",), ("all_reduce", 2, 4)], 2.0 if shared else 1.0)
    assert found.context_bytes > 5e7


@pytest.mark.distributed
def test_two_processes_measure_the_same_cases(pool: Pools) -> None:
    one, two = pool(2).run(_measure)
    assert one == two
    keys, num_left_out, num_threads = one
    assert (num_left_out, num_threads, len(keys)) == (0, 1, 3 + 2 + 2 + 3 * 6)
    device = to_device([Figures(dict.fromkeys(keys, 1e-3), float("inf"), 1)], LIKE)
    link = to_link([Figures(dict.fromkeys(keys, 1e-3), float("inf"), 1)], LINK)
    assert set(device.matmul_flops) == {"float32", "bfloat16"}
    assert set(link.measured) == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"}
