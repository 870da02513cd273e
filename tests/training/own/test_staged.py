"""Micro-batches that wait for a step's last one: what becomes of them, and which loss may wait."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import allranks
from allranks.errors import TaskError
from allranks.run import Run
from allranks.training.own.forward import check_can_wait
from tests.distributed.pool import Pools
from tests.distributed.tasks import Words
from tests.training.own.cases import sgd
from tests.training.own.runs import BATCH, model_of, words_loss


def test_a_step_that_is_left_is_begun_anew(pool: Pools, tmp_path: Path) -> None:
    """Of what has waited nothing is left, whichever micro-batch the loop was left at."""

    def case(folder: str, leave: int) -> list[bool]:
        known = []
        with allranks.join(layout="pp=2", precision="float64", run=folder) as world:
            model = world.parallelize(model_of("tied"))
            optimizer = world.optimizer(model, sgd)
            stream = world.stream(Words(), global_batch=BATCH, micro_steps=4, steps=3)
            while stream.step < 3:
                for index, batch in enumerate(stream):
                    loss = world.run(batch, words_loss)
                    known.append(not bool(loss.isnan()))
                    world.step(optimizer)
                    if index == leave:
                        break
                leave = -1
        return known

    for leave in (-1, 5):
        whole = [False, False, False, True] * 3
        expected = whole if leave < 0 else [*whole[:6], *whole[4:]]
        assert pool(2).run(case, str(tmp_path / str(leave)), leave) == [expected] * 2
    lines = [[line["loss"] for line in Run.open(tmp_path / name).steps()] for name in ("-1", "5")]
    assert lines[0] == lines[1] and len(lines[0]) == 3


AROUND: dict[str, torch.Tensor] = {}


def test_a_loss_that_would_read_another_batch_may_not_wait() -> None:
    x, y = torch.ones(2), torch.zeros(2)
    batch: Any = {"x": x, "y": y}
    with pytest.raises(TaskError, match="the loss reads 'batch' from around it, and layout pp=2 calls it when"):
        check_can_wait(lambda output, _: (output - batch["y"]).sum(), batch, "pp=2")
    with pytest.raises(TaskError, match="reads 'y' from around it"):
        check_can_wait(lambda output, _: (output - y).sum(), batch, "pp=2")
    AROUND.clear()
    with pytest.raises(TaskError, match="reads 'AROUND' from around it"):
        check_can_wait(lambda output, _: (output - AROUND["y"]).sum(), AROUND, "pp=2")
    weight = torch.ones(2)
    check_can_wait(lambda output, batch: (weight * (output - batch["y"])).sum(), batch, "pp=2")
    check_can_wait(partial(lambda kept, output, _: (output - kept).sum(), y), batch, "pp=2")  # held since it was made
