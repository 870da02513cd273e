"""A short last step has samples enough for BatchNorm, or is refused before the first one."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from allranks.config import resolve_config
from allranks.errors import ConfigError
from allranks.stepping.last_step import size_of_last
from allranks.task import Task
from tests.distributed.pool import Pools
from tests.distributed.sessions import session_of, step_through


class Rows(Task):
    """BatchNorm over rows of numbers, or over images of four pixels."""

    size: int = 33
    images: bool = False

    def model(self) -> nn.Module:
        if self.images:
            return nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(4, 2))
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

    def dataset(self, split: str) -> Any:
        x = torch.randn(self.size, 4, generator=torch.Generator().manual_seed(1))
        return TensorDataset(x, x[:, :2]) if split == "train" else None

    def loss(self, output: Any, batch: Any) -> Any:
        return ((output - batch[1]) ** 2).sum()


def task_of(size: int, images: bool = False) -> Rows:
    task = Rows()
    task.size, task.images = size, images
    return task


def config(layout: str = "single", *more: str) -> Any:
    length = () if any("train.steps" in one for one in more) else ("train.epochs=1",)
    given = ["train.global_batch=16", "train.precision=float64", *length, *more]
    return resolve_config(task_defaults={}, toml=None, overrides=given, layout=layout)


def last(size: int, *more: str, layout: str = "single", images: bool = False) -> tuple[list[float], int | None]:
    """The losses of every step, and the samples of the short one; or the refusal raised."""
    session = session_of(task_of(size, images), config(layout, *more))
    total, short = session.stream.steps_total, size_of_last(session.stream)
    assert total is not None
    return [step.loss for step in step_through(session, total)], short


def refusal(size: int, layout: str, *more: str) -> str:
    try:
        last(size, *more, layout=layout)
    except ConfigError as error:
        return str(error)
    return ""


def test_a_last_step_of_one_row_is_refused_at_the_start() -> None:
    said = refusal(33, "single")
    assert said == (
        "the last of 3 steps has 1 sample, and BatchNorm '1' needs 2, as it sees one number of each channel in a "
        "sample: train.steps=2 leaves it out"
    )
    assert last(33, "train.steps=2")[1] is None
    assert last(34)[1] == 2


def test_one_image_has_pixels_enough() -> None:
    losses, short = last(33, images=True)
    assert (len(losses), short) == (3, 1)


@pytest.mark.parametrize("size", [34, 35, 37, 39])
def test_forwards_of_a_short_step_have_two_samples_at_least(size: int) -> None:
    """Of three samples and four micro-steps there were three forwards of one."""
    session = session_of(task_of(size), config("single", "train.micro_steps=4"))
    sizes = [
        [part.weight and len(part.positions) for part in step.batch.micro_steps] for step in step_through(session, 3)
    ]
    assert sizes[:2] == [[4] * 4] * 2
    assert sum(sizes[2]) == size - 32 and min(sizes[2]) >= 2


@pytest.mark.distributed
def test_every_rank_refuses_what_its_own_statistics_have_not(pool: Pools) -> None:
    assert pool(2).run(refusal, 34, "ddp") == [""] * 2
    for said in pool(2).run(refusal, 35, "ddp,batchnorm=local"):
        assert said.startswith("the last of 3 steps has 3 samples, and BatchNorm '1' needs 4,")
    assert pool(2).run(refusal, 36, "ddp,batchnorm=local") == [""] * 2
    for said in pool(2).run(refusal, 35, "ddp", "layout.local_sgd=2"):  # two copies, each by itself
        assert said.startswith("the last of 3 steps has 3 samples, and BatchNorm '1' needs 4,")


@pytest.mark.distributed
@pytest.mark.parametrize("size", [36, 37, 40])
def test_each_rank_has_two_samples_in_each_forward_of_a_short_step(pool: Pools, size: int) -> None:
    """Of four samples and two micro-steps a rank had one a forward."""

    def losses() -> int:
        return len(last(size, "train.micro_steps=2", layout="ddp,batchnorm=local")[0])

    assert pool(2).run(losses) == [3, 3]
