"""The average of a loop of one's own: one of a model, with a decay that means something, kept with what else is."""

from pathlib import Path

import pytest
import torch
from torch import nn

import allranks
from allranks.errors import ConfigError, TaskError
from allranks.training.door import World


def model_of(world: World) -> nn.Module:
    return world.parallelize(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)))


@pytest.mark.parametrize("decay", [0.0, 1.0, -0.5, 2.0])
def test_a_decay_has_to_lie_between_0_and_1(tmp_path: Path, decay: float) -> None:
    with allranks.join(layout="single", run=tmp_path / "run") as world:
        with pytest.raises(ConfigError, match=r"world.ema\(decay=.*expected a number between 0 and 1"):
            world.ema(model_of(world), decay)
        assert world._step.beside == []


def test_a_world_has_one_average_beside_its_scale(tmp_path: Path) -> None:
    with allranks.join(layout="single", precision="float16", run=tmp_path / "run") as world:
        model = model_of(world)
        average = world.ema(model, 0.5)
        with pytest.raises(TaskError, match="a world has one average of its model"):
            world.ema(model, 0.9)
        assert [other.prefix for other in world._step.beside] == ["scaler.", "ema."]
        assert world._step.beside[1] is average
        assert all(
            torch.equal(part, world._ground.models.trained.local(entry.name[4:])) for entry, part in average.parts()
        )
