"""The engine's reads are answered, the user's are not; FLOPs are torch's."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional

from allranks.errors import TaskError
from allranks.profiling.fakes import fake_mode
from allranks.rehearsing.refusals import Unrehearsable
from allranks.rehearsing.watch import written_by
from tests.rehearsing.tasks import Calling, Layered, Tokens, branch, mixed, rehearsed


class Reading(Layered):
    """Reads a value in its loss."""

    def loss(self, output, batch):  # type: ignore[no-untyped-def]
        loss = super().loss(output, batch)
        return loss * float(loss.item() > 0)


class Mixed(Layered):
    """Multiplies two types in its forward."""

    def middle(self) -> nn.Module:
        return Calling(mixed)


class Branching(Layered):
    """Branches in its forward."""

    def middle(self) -> nn.Module:
        return Calling(branch)


@pytest.mark.parametrize("kind", [Reading, Branching])
def test_the_users_reads_have_no_answer(kind: type[Layered]) -> None:
    with pytest.raises(Unrehearsable, match=r"_local_scalar_dense.*\.py:\d+"):
        rehearsed(kind(), "ddp", 2)


def test_what_an_operation_writes_to() -> None:
    """By its schema; a BatchNorm's says of none, and moves its statistics where it trains."""
    aten = torch.ops.aten
    with fake_mode():
        one, other, rows = torch.zeros(2), torch.ones(2), torch.zeros(3, 2)
    cases: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[torch.Tensor]]] = [
        (aten.add_.Tensor, (one, other), {}, [one]),
        (aten.add.Tensor, (one, other), {}, []),
        (aten.add.out, (one, one), {"out": other}, [other]),
        (aten.native_batch_norm.default, (rows, None, None, one, other, True, 0.1, 1e-5), {}, [one, other]),
        (aten.native_batch_norm.default, (rows, None, None, one, other, False, 0.1, 1e-5), {}, []),
    ]
    for func, args, kwargs, written in cases:
        found = written_by(func._schema.name, func, args, kwargs)
        assert [*map(id, found)] == [*map(id, written)], func


def test_flops_of_a_step() -> None:
    told = rehearsed(Layered(), "single", 1, "train.max_norm=1.0")
    forward = 2 * 8 * (32 * 32 + 32 * 10)
    assert told.flops == 3 * forward - 2 * 8 * 32 * 32  # the input wants no gradient


def test_lines_are_of_those_who_asked() -> None:
    lines = {one.line for one in rehearsed(Tokens(), "tp=2,dp_shard=2", 4).collectives}
    assert any("models/transformer.py" in line for line in lines)
    assert not any(looks_on in line for line in lines for looks_on in ("step_record", "rehearsing/"))


def test_products_of_two_types_fail_as_on_a_device() -> None:
    with pytest.raises(TaskError, match="mm expects operands of one dtype, and gets float32 and float64"):
        rehearsed(Mixed(), "single", 1)


class Wide(Layered):
    """Weights large beside the logits, of 320 B."""

    def middle(self) -> nn.Module:
        return nn.Sequential(nn.ReLU(), nn.Linear(self.width, 1024), nn.Linear(1024, self.width))


class ForeachAdam(Wide):
    """All parameters at once, which takes memory for as many."""

    def optimizer(self, parameters):  # type: ignore[no-untyped-def]
        return torch.optim.Adam(parameters, lr=1e-3, foreach=True)


@pytest.mark.parametrize(
    ("kind", "layout", "world", "category", "copies"),
    [
        (Wide, "ddp", 2, "gradients", 1.5),
        (Wide, "dp_shard=2,sharding=optimizer", 2, "communication", 2.0),
        (ForeachAdam, "single", 1, "optimizer", 3.0),
    ],
)
def test_logits_are_what_the_loss_makes_and_nothing_else(
    kind: type[Wide], layout: str, world: int, category: str, copies: float
) -> None:
    told = rehearsed(kind(), layout, world)
    assert sum(told.by_category.values()) == told.peak_bytes
    assert told.by_category["logits"] < 1000
    weights = told.by_category["weights"]
    assert told.by_category[category] == pytest.approx(copies * weights, rel=0.05), told.by_category
    assert not any("loss" in one.line for one in told.collectives)


def test_functional_collectives_are_told_with_their_line_and_compared() -> None:
    def summed(value: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = functional.all_reduce(
            value.detach().sum(), "sum", dist.distributed_c10d._get_default_group()
        )
        return value + total

    class Summing(Layered):
        def middle(self) -> nn.Module:
            return Calling(summed)

    (found,) = (one for one in rehearsed(Summing(), "ddp", 2).collectives if "test_watch.py" in one.line)
    assert (found.op, found.bytes, found.ranks, found.count) == ("all-reduce", 4, 2, 1)
