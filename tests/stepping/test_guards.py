"""What is not finite reaches no parameter, under any layout; what a skipped step has learnt is put back."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW

from allranks.stepping.guards import LearntBuffers, StepGuard, all_of, any_of
from allranks.stepping.optimizer import Optimizers
from allranks.stepping.origin import Origin
from allranks.stepping.session import Session
from tests.distributed.pool import Pools
from tests.distributed.sessions import config_of, parts_of, session_of, step_through
from tests.distributed.tasks import Tiny
from tests.parallel.spreads import spread

CONFIG = ("train.global_batch=12", "train.max_norm=1", "train.ema=0.9", "optimizer.lr=0.1")
ONE, ZERO = torch.ones(()), torch.zeros(())


class Spoiled(Tiny):
    """While `spoilt` is set its loss is infinite, and its gradients are not."""

    def __init__(self, **settings: object) -> None:
        super().__init__(**settings)
        self.spoilt = False

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        return super().loss(output, batch) + (math.inf if self.spoilt else 0.0)


class Normed(Spoiled):
    """With running statistics, and buffers that never change, one of them large."""

    def model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
        model.register_buffer("mask", torch.arange(3.0))
        model.register_buffer("table", torch.arange(20_000.0))
        return model


class Late(nn.Module):
    """Enters its BatchNorm from the second training forward on; it is as wide as a large table."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.calls = nn.Linear(5, 20_000), nn.BatchNorm1d(20_000), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        found: torch.Tensor = self.linear(x)
        return found if self.calls < 2 else found + self.norm(found)


def state_of(session: Session) -> dict[str, torch.Tensor]:
    """Everything that a step may move, on this rank."""
    found = {name: tensor for name, (_, _, tensor) in parts_of(session).items()}
    assert session.ema is not None
    return found | {entry.name: average.clone() for entry, average in session.ema.parts()}


def leave_out(task: Spoiled, layout: str, *overrides: str) -> Any:
    """In a worker: four steps, in the second of which the last rank's loss is infinite.

    Returns what differs after each step from before it, whether all is finite, and what was told of each.
    """
    session = session_of(task, config_of(layout, *CONFIG, *overrides, precision="float32", steps=4))
    # What a loss sees under tp is the same on all its ranks.
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    steps = step_through(session, 4)
    moved, told, state, skipped = list[list[str]](), list[Any](), state_of(session), list[int]()
    for number in range(4):
        task.spoilt = number == 1 and (rank == size - 1 or "tp" in layout)
        stepped = next(steps)
        after = state_of(session)
        moved.append([name for name in after if name not in state or not torch.equal(after[name], state[name])])
        told.append(stepped.outcome.skipped is not None and float(stepped.outcome.skipped))
        skipped.append(stepped.outcome.pending.read().skipped)
        state = after
    return moved, all(bool(value.isfinite().all()) for value in state.values()), told, skipped


def check(ranks: list[Any]) -> None:
    for moved, finite, told, skipped in ranks:
        assert moved[0] and moved[2] and moved[3], "the other steps are applied"
        assert moved[1] == [] and finite
        assert told == [False, 1.0, False, False]
        assert skipped == [0, 0, len(ranks), 0], "the next step's agreement carries it"


@pytest.mark.parametrize("task", [Spoiled(kind="mlp"), Normed()])
def test_a_step_with_a_loss_that_is_not_finite_changes_nothing(task: Spoiled) -> None:
    check([leave_out(task, "single", "train.micro_steps=2")])


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("mlp", "ddp"),
        ("mlp", "fsdp"),
        ("mlp", "dp_shard=2,sharding=optimizer"),
        ("mlp", "pp=2"),
        ("transformer", "tp=2"),
    ],
)
def test_under_every_layout(pool: Pools, kind: str, layout: str) -> None:
    check(pool(2).run(leave_out, Spoiled(kind=kind), layout, "train.micro_steps=2"))


@pytest.mark.distributed
def test_what_powersgd_has_not_sent_is_forgotten(pool: Pools) -> None:
    """Else it would stay nan, and all steps after it would be left out, too."""
    hook = ("layout.ddp_hook=powersgd", "layout.powersgd_start=0", "layout.powersgd_rank=1")
    check(pool(2).run(leave_out, Spoiled(kind="mlp"), "ddp", *hook))


