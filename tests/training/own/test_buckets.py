"""DDP's buckets: settled by the graph of the user's own loss, and a loss that leaves parameters out."""

from pathlib import Path

import pytest
import torch
from torch import nn

import allranks
from tests.distributed.pool import Pools
from tests.distributed.tasks import Words, starved
from tests.training.own.cases import Samples, refusal


class Half(nn.Module):
    """The second half is used in odd steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.rare = nn.Linear(6, 2), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor, rare: bool) -> torch.Tensor:
        output: torch.Tensor = self.used(x)
        return output + self.rare(x) if rare else output


@pytest.mark.parametrize("size", [2, 3])  # from three on the buckets are settled
def test_a_parameter_without_gradient(pool: Pools, tmp_path: Path, size: int) -> None:
    def case(find_unused: bool) -> tuple[str, int]:
        done = 0

        def loop() -> None:
            nonlocal done
            folder = str(tmp_path / str(find_unused))
            with allranks.join(precision="float64", run=folder) as world:
                model = world.parallelize(Half(), find_unused=find_unused)
                optimizer = world.optimizer(model, torch.optim.SGD, lr=0.01)
                for batch in world.stream(Samples(), global_batch=6, micro_batch=1):
                    world.backward(model(batch["x"], done % 2 == 1).square().sum(), targets=len(batch["x"]))
                    done += world.step(optimizer)

        return refusal(loop), done

    told = (
        "TaskError: 2 trainable parameter(s) got no gradient, first 'rare.weight': freeze what is never used, or say "
        "world.parallelize(model, find_unused=True)"
    )
    assert pool(size).run(case, False, timeout=120) == [(told, 0)] * size
    assert pool(size).run(case, True, timeout=120) == [("nothing was refused", 7)] * size


@pytest.mark.parametrize("size", [2, 3])
def test_a_parameter_without_gradient_later(pool: Pools, tmp_path: Path, size: int) -> None:
    """DDP would raise in the step after, when the parameters have been updated by gradients of each rank's own."""

    def case() -> tuple[str, int]:
        done = 0

        def loop() -> None:
            nonlocal done
            with allranks.join(precision="float64", run=str(tmp_path / "run")) as world:
                model = world.parallelize(Half())
                optimizer = world.optimizer(model, torch.optim.SGD, lr=0.01)
                for batch in world.stream(Samples(), global_batch=6, micro_batch=1):
                    world.backward(model(batch["x"], done == 0).square().sum(), targets=len(batch["x"]))
                    done += world.step(optimizer)

        return refusal(loop), done

    for told, done in pool(size).run(case, timeout=120):
        assert "rare.weight, rare.bias got no gradient" in told and "find_unused=True" in told and done == 1


def test_the_discarded_backward_runs_no_forward(pool: Pools, tmp_path: Path) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 1)
            self.forwards = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.forwards += 1
            output: torch.Tensor = self.linear(x)
            return output

    def case() -> int:
        with allranks.join(precision="float64", run=str(tmp_path / "run")) as world:
            net = Counting()
            model = world.parallelize(net)
            optimizer = world.optimizer(model, torch.optim.SGD, lr=0.01)
            for batch in world.stream(Samples(), global_batch=6, micro_batch=1, steps=3):
                world.backward(model(batch["x"]).sum(), targets=len(batch["x"]))
                world.step(optimizer)
            return net.forwards

    assert pool(3).run(case) == [6, 6, 6]


@pytest.mark.parametrize("size", [2, 4])
def test_experts_without_a_token_are_no_parameters_that_are_left_out(pool: Pools, tmp_path: Path, size: int) -> None:
    """DDP does not wait for them, and a rank whose experts got none has no gradients of theirs."""

    def case(layout: str) -> list[torch.Tensor]:
        with allranks.join(layout=layout, precision="float64", run=str(tmp_path / layout)) as world:
            torch.manual_seed(0)
            model = world.parallelize(starved())
            optimizer = world.optimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1)
            for batch in world.stream(Words(), global_batch=12, steps=3):
                output, targets = model(batch["x"]).flatten(0, 1), batch["y"].flatten()
                loss = nn.functional.cross_entropy(output, targets, reduction="sum")
                world.backward(loss, targets=int((targets >= 0).sum()))
                world.step(optimizer)
            return [p.detach().clone() for p in model.parameters()]

    (alone,) = pool(1).run(case, "single")
    for rank, found in enumerate(pool(size).run(case, f"dp_replicate={size},ep=2", timeout=30)):
        for value, whole in zip(found, alone, strict=True):
            expected = whole if value.shape == whole.shape else whole.chunk(2)[rank % 2]
            torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-14)
