"""What the processes are asked to do together: every collective by size in every group, over real gloo."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from allranks.parallel.gloo_ops import exchange_and_sum, gather_by_broadcasts
from allranks.profiling.collective_times import QUICK_BYTES, collective_cases, group_sizes, open_groups
from tests.distributed.pool import Pools


@pytest.mark.parametrize(("world", "sizes"), [(1, []), (2, [2]), (4, [2, 4]), (6, [2, 3, 6])])
def test_the_groups_that_a_layout_can_have(world: int, sizes: list[int]) -> None:
    assert group_sizes(world) == sizes


def _every_case_once() -> tuple[list[Any], dict[int, list[int]]]:
    """In a worker: the keys of all cases, each called once, and the ranks of each group."""

    def scatter(part: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup) -> None:
        exchange_and_sum(part, whole, group, average=False)

    def gather(whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> None:
        gather_by_broadcasts(whole, part, group).wait()

    groups = open_groups(dist.get_world_size(), dist.get_rank())
    keys = []
    for case in collective_cases(groups, torch.device("cpu"), quick=True, gather=gather, scatter=scatter):
        case.call()
        keys.append(case.key)
    return keys, {size: dist.get_process_group_ranks(group) for size, group in groups.items()}


@pytest.mark.distributed
def test_every_collective_by_size_in_every_group(pool: Pools) -> None:
    found = pool(4).run(_every_case_once)
    assert [ranks for _, ranks in found] == [
        {2: [0, 1], 4: [0, 1, 2, 3]},
        {2: [0, 1], 4: [0, 1, 2, 3]},
        {2: [2, 3], 4: [0, 1, 2, 3]},
        {2: [2, 3], 4: [0, 1, 2, 3]},
    ]
    five = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
    expected = [(name, 2, size) for size in QUICK_BYTES for name in (*five, "send")]
    expected += [(name, 4, size) for size in QUICK_BYTES for name in five]
    assert [keys for keys, _ in found] == [expected] * 4
