"""A loop whose short last step has too few samples for BatchNorm is refused in its first one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import allranks
from allranks.errors import ConfigError
from tests.distributed.pool import Pools
from tests.training.own.cases import refusal, sgd
from tests.training.own.runs import folder_of


class Rows(nn.Module):
    """BatchNorm over rows of numbers, or over images of two pixels, and blocks that a pipeline can cut."""

    def __init__(self, images: bool = False) -> None:
        super().__init__()
        flat = nn.Sequential(nn.BatchNorm1d(4))
        pixels = nn.Sequential(nn.Unflatten(1, (2, 1, 2)), nn.BatchNorm2d(2, track_running_stats=False), nn.Flatten())
        self.norm = pixels if images else flat
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.blocks(self.norm(x))
        return output


def loss_of(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(output, batch[0], reduction="sum")


def samples_of(size: int) -> TensorDataset:
    x = torch.randn(size, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(x, x)


def train(
    folder: Path, size: int, layout: str = "single", micro: int | None = None, *, images: bool = False, **join: Any
) -> list[list[int]]:
    """The samples of this rank's forwards, step by step, of 16 samples each; the loop evaluates in its first one."""
    found: list[list[int]] = []
    with allranks.join(layout=layout, precision="float64", run=folder_of(folder, f"{size}-{layout}"), **join) as world:
        model = world.parallelize(Rows(images))
        optimizer = world.optimizer(model, sgd)
        for batch in (stream := world.stream(samples_of(size), global_batch=16, micro_steps=micro)):
            if not found:
                world.evaluate(samples_of(2), metrics=lambda output, own: {"loss": (loss_of(output, own), 1)}, batch=2)
            if stream.step == len(found):
                found.append([])
            world.run(batch, loss_of, targets=len(batch[0]))
            found[-1].append(world.weight * len(batch[0]))
            assert not world.step(optimizer) or size != 33 or images, "the first update was made"
    return found


def refused(folder: Path, size: int, layout: str = "single", micro: int | None = None, **join: Any) -> str:
    return refusal(lambda: train(folder, size, layout, micro, **join))


def said(size: str, needed: int) -> str:
    return (
        f"ConfigError: the last of 3 steps has {size}, and BatchNorm 'norm.0' needs {needed}, as it sees one number of "
        "each channel in a sample: world.stream(steps=2) leaves it out"
    )


def test_a_last_step_of_one_row_is_refused_before_the_first_update(tmp_path: Path) -> None:
    assert refused(tmp_path, 33) == said("1 sample", 2)
    assert train(tmp_path, 34) == [[16], [16], [2]]
    assert train(tmp_path, 32) == [[16], [16]]


def test_one_image_has_pixels_enough(tmp_path: Path) -> None:
    assert train(tmp_path, 33, images=True) == [[16], [16], [1]]


def test_a_step_that_is_left_is_looked_at_anew(tmp_path: Path) -> None:
    with allranks.join(precision="float64", run=str(tmp_path / "run")) as world:
        model = world.parallelize(Rows())
        optimizer, stream = world.optimizer(model, sgd), world.stream(samples_of(33), global_batch=16)
        for batch in stream:
            world.run(batch, loss_of)
            break
        with pytest.raises(ConfigError, match="the last of 3 steps has 1 sample"):
            for batch in stream:
                world.run(batch, loss_of)
                world.step(optimizer)
        assert stream.step == 0 and not any(part._forward_pre_hooks for part in model.modules())


def test_a_loop_that_has_its_batch_norm_in_evaluation_mode_is_left_alone(tmp_path: Path) -> None:
    with allranks.join(precision="float64", run=str(tmp_path / "run")) as world:
        model = world.parallelize(Rows().eval())
        optimizer, stream = world.optimizer(model, sgd), world.stream(samples_of(33), global_batch=16)
        for batch in stream:
            world.run(batch, loss_of)
            world.step(optimizer)
        assert stream.step == 3


@pytest.mark.parametrize("size", [34, 35, 37, 39])
def test_forwards_of_a_short_step_have_two_samples_at_least(tmp_path: Path, size: int) -> None:
    """Of three samples and four micro-steps there were three forwards of one."""
    *whole, short = train(tmp_path, size, micro=4)
    assert whole == [[4] * 4] * 2
    assert sum(short) == size - 32 and min(short) >= 2


@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["ddp", "fsdp", "pp=2"])
def test_every_rank_refuses_one_row(pool: Pools, tmp_path: Path, layout: str) -> None:
    def refusals() -> list[str]:
        return [refused(tmp_path, size, layout, micro=2) for size in (33, 34)]

    assert pool(2).run(refusals) == [[said("1 sample", 2), "nothing was refused"]] * 2


@pytest.mark.distributed
@pytest.mark.parametrize(("layout", "join"), [("ddp,batchnorm=local", {}), ("ddp", {"local_sgd": 2})])
def test_what_is_of_one_rank_needs_two_samples_on_each(
    pool: Pools, tmp_path: Path, layout: str, join: dict[str, Any]
) -> None:
    def refusals() -> list[str]:
        return [refused(tmp_path, size, layout, **join) for size in (35, 36)]

    assert pool(2).run(refusals) == [[said("3 samples", 4), "nothing was refused"]] * 2
