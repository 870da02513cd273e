"""Pipelines whose stages begin unlike one another: training computes what one device does, and a dry run is that."""

from functools import partial

import pytest
import torch
from torch.utils.data import default_collate

from allranks.task import Task
from allranks.verifying.parity import RecordedStep, compare, fed, record_run
from allranks.verifying.reference import plain_loop
from tests.distributed.pool import Pools
from tests.distributed.sessions import SGD, config_of, initial_model, processes_of
from tests.distributed.test_rehearsal_laws import ACCUMULATED, BFLOAT16, dynamo
from tests.distributed.test_rehearsal_laws import compare as compare_dry_run
from tests.rehearsing.unlike import Hourglass, Pyramid, Translation

__all__ = ["dynamo"]

STEPS = 3
SMALL: dict[type[Task], Task] = {
    Pyramid: Pyramid(channels=2, side=16),
    Translation: Translation(vocab=11, hidden=8, source=6, target=4),
    Hourglass: Hourglass(width=4, length=8),
}


def record(task: Task, layout: str) -> list[RecordedStep]:
    """In a worker: the steps."""
    cut = "train.global_batch=4", "train.micro_steps=4"
    config = config_of(layout, *cut, *SGD, "optimizer.weight_decay=0.01", steps=STEPS)
    return record_run(task, config, processes_of(config), STEPS)


def check_training(pool: Pools, kind: type[Task], layout: str, world: int) -> None:
    """Losses, gradients and parameters of a few steps, in float64."""
    task = SMALL[kind]
    ranks = pool(world).run(record, task, layout)
    samples, batches = task.dataset("train"), []
    for step in range(STEPS):
        batch = default_collate([samples[sample] for sample in fed(ranks, step, [0]).values()])
        batches.append((batch, int(batch["y"].numel())))
    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)

    def loss(model: torch.nn.Module, batch: object) -> torch.Tensor:
        def wide(leaf: torch.Tensor) -> torch.Tensor:
            return leaf.double() if leaf.is_floating_point() else leaf

        given = task.inputs(batch)
        if isinstance(given, dict):
            return task.loss(model(**{name: wide(leaf) for name, leaf in given.items()}), batch)
        return task.loss(model(*map(wide, given)), batch)

    assert not compare(ranks, plain_loop(initial_model(task).double(), optimizer, batches, loss))


@pytest.mark.parametrize("kind", [Pyramid, Translation, Hourglass])
def test_training_is_that_of_one_device(pool: Pools, kind: type[Task]) -> None:
    check_training(pool, kind, "pp=4", 4)


@pytest.mark.full
@pytest.mark.parametrize("kind", [Pyramid, Translation, Hourglass])
@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "looped_bfs", "interleaved_zb", "zbv", "dualpipev"])
def test_training_is_that_of_one_device_under_every_schedule(pool: Pools, kind: type[Task], schedule: str) -> None:
    check_training(pool, kind, f"pp=2,schedule={schedule}", 2)


@pytest.mark.full
@pytest.mark.parametrize("kind", [Translation])
def test_a_dry_run_is_the_real_step(pool: Pools, kind: type[Task]) -> None:
    compare_dry_run(pool, kind, "pp=4", 4, ACCUMULATED, {})


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "layout", "world", "words"),
    [
        (Hourglass, "pp=4", 4, ()),
        (Translation, "pp=4", 4, BFLOAT16),
        (Translation, "pp=2,schedule=interleaved", 2, ()),
    ],
)
def test_a_dry_run_is_the_real_step_under_every_layout(
    pool: Pools, kind: type[Task], layout: str, world: int, words: tuple[str, ...]
) -> None:
    compare_dry_run(pool, kind, layout, world, (*ACCUMULATED, *words), {})
