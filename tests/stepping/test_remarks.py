"""What is said before the first step of a whole training: what has no effect, and what nobody may have meant."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from allranks.layout import Layout
from allranks.observing.counters import Stopwatch
from allranks.stepping.remarks import describe_idle_keys, describe_waiting
from allranks.stepping.schedule import Schedule
from allranks.stepping.session import assemble
from tests.distributed.pool import Pools
from tests.distributed.sessions import config_of, processes_of, session_of
from tests.training.tasks import Curve, Gan

SMALL = ("train.global_batch=6",)


def test_a_schedule_that_nobody_may_have_meant_is_remarked_on() -> None:
    def remarks(*overrides: str, kept: Schedule | None = None) -> list[str]:
        config = config_of("single", *SMALL, "schedule.name=linear", *overrides)
        processes = processes_of(config)
        session = assemble(Curve(), config, processes, Stopwatch(), lambda: (False, False), kept_schedule=kept)
        return [str(decision) for decision in session.decisions if "rate" in decision.what]

    assert remarks("schedule.warmup=2") == []
    (found,) = remarks("train.steps=3", "schedule.warmup=9")
    assert found.startswith(
        "the rate never reaches its peak: warm-up takes 9 steps, because the schedule ends at step 3"
    )
    (found,) = remarks("train.steps=20", kept=Schedule("linear", 0, 60, 0.25))
    assert found.startswith(
        "from step 10 on the rate is 0.25 of its peak, because the schedule of the first start ends"
    )
    assert "`--change schedule.steps schedule.steps=N`" in found


def test_a_rollback_without_a_checkpoint_is_remarked_on() -> None:
    def remarks(*overrides: str) -> list[str]:
        session = session_of(Curve(), config_of("single", *SMALL, *overrides))
        return [str(decision) for decision in session.decisions if decision.what.startswith("a spike")]

    because = "guard.spike=rollback goes back to a checkpoint, and checkpoint.every is not given"
    assert remarks("guard.spike=rollback") == [f"a spike has the run go back by up to 30 min 00 s, because {because}"]
    off = f"a spike has the run begin anew, because {because} (checkpoint.seconds is 0)"
    assert remarks("guard.spike=rollback", "checkpoint.seconds=0") == [off]
    assert remarks("guard.spike=rollback", "checkpoint.every=5") == remarks() == []


@pytest.mark.parametrize(
    ("device", "skips", "spike", "told"),
    [
        ("cpu", False, "skip", []),
        ("cuda", True, "log", []),
        ("cuda", False, "log", ["to see whether its gradients are finite, because Mine cannot leave an update out"]),
        ("cuda", True, "skip", ["to see its gradient norm, because guard.spike=skip"]),
        ("cuda", True, "rollback", ["to see its loss, because guard.spike=rollback"]),
    ],
)
def test_where_the_host_waits_for_the_device_in_every_step_it_is_said(
    device: str, skips: bool, spike: str, told: list[str]
) -> None:
    mine = type("Mine", (), {})()
    optimizers: Any = SimpleNamespace(by_name={"": mine}, skips_on_device=lambda which, device: skips)
    found = [str(decision) for decision in describe_waiting(optimizers, torch.device(device), spike)]
    assert len(found) == len(told)
    for one, text in zip(found, told, strict=True):
        assert one.startswith(f"each step waits for the device once, {text}"), one


def idle(own_step: bool = False, norms: bool = True, **layout: Any) -> list[str]:
    found = describe_idle_keys(Layout(**layout), own_step=own_step, norms=norms)
    return [str(decision).replace("layout.", "") for decision in found]


def test_keys_of_ddp_are_remarked_on_where_there_is_none() -> None:
    ddp: dict[str, Any] = {"static_graph": True, "ddp_bucket_mb": 1.0}
    both = "static_graph, ddp_bucket_mb have no effect, because they are for DDP, and "
    assert idle(**ddp, dp_replicate=2) == idle(**ddp, dp_shard=2, sharding="optimizer") == []
    for layout in ({"kind": "single"}, {"dp_shard": 2}, {"dp_replicate": 2, "pp": 2}, {"tp": 2}):
        assert idle(**ddp, **layout) == [f"{both}this layout has none"]
    assert idle(**ddp, dp_replicate=2, own_step=True) == [f"{both}a step() of its own goes without"]
    assert idle(static_graph=True) == [
        "static_graph has no effect, because it is for DDP, and this layout has none",
    ]


@pytest.mark.parametrize(
    ("keys", "used", "unused", "because"),
    [
        ({"gather": "bfloat16"}, {"dp_shard": 2}, {"dp_replicate": 2}, "parameters that are sharded, and this layout"),
        ({"prefetch": 2}, {"dp_shard": 2}, {"dp_replicate": 2}, "parameters that are sharded, and this layout"),
        ({"powersgd_rank": 2, "powersgd_start": 9}, {"ddp_hook": "powersgd"}, {"ddp_hook": "bfloat16"}, "ddp_hook=po"),
        ({"outer_lr": 1.0, "outer_nesterov": False, "outer_momentum": 0.0}, {"local_sgd": 4}, {}, "local_sgd"),
        ({"context": "ring"}, {"cp": 2}, {"tp": 2}, "cp, and this layout has none"),
        ({"schedule": "gpipe"}, {"pp": 2}, {"dp_replicate": 2}, "pp, and this layout has none"),
        ({"batchnorm": "local"}, {"cp": 2}, {"tp": 2}, "several data-parallel ranks, and this layout has one"),
    ],
)
def test_keys_without_what_they_are_for_are_remarked_on(
    keys: dict[str, Any], used: dict[str, Any], unused: dict[str, Any], because: str
) -> None:
    assert idle(**keys, **{"dp_replicate": 2, **used}) == idle(**unused) == []
    (found,) = idle(**keys, **unused)
    assert all(key in found.partition(" no effect")[0] for key in keys) and f" for {because}" in found


class Normed(Curve):
    def model(self) -> Any:
        return nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))


def said_of(task: Any, *overrides: str) -> list[str]:
    session = session_of(task, config_of("ddp", *SMALL, *overrides))
    return [decision.what for decision in session.decisions if "no effect" in decision.what]


@pytest.mark.distributed
def test_a_session_knows_its_model_and_its_step(pool: Pools) -> None:
    def what(task: Any, override: str) -> Any:
        return pool(2).run(said_of, task, override)[0]

    assert what(Normed(), "layout.batchnorm=local") == []
    assert what(Curve(), "layout.batchnorm=local") == ["layout.batchnorm has no effect"]
    assert what(Curve(), "layout.static_graph=true") == []
    assert what(Gan(), "layout.static_graph=true") == ["layout.static_graph has no effect"]
