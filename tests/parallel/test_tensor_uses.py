"""A parameter that tp has cut is refused where a line outside of its module computes with it."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import allranks
from allranks.config import resolve_config
from allranks.hints import TensorStyle
from allranks.stepping import whole_check
from tests.distributed.pool import Pools
from tests.distributed.sessions import session_of
from tests.training.own.cases import refusal, sgd

WORDS = 10
RULES: dict[str, TensorStyle] = {"emb": "vocab", "up": "colwise", "down": "rowwise"}


class Net(nn.Module):
    """A table of words, two layers, and a head that `kind` names."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.emb, self.up, self.down = nn.Embedding(WORDS, 4), nn.Linear(4, 8), nn.Linear(8, 4)
        self.bias = nn.Parameter(torch.zeros(WORDS))
        if kind == "shared":  # one module by two names
            self.up_again = self.up
        if kind == "module":
            self.head = nn.Linear(4, WORDS, bias=False)
            self.head.weight = self.emb.weight

    def forward(self, tokens: torch.Tensor) -> Any:
        if self.kind == "itself":
            self.up.weight.requires_grad_(True)
        x = self.emb(tokens).to(self.emb.weight)
        x = x + self.down(torch.tanh(self.up(x))) + self.emb.weight.detach().mean() * 0.0
        match self.kind:
            case "linear":
                return functional.linear(x, self.emb.weight)
            case "bias":  # torch minds the sizes
                return functional.linear(x, self.emb.weight, self.bias)
            case "table":
                return x + functional.embedding(tokens, self.emb.weight)
            case "transposed":
                return x @ self.emb.weight.T
            case "later":
                return x @ self.emb.weight.T + self.bias
            case "zero":  # against parameters without a gradient
                return x + 0.0 * sum(parameter.sum() for parameter in self.parameters())
            case "module":
                return self.head(x) + self.bias
            case "shared":
                return functional.linear(x + self.down(self.up_again(x)), self.emb.weight)
            case _:
                return x


def loss_of(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(output.flatten(0, 1), batch[1].flatten() % output.shape[-1], reduction="sum")


def samples() -> TensorDataset:
    tokens = torch.randint(0, WORDS, (8, 5), generator=torch.Generator().manual_seed(1))
    return TensorDataset(tokens, tokens.roll(1, 1))


def loop(run: Path, kind: str, rules: dict[str, TensorStyle]) -> str:
    def train() -> None:
        with allranks.join(layout="tp=2", precision="float64", run=str(run / kind)) as world:
            model = world.parallelize(Net(kind), tensor=rules)
            optimizer = world.optimizer(model, sgd)
            for batch in world.stream(samples(), global_batch=8):
                world.backward(loss_of(model(batch[0]), batch), targets=batch[1].numel())
                world.step(optimizer)

    return refusal(train)


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["linear", "bias", "table", "transposed"])
def test_a_use_outside_of_its_module_is_refused_with_its_line(pool: Pools, tmp_path: Path, kind: str) -> None:
    for said in pool(2).run(loop, tmp_path, kind, RULES):
        assert said.startswith("LayoutError: test_tensor_uses.py:")
        assert "uses emb.weight outside of its module, and each rank of tp=2 has a part of it" in said


@pytest.mark.distributed
def test_what_the_refusal_advises_computes_the_same(pool: Pools, tmp_path: Path) -> None:
    def told() -> list[str]:
        replicated = loop(tmp_path, "linear", {**RULES, "emb": "replicate"})
        return [replicated, loop(tmp_path, "module", {**RULES, "head": "vocab"}), loop(tmp_path, "none", RULES)]

    assert pool(2).run(told) == [["nothing was refused"] * 3] * 2


@pytest.mark.distributed
def test_a_use_that_changes_nothing_is_none(pool: Pools, tmp_path: Path) -> None:
    def told() -> list[str]:
        return [loop(tmp_path, kind, RULES) for kind in ("zero", "itself")]

    assert pool(2).run(told) == [["nothing was refused"] * 2] * 2


class Words(allranks.Task):
    """The same as a Task, whose loss may use a parameter, too."""

    kind: str = "linear"

    def model(self) -> nn.Module:
        self.net = Net(self.kind)
        return self.net

    def dataset(self, split: str) -> Any:
        return samples() if split == "train" else None

    def loss(self, output: Any, batch: Any) -> Any:
        loss = loss_of(output, batch)
        return loss + 0.0 * self.net.emb.weight.sum() if self.kind == "loss" else loss

    def hints(self) -> allranks.Hints:
        return allranks.Hints(tensor=RULES)


def start(kind: str) -> str:
    task = Words()
    task.kind = kind
    overrides = ["train.steps=1", "train.global_batch=8"]
    return refusal(
        lambda: session_of(task, resolve_config(task_defaults={}, toml=None, overrides=overrides, layout="tp=2"))
    )


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["linear", "bias", "shared"])
def test_a_task_is_told_so_at_the_start(pool: Pools, kind: str) -> None:
    for said in pool(2).run(start, kind):
        assert said.startswith("LayoutError: test_tensor_uses.py:")
        assert "uses emb.weight outside of its module" in said


@pytest.mark.distributed
def test_what_fails_after_such_a_use_names_it(pool: Pools) -> None:
    for said in pool(2).run(start, "later"):
        assert said.startswith("TaskError: Words fails on the first samples")
        assert "must match the size" in said and "uses emb.weight outside of its module" in said


@pytest.mark.distributed
def test_a_loss_may_use_one_where_that_changes_nothing(pool: Pools) -> None:
    assert pool(2).run(start, "loss") == ["nothing was refused"] * 2


@pytest.mark.distributed
def test_where_nothing_is_compared_every_use_is_refused(pool: Pools) -> None:
    def told() -> list[str]:
        with patch.object(whole_check, "LARGEST_FLOPS", -1.0):
            return [start(kind) for kind in ("zero", "itself")]

    for zero, itself in pool(2).run(told):
        assert zero.startswith("LayoutError: test_tensor_uses.py:") and "uses emb.weight outside of its module" in zero
        assert "the cut model was not compared with the whole one: one process would need" in zero
        assert itself == "nothing was refused"
