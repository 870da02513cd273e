"""Losses over all samples of a step: the same on any number of ranks, whatever the layout (law 4, coupled)."""

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import default_collate

from allranks.errors import LayoutError, TaskError
from allranks.task import Task
from allranks.training.validate import validate
from allranks.verifying.parity import RecordedStep, compare, fed, record_run
from allranks.verifying.reference import ReferenceStep, plain_loop
from tests.distributed.pool import Pools
from tests.distributed.sessions import config_of, initial_model, processes_of, session_of, step_through
from tests.distributed.tasks import Points

pytestmark = pytest.mark.distributed

STEPS = 2
SGD = ("optimizer.name=sgd", "optimizer.lr=0.05", "optimizer.momentum=0.9", "train.max_norm=0.5")


class Pairs(Task):
    """Two views of each point; each is to find its other among those of all points (InfoNCE, arXiv 1807.03748)."""

    coupled: ClassVar[bool] = True
    gathers: bool = True

    def dataset(self, split: str) -> Any:
        return Points()

    def model(self) -> nn.Module | dict[str, nn.Module]:
        return nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 8))

    def targets(self, batch: Any) -> int:
        return len(batch["x"])

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        return self.both_ways(output[:, :4], output[:, 4:])

    def metrics(self, output: Any, batch: Any) -> Any:
        everyone = self.world.gather(output[:, 4:])
        found = (output[:, :4] @ everyone.T).argmax(dim=1) == self.places(output)
        return {"found": (found.sum(), len(found))}

    def both_ways(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        places = self.places(first)
        there = first @ (self.world.gather(second) if self.gathers else second).T
        back = second @ (self.world.gather(first) if self.gathers else first).T
        losses = [functional.cross_entropy(found, places, reduction="sum") for found in (there, back)]
        return losses[0] + losses[1]

    def places(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.arange(len(rows)) + (self.world.offset(rows) if self.gathers else 0)


class Steps(Pairs):
    """The same, as a step of its own with two forwards."""

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        raise AssertionError

    def step(self, models: Any, batch: Any) -> Iterator[tuple[str, torch.Tensor, int]]:
        first, second = models(batch["x"])[:, :4], models(batch["x"])[:, 4:]
        yield "", self.both_ways(first, second), len(first)


CASES = [
    (Pairs, "single", 1, 7, 1),
    (Pairs, "ddp", 2, 7, 1),
    (Pairs, "ddp", 3, 5, 3),  # some rank has no sample in a micro-step
    (Pairs, "fsdp", 3, 5, 3),
    (Pairs, "fsdp,sharding=grad_op", 2, 7, 1),
    (Pairs, "dp_replicate=2,dp_shard=2", 4, 7, 3),
    (Pairs, "dp_shard=2,sharding=optimizer", 2, 7, 1),
    (Pairs, "tp=2,dp_replicate=2", 4, 7, 1),
    (Pairs, "pp=2,dp_replicate=2", 4, 8, 2),
    (Steps, "single", 1, 7, 3),
    (Steps, "ddp", 3, 5, 3),
    (Steps, "fsdp", 2, 7, 1),
]


def record(kind: type[Pairs], layout: str, global_batch: int, micro_steps: int) -> list[RecordedStep]:
    cut = f"train.global_batch={global_batch}", f"train.micro_steps={micro_steps}"
    config = config_of(layout, *cut, *SGD, steps=STEPS)
    return record_run(kind(), config, processes_of(config), STEPS)


def plain(ranks: list[list[RecordedStep]], data_ranks: list[int], micro_steps: int) -> list[ReferenceStep]:
    """One device: each micro-step's samples compared with each other."""
    task = Pairs()
    dataset, batches = task.dataset("train"), []
    for step in range(STEPS):
        batch = default_collate([dataset[sample] for sample in fed(ranks, step, data_ranks).values()])
        batches.append((batch["x"].double(), len(batch["x"])))

    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([task.loss(model(part), {}) for part in x.tensor_split(micro_steps)]).sum()

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)

    model = initial_model(task).double()
    return plain_loop(model, make, batches, forward, max_norm=0.5)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("kind", "layout", "world_size", "global_batch", "micro_steps"),
    CASES,
    ids=[f"{kind.__name__}-{layout}x{size}-{batch}in{parts}" for kind, layout, size, batch, parts in CASES],
)
def test_every_sample_is_compared_with_those_of_all_ranks(
    pool: Pools, kind: type[Pairs], layout: str, world_size: int, global_batch: int, micro_steps: int
) -> None:
    ranks = pool(world_size).run(record, kind, layout, global_batch, micro_steps)
    data_ranks = {"tp=2,dp_replicate=2": [0, 2], "pp=2,dp_replicate=2": [0, 1]}.get(layout, list(range(world_size)))
    differences = compare(ranks, plain(ranks, data_ranks, micro_steps))
    assert not differences, "; ".join(map(str, differences[:5]))


def validated(layout: str, micro_steps: int) -> dict[str, float]:
    config = config_of(layout, "train.global_batch=8", f"train.micro_steps={micro_steps}", *SGD)
    return validate(session_of(Pairs(), config))


def test_evaluation_compares_them_too(pool: Pools) -> None:
    """Loss and metric see the same samples together on any number of ranks; 61 samples leave a rank without one."""
    for micro_steps in (1, 2):
        ((alone),) = pool(1).run(validated, "single", micro_steps)
        for layout, world_size in (("ddp", 3), ("fsdp", 2)):
            for found in pool(world_size).run(validated, layout, micro_steps):
                assert found == pytest.approx(alone, rel=1e-12)


def refused(kind: type[Pairs], layout: str, gathers: bool) -> str:
    session = session_of
    try:
        list(step_through(session(kind(gathers=gathers), config_of(layout, "train.global_batch=8", *SGD)), 1))
    except (LayoutError, TaskError) as error:
        return str(error)
    return ""


def test_a_coupled_loss_that_gathers_nothing_is_refused(pool: Pools) -> None:
    (message, _) = pool(2).run(refused, Pairs, "ddp", False)
    assert "each of 2 data-parallel ranks would couple its own only: take the rows of all ranks by self" in message
    (message, _) = pool(2).run(refused, Steps, "ddp", False)
    assert message.startswith("Steps.step: coupled = True, but nothing is gathered")
    assert pool(1).run(refused, Pairs, "single", False) == [""]


class Unsaid(Pairs):
    """Gathers without saying that it couples."""

    coupled: ClassVar[bool] = False


def test_a_loss_that_gathers_has_to_say_that_it_couples(pool: Pools) -> None:
    (message, _) = pool(2).run(refused, Unsaid, "ddp", True)
    assert "self.world.gather(rows) and say coupled = True, or use --nproc 1" in message
