"""Data that shards itself has no end of its own: behind it come fillers, which are no step."""

from collections.abc import Iterator
from pathlib import Path

import torch

import allranks
from tests.distributed.pool import Pools
from tests.training.own.cases import Net, Samples, count, loss_of


class Shard(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
    """Four samples on rank 0, six on rank 1."""

    order = "sharded"

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        import torch.distributed as dist

        return map(Samples().__getitem__, range(4 + 2 * dist.get_rank()))


def trained(run: str, leave_at: int | None = None) -> tuple[int, int, int, float]:
    """Step at which the loop began and at which it is, position, and the sum of the parameters."""
    with allranks.join(precision="float64", run=run) as world:
        torch.manual_seed(1)
        model = world.parallelize(Net())
        optimizer = world.optimizer(model, torch.optim.AdamW, lr=0.1, weight_decay=0.1)
        stream = world.stream(Shard(), global_batch=4)
        before = world.resume(model, optimizer, stream)
        for batch in stream:
            world.backward(loss_of(model, batch), targets=count(batch))
            world.step(optimizer)
            if stream.step == leave_at:
                break
        if leave_at is not None:
            assert not list(stream)
        return before, stream.step, stream.position, sum(float(p.detach().sum()) for p in model.parameters())


def test_a_finished_run_over_shards_is_not_done_again(pool: Pools, tmp_path: Path) -> None:
    first, again, other = (pool(2).run(trained, str(tmp_path / "run"))[1] for _ in range(3))
    assert first[:3] == (0, 3, 12)
    assert again == other == (3, *first[1:])


def test_a_loop_that_is_left_after_the_last_samples_has_nothing_more(pool: Pools, tmp_path: Path) -> None:
    assert [done[:3] for done in pool(2).run(trained, str(tmp_path / "run"), 3)] == [(0, 3, 12)] * 2
