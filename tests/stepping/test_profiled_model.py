"""What the profiler is told of a model."""

import json
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from allranks.profiling.structure import Structure
from allranks.stepping.profiled_model import describe, identity, spread_alone
from allranks.task import Hints, Task
from tests.profiling.subjects import WIDTH, Adversaries, Images, Vectors, Words, mlp


def seen(task: Task) -> Structure:
    return describe(task, spread_alone(task, task.model, "float32", "cpu"))


def test_blocks_experts_and_ties() -> None:
    words = seen(Words(make="moe"))
    assert words.blocks == ("layers.0", "layers.1")
    assert words.experts == {f"layers.{index}.feed_forward.experts": 4 for index in range(2)}
    assert words.tied == (("output.weight", "embedding.weight"),)
    assert words.parameters["output.weight"] is words.parameters["embedding.weight"]
    images = seen(Images())
    assert images.stateful == ("blocks.0.1", "blocks.1.1")
    assert sum(buffer.numel() for buffer in images.buffers) == 2 * (6 + 6 + 1)


def test_several_modules_have_their_names_before_their_parts() -> None:
    found = seen(Adversaries())
    assert set(found.modules) == {"generator", "critic"}
    assert "critic.0.weight" in found.parameters


class Hinted(Vectors):
    def hints(self) -> Hints:
        return Hints(blocks=("0", "3"), tensor={"0": "colwise", "3": "rowwise"}, loss_parallel=True)


def test_hints_count() -> None:
    found = seen(Hinted())
    assert found.blocks == ("0", "3")
    assert found.styles == {"0": "colwise", "3": "rowwise"}
    assert found.loss_parallel and not seen(Vectors()).loss_parallel


class Refused(Vectors):
    def hints(self) -> Hints:
        return Hints(tensor={"no such layer": "colwise"})


def test_a_model_that_tensor_parallelism_cannot_cut_has_no_styles() -> None:
    assert seen(Refused()).styles == {}


class Other(Vectors):
    def __init__(self, module: nn.Module, **settings: object) -> None:
        super().__init__(**settings)
        self._module = module

    def model(self) -> Any:
        return self._module


class Repeating(nn.Module):
    """Runs its layer so many times, which no tensor tells."""

    def __init__(self, times: int, activation: Any = torch.relu) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.times, self.activation = times, activation


def test_models_that_differ_have_other_identities() -> None:
    def text(module: nn.Module, rows: int = 2) -> str:
        task = Other(module)
        return json.dumps(identity(task, seen(task), torch.zeros(rows, WIDTH)), sort_keys=True)

    modules = [
        *(mlp(), mlp(0.1), nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3).requires_grad_(False)),
        *(Repeating(1), Repeating(2), Repeating(2, torch.tanh)),
    ]
    found = [text(module) for module in modules]
    assert len(set(found)) == len(found)
    assert text(mlp()) == found[0]
    assert text(mlp(), rows=3) != found[0]


def test_hints_count_for_the_identity() -> None:
    hinted, other = Hinted(), Hinted()
    other.hints = lambda: replace(Hinted.hints(other), loss_parallel=False)  # type: ignore[method-assign]
    assert identity(hinted, seen(hinted), ()) != identity(other, seen(other), ())


def test_attributes_of_a_task_count_beside_its_settings() -> None:
    task = Vectors()
    before = identity(task, seen(task), ())
    task._weight_of_the_loss = 2.0  # type: ignore[attr-defined]
    assert identity(task, seen(task), ()) != before
