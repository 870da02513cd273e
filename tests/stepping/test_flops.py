"""Operations of a sample, counted on the user's forward."""

from typing import Any

import pytest
import torch
from torch import nn

from allranks.errors import TaskError
from allranks.hints import Hints
from tests.distributed.pool import Pools
from tests.distributed.sessions import config_of, session_of
from tests.distributed.tasks import CLASSES, Points, Tiny
from tests.training.tasks import Curve, Gan

SMALL = ("train.global_batch=6",)


class Products(Curve):
    """[2] -> [7] -> [2], without anything else that counts."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 7, bias=False), nn.Dropout(), nn.Linear(7, 2, bias=False))


def test_a_product_and_a_sum_are_two_and_a_backward_costs_two_forwards() -> None:
    session = session_of(Products(), config_of("single", *SMALL))
    assert session.flops_per_sample == 3 * 2 * (2 * 7 + 7 * 2)
    assert session.spread.modules[""].training


def flops_of(layout: str) -> Any:
    return session_of(Products(), config_of(layout, *SMALL)).flops_per_sample


@pytest.mark.distributed
def test_a_sharded_model_costs_the_same(pool: Pools) -> None:
    assert pool(2).run(flops_of, "fsdp") == pool(2).run(flops_of, "ddp") == [3 * 2 * 28.0] * 2


def flops_of_tiny(kind: str, layout: str) -> Any:
    return session_of(Tiny(kind=kind), config_of(layout, *SMALL)).flops_per_sample


@pytest.mark.distributed
@pytest.mark.parametrize(("kind", "layout"), [("tied", "cp=2"), ("mlp", "pp=2")])
def test_a_sequence_or_a_model_that_is_cut_costs_the_same(pool: Pools, kind: str, layout: str) -> None:
    whole, _ = expected = pool(2).run(flops_of_tiny, kind, "ddp")
    assert whole > 0 and pool(2).run(flops_of_tiny, kind, layout) == expected


@pytest.mark.distributed
def test_layers_that_are_cut_cost_the_same_on_average(pool: Pools) -> None:
    """Of 11 words one rank has 6 and the other 5, and each takes its part for half of the whole."""
    whole, _ = pool(2).run(flops_of_tiny, "transformer", "ddp")
    first, second = pool(2).run(flops_of_tiny, "transformer", "tp=2")
    assert first + second == 2 * whole > 0


class Additions(Curve):
    def model(self) -> nn.Module:
        return Shift()


class Shift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.shift


def test_what_cannot_be_counted_has_no_number() -> None:
    assert session_of(Additions(), config_of("single", *SMALL)).flops_per_sample is None
    assert session_of(Gan(), config_of("single", *SMALL)).flops_per_sample is None
    assert (session_of(Tiny(), config_of("single", *SMALL)).flops_per_sample or 0) > 0


class WithGradients(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            raise ValueError("needs gradients")
        found: torch.Tensor = self.linear(x)
        return found


class Forces(Tiny):
    """A forward that needs gradients in its last block, as one that differentiates an energy does."""

    def dataset(self, split: str) -> Any:
        return Points()

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), WithGradients(), nn.Linear(5, CLASSES))

    def hints(self) -> Hints:
        return Hints(blocks=("0", "1", "2"), split_before=("2",))


def flops_of_forces(layout: str) -> Any:
    return session_of(Forces(), config_of(layout, *SMALL)).flops_per_sample


@pytest.mark.distributed
def test_what_cannot_be_counted_on_one_stage_is_no_silence_on_the_others(pool: Pools) -> None:
    assert pool(2).run(flops_of_forces, "fsdp") == [None, None]
    with pytest.raises(TaskError, match=r"Forces fails on the first samples of its dataset(.|\n)*needs gradients"):
        pool(2).run(flops_of_forces, "pp=2")


def flops_of_experts(layout: str) -> Any:
    return session_of(Tiny(kind="moe"), config_of(layout, *SMALL)).flops_per_sample


@pytest.mark.distributed
def test_experts_cost_the_same_whoever_computes_them(pool: Pools) -> None:
    """Every rank has to come to one number: what is compared at the start depends on it."""
    (alone,) = pool(1).run(flops_of_experts, "single")
    assert alone > 0
    assert pool(2).run(flops_of_experts, "dp_replicate=2,ep=2") == [alone] * 2
