"""Placement by rules, and what goes with it, computes what one device computes; runs of it, from start to export."""

from typing import Any

import pytest
import torch
from torch import nn

from allranks.task import Task
from allranks.verifying.parity import compare, record_run
from tests.distributed.matrix_models import task_of
from tests.distributed.pool import Pools
from tests.distributed.sessions import SGD, config_of, parts_of, processes_of, session_of, step_through, together
from tests.distributed.test_matrix import Case, reference

pytestmark = pytest.mark.distributed

RULES = {
    "transformer": '{"layers.0" = "cpu:2", "layers.1.attention*" = "cpu:1", "norm" = "cpu:3"}',
    "tied": '{"blocks.1" = "cpu:1", "*.norm" = "cpu:1"}',
    "scalars": '{"blocks.*.linear" = "cpu:1", "blocks.*.gain" = "cpu:2"}',
    "batchnorm": '{"blocks.[0-2]" = "cpu:1", "blocks.3.signal.1" = "cpu:2", "head.weight" = "cpu:3"}',
    "moe": '{"layers.1*" = "cpu:1"}',
    "counted": '{"blocks.2" = "cpu:1", "blocks.1.calls" = "cpu:1"}',
}


def record(kind: str, layout: str, rules: str, batch: int, micro_steps: int) -> Any:
    """In a worker: two steps."""
    cut = (f"train.global_batch={batch}", f"train.micro_steps={micro_steps}", "train.max_norm=0.05")
    config = config_of(layout, *cut, f"layout.placement={rules}", *SGD, "optimizer.weight_decay=0.01", steps=3)
    return record_run(task_of(kind), config, processes_of(config), 3)


PLAIN = [(kind, layout, size) for kind in RULES for layout, size in (("placement", 1), ("ddp", 2))]
RECOMPUTED = [(kind, "ddp,recompute=full", 2) for kind in ("transformer", "tied", "scalars")]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("kind", "layout", "world_size"), PLAIN + RECOMPUTED)
def test_equal_to_one_device(pool: Pools, kind: str, layout: str, world_size: int) -> None:
    ranks = pool(world_size).run(record, kind, layout, RULES[kind], 13, 3, timeout=120)
    case = Case("placementx1" if world_size == 1 else "placement-ddpx2", kind, 13, 3, 0.05, "sgd")
    differences = compare(ranks, reference(case, ranks))
    assert not differences, "; ".join(map(str, differences[:5]))


class Pair(Task):
    """Two models, of which each step trains one through the other."""

    def model(self) -> Any:
        return {"one": nn.Linear(5, 5), "two": nn.Linear(5, 1)}

    def dataset(self, split: str) -> Any:
        return [{"x": torch.full((5,), float(index))} for index in range(12)]

    def step(self, models: Any, batch: Any) -> Any:
        yield "one", models["two"](torch.tanh(models["one"](batch["x"]))).sum(), len(batch["x"])
        yield "two", models["two"](torch.tanh(models["one"](batch["x"]).detach())).square().sum(), len(batch["x"])


def train_pair(layout: str, rules: str) -> Any:
    given = () if not rules else (f"layout.placement={rules}",)
    session = session_of(Pair(), config_of(layout, "train.global_batch=4", *SGD, *given))
    list(step_through(session, 3))
    return parts_of(session)


def test_a_step_of_its_own_is_placed_too(pool: Pools) -> None:
    alone = together(pool(1).run(train_pair, "single", ""))
    for layout, size in (("placement", 1), ("ddp", 2)):
        found = together(pool(size).run(train_pair, layout, '{"one" = "cpu:1"}'))
        assert all(torch.allclose(found[name], value, rtol=1e-12) for name, value in alone.items())
