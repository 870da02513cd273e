"""`world.run`: arguments and targets out of a batch, as for a Task."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import allranks
from allranks.errors import TaskError
from allranks.run import Run
from allranks.training.own.forward import check_targets
from tests.distributed.pool import Pools
from tests.training.own.cases import Net, Samples, count, loss_of, refusal, sgd


def test_run_is_forward_loss_and_backward(pool: Pools, tmp_path: Path) -> None:
    def case(folder: str, by_run: bool) -> list[float]:
        losses = []
        with allranks.join(precision="float64", run=folder) as world:
            torch.manual_seed(1)
            model = world.parallelize(Net())
            optimizer = world.optimizer(model, sgd)

            def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
                return nn.functional.cross_entropy(output.flatten(0, 1), batch["y"].flatten(), reduction="sum")

            for batch in world.stream(Samples(), global_batch=10, micro_batch=3):
                if by_run:
                    value = world.run(batch, loss)
                else:
                    value = loss_of(model, batch)
                    world.backward(value, targets=count(batch))
                losses.append(float(value.detach()))
                assert not by_run or not value.requires_grad
                world.step(optimizer)
        return losses

    found = [pool(2).run(case, str(tmp_path / str(by_run)), by_run) for by_run in (False, True)]
    assert found[0] == found[1]
    lines = [[step["loss"] for step in Run.open(tmp_path / str(by_run)).steps()] for by_run in (False, True)]
    assert lines[0] == lines[1]


def test_a_batch_without_a_rule(pool: Pools, tmp_path: Path) -> None:
    def case() -> list[str]:
        with allranks.join(run=str(tmp_path / "run")) as world:
            model = world.parallelize(Net())
            world.optimizer(model, sgd)
            for _ in world.stream(Samples(), global_batch=10):
                wrong = {"a": torch.ones(2, 6), "b": torch.ones(3)}
                odd = {"x": torch.ones(2, 6), "b": torch.ones(3)}
                return [refusal(lambda b=b: world.run(b, lambda output, b: output.sum())) for b in (wrong, odd)]  # type: ignore[misc]
        return []

    (found,) = pool(1).run(case)
    assert found == [
        "TaskError: world.run: a batch is {a: a float32 tensor [2, 6], b: a float32 tensor [3]}, and Net.forward names "
        "nothing in it: give a dict with its arguments by name, or a pair (input, target)",
        "TaskError: world.run: a batch is {x: a float32 tensor [2, 6], b: a float32 tensor [3]}: say how many targets "
        "it has, targets=...",
    ]


def test_targets_may_be_a_whole_number_of_numpy() -> None:
    found = check_targets("backward", np.int64(4))
    assert found == 4 and type(found) is int
    with pytest.raises(TaskError, match=r"^world\.backward\(targets=np\.float64\(4\.0\)\): the number of targets"):
        check_targets("backward", np.float64(4.0))