def test_the_norm_decides() -> None:
    guard = StepGuard(session_of(Spoiled(kind="mlp"), config_of("single", *CONFIG)).spread)
    assert [guard.judge(torch.tensor(norm)) for norm in (0.0, 1.0, 3e38)] == [None] * 3
    for norm in (math.nan, math.inf, -math.inf):
        assert guard.judge(torch.tensor(norm)) == ONE


def test_of_several_updates() -> None:
    assert any_of([None, None]) is all_of([None, None]) is all_of([]) is None
    assert any_of([None, ONE]) == ONE and all_of([None, ONE]) is None
    assert any_of([ZERO, ONE]) == ONE and all_of([ZERO, ONE]) == ZERO
    assert all_of([ONE, ONE]) == ONE and any_of([ZERO, ZERO]) == ZERO


def test_a_layer_that_the_first_step_passes_by_is_put_back_too() -> None:
    found = spread(Late)
    guard, module = StepGuard(found), found.modules[""]

    def step(x: torch.Tensor) -> torch.Tensor | None:
        guard.begin()
        module(x).sum().backward()
        skipped = guard.judge(found.clip(list(found.trainable().values()), None, None))
        guard.finish(skipped)
        for parameter in found.trainable().values():
            parameter.grad = None
        return skipped

    assert step(torch.randn(3, 5)) is None and step(torch.randn(3, 5)) is None
    before = {name: found.local(name).clone() for name in ("norm.running_mean", "norm.num_batches_tracked")}
    assert step(torch.full((3, 5), math.nan)) == ONE
    assert all(torch.equal(found.local(name), value) for name, value in before.items())


def test_large_tables_that_do_not_change_are_let_go() -> None:
    task = Normed()
    session = session_of(task, config_of("single", *CONFIG))
    buffers = LearntBuffers(session.spread)
    assert {"mask", "table"} < set(buffers.names)
    buffers.keep()
    for _ in step_through(session, 1):
        buffers.keep()
    assert set(buffers.names) == {"mask", "1.running_mean", "1.running_var", "1.num_batches_tracked"}
    kept = session.spread.local("1.running_mean").clone()
    session.spread.local("1.running_mean").fill_(math.nan)
    buffers.put_back(ZERO)
    assert session.spread.local("1.running_mean").isnan().all()
    buffers.put_back(ONE)
    assert torch.equal(session.spread.local("1.running_mean"), kept)


def test_a_fused_optimizer_obeys_what_lies_on_its_device() -> None:
    """As on CUDA, by the same kernel's twin on the CPU: nobody reads the value; its step count stays, too."""
    session = session_of(Spoiled(kind="mlp"), config_of("single", "optimizer.lr=0.1", precision="float32"))
    optimizers: Optimizers = session.optimizers
    (optimizer,) = optimizers.by_name.values()
    assert isinstance(optimizer, AdamW) and not optimizers.skips_on_device("", torch.device("cpu"))
    optimizers._skipping[""] = True
    for skipped, moves in ((ZERO, True), (ONE, False), (ZERO, True)):
        before = {name: value.clone() for name, (_, _, value) in parts_of(session).items()}
        for parameter in session.spread.trainable().values():
            parameter.grad = torch.full_like(parameter, math.nan if float(skipped) else 1.0)
        optimizers.update("", skipped.clone())
        after = {name: value for name, (_, _, value) in parts_of(session).items()}
        assert any(name not in before or not torch.equal(after[name], before[name]) for name in after) is moves
        assert all(parameter.grad is None for parameter in session.spread.trainable().values())
    assert {float(state["step"]) for state in optimizer.state.values()} == {2.0}


def test_an_origin_in_words() -> None:
    origin = Origin(1, "output", "0.linear", "Linear", (20, 21), (7, 3))
    assert str(origin) == (
        "rank 1: first seen in what comes out of 0.linear (Linear); it was fed samples 7, 3 (positions 20 to 21)"
    )
