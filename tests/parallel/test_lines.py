"""Groups of their own for units of unequal size, and one that spans the copies too."""

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from allranks.parallel.lines import SPARE, open_lines
from tests.distributed.pool import Pools

pytestmark = pytest.mark.distributed


def opened(shape: tuple[int, ...], times: int) -> tuple[list[list[int]], list[int], int, bool]:
    """In a worker: the ranks of each unit's line, of the spare one, how many lines there are, and whether all stay."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("copies", "shards")[-len(shape) :])
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 8))
    for layer in module:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    first = open_lines(module, mesh)
    again = [open_lines(module, mesh) for _ in range(times)]
    units = [id(layer._get_fsdp_state()) for layer in module]  # type: ignore[operator]
    ranks = [dist.get_process_group_ranks(first[unit]) for unit in units if unit in first]
    stay = all(lines[key] is first[key] for lines in again for key in first)
    return ranks, dist.get_process_group_ranks(first[SPARE]), len({id(line) for line in first.values()}), stay


def test_units_of_one_size_share_a_line_and_the_spare_one_is_for_nothing_else(pool: Pools) -> None:
    for ranks, spare, count, stay in pool(2).run(opened, (2,), 2):
        assert (ranks, spare, count, stay) == ([[0, 1]] * 3, [0, 1], 3, True)


def test_with_copies_the_spare_line_spans_them_all(pool: Pools) -> None:
    for rank, (ranks, spare, count, stay) in enumerate(pool(4).run(opened, (2, 2), 1)):
        own = [0, 1] if rank < 2 else [2, 3]
        assert (ranks, spare, count, stay) == ([own] * 3, [0, 1, 2, 3], 3, True)


def test_copies_of_whole_parts_have_the_spare_line_alone(pool: Pools) -> None:
    for ranks, spare, count, _ in pool(2).run(opened, (2, 1), 0):
        assert (ranks, spare, count) == ([], [0, 1], 1)
