"""The time of every collective by size, in groups of neighbouring ranks that all communicate at once."""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from allranks.profiling.rounds import Case

Gather = Callable[[torch.Tensor, torch.Tensor, dist.ProcessGroup], None]
"""(whole, part, group): fill `whole` with every rank's `part`."""

Scatter = Callable[[torch.Tensor, torch.Tensor, dist.ProcessGroup], None]
"""(part, whole, group): fill `part` with this rank's part of the sum of every rank's `whole`."""

KIBI = 1024
CPU_BYTES = tuple(4**power * KIBI for power in range(8))  # 1 KiB to 16 MiB
GPU_BYTES = tuple(4**power * KIBI for power in range(10))  # 1 KiB to 256 MiB
QUICK_BYTES = (16 * KIBI, 256 * KIBI, 4096 * KIBI)


def group_sizes(world_size: int) -> list[int]:
    """The sizes of groups that a layout of `world_size` processes can have: its divisors but 1."""
    return [size for size in range(2, world_size + 1) if world_size % size == 0]


def open_groups(world_size: int, rank: int) -> dict[int, dist.ProcessGroup]:
    """Size -> this rank's group of so many neighbours; collective over the world."""
    mine = {}
    for size in group_sizes(world_size):
        for first in range(0, world_size, size):
            group = dist.new_group(list(range(first, first + size)))
            if first <= rank < first + size:
                mine[size] = group
    return mine


def collective_cases(
    groups: dict[int, dist.ProcessGroup], device: torch.device, *, quick: bool, gather: Gather, scatter: Scatter
) -> Iterator[Case]:
    """The cases of all groups, with keys (collective, group size, bytes of the whole tensor).

    "send" is from the first rank of a group to the second, in the smallest groups.
    """
    sizes = QUICK_BYTES if quick else GPU_BYTES if device.type == "cuda" else CPU_BYTES
    # Zeros, which stay zeros however often they are summed.
    whole = torch.zeros(max(sizes) // 4, device=device)
    other = torch.zeros_like(whole)
    for size, group in groups.items():
        for num_bytes in sizes:
            length = num_bytes // 4 // size * size
            here, there = whole[:length], other[:length]
            calls = _calls(here, there, here[: length // size], group, gather, scatter)
            if size == min(groups):
                calls["send"] = _send(here, group)
            for collective, call in calls.items():
                yield Case((collective, size, length * 4), call)


def _calls(
    whole: torch.Tensor,
    other: torch.Tensor,
    part: torch.Tensor,
    group: dist.ProcessGroup,
    gather: Gather,
    scatter: Scatter,
) -> dict[str, Callable[[], object]]:
    """`part` belongs to none of the tensors that a call reads and writes at once."""
    return {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: gather(other, part, group),
        "reduce_scatter": lambda: scatter(part, other, group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
        "broadcast": lambda: dist.broadcast(whole, group=group, group_src=0),
    }


def _send(tensor: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], object]:
    rank = dist.get_rank(group)
    if rank == 0:
        return lambda: dist.send(tensor, group=group, group_dst=1)
    if rank == 1:
        return lambda: dist.recv(tensor, group=group, group_src=0)
    return lambda: None
