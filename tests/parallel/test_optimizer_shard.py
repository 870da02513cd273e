"""Each rank updates its rows of every parameter, and keeps the optimizer's state for these alone."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from allranks.layout import Layout
from allranks.parallel import optimizer_shard
from tests.distributed.pool import Pools
from tests.distributed.tasks import MODELS
from tests.parallel.spreads import spread

pytestmark = pytest.mark.distributed

SHARDED = Layout(dp_shard=3, sharding="optimizer")


def rows_of(kind: str) -> list[tuple[str, tuple[int, ...], tuple[int, ...], bool]]:
    """In a worker: name, offset and shape of the rows, and whether they share the parameter's memory."""
    found = spread(MODELS[kind], SHARDED)
    rows = []
    for name, tensor in found.updatable().items():
        entry = found.updatable_entry(name)
        assert tuple(tensor.shape) == entry.box.shape
        whole = found.tensors[name]
        inside = whole.data_ptr() <= tensor.data_ptr() <= whole.data_ptr() + whole.nbytes
        rows.append((name, entry.box.offset, entry.box.shape, inside))
    return rows


def test_rows_share_the_parameters_memory_and_cover_it(pool: Pools) -> None:
    ranks = pool(3).run(rows_of, "scalars")
    whole = {name: p.shape for name, p in MODELS["scalars"]().named_parameters()}
    for name, shape in whole.items():
        parts = [next((offset, box) for other, offset, box, inside in rows if other == name) for rows in ranks]
        if not shape:
            assert parts == [((), ())] * 3
            continue
        assert sum(box[0] for _, box in parts) == shape[0]
        assert [offset[0] for offset, _ in parts] == [min(rank * -(-shape[0] // 3), shape[0]) for rank in range(3)]
    assert all(inside or 0 in box for rows in ranks for _, _, box, inside in rows)


def state_bytes(layout: Layout) -> int:
    """In a worker: what Adam keeps."""
    found = spread(lambda: nn.Sequential(nn.Linear(30, 31), nn.Linear(31, 3)), layout)
    optimizer = torch.optim.AdamW(list(found.updatable().values()))
    for parameter in found.updatable().values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return sum(value.nbytes for state in optimizer.state.values() for key, value in state.items() if key != "step")


def test_a_rank_keeps_its_share_of_the_state(pool: Pools) -> None:
    whole = pool(3).run(state_bytes, Layout(dp_replicate=3))[0]
    shares = pool(3).run(state_bytes, SHARDED)
    assert sum(shares) == whole and max(shares) < 0.36 * whole


def update(bucket_bytes: int) -> list[torch.Tensor]:
    """In a worker: parameters after rank r added r + 1 to its rows, where there was a gradient."""
    optimizer_shard.BUCKET_BYTES = bucket_bytes
    found = spread(MODELS["scalars"], SHARDED)
    rows, parameters = found.row_shards, list(found.trainable().values())
    assert rows is not None
    for index, parameter in enumerate(parameters):
        parameter.data.zero_()
        parameter.grad = None if index % 4 == 1 else torch.full_like(parameter, 2.0)
    rows.lend(parameters)
    with torch.no_grad():
        for row in found.updatable().values():
            if row.grad is not None and row.dim():
                row.add_(row.grad, alpha=dist.get_rank() + 1)
    rows.collect(parameters)
    assert all(tensor.grad is None for tensor in (*parameters, *found.updatable().values()))
    return [parameter.detach().clone() for parameter in parameters]


@pytest.mark.parametrize("bucket_bytes", [1, 500, 1 << 20])
def test_what_was_updated_is_whole_again(pool: Pools, bucket_bytes: int) -> None:
    for found in pool(3).run(update, bucket_bytes):
        for index, parameter in enumerate(found):
            extent = len(parameter) if parameter.dim() else 0
            rank_of_row: list[Any] = [min(row // -(-extent // 3), 2) for row in range(extent)]
            expected = [0.0 if index % 4 == 1 else 2.0 * (rank + 1) for rank in rank_of_row]
            assert [row.unique().tolist() for row in parameter] == [[value] for value in expected] if extent else True
