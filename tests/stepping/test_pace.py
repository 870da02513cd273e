"""The rate is the schedule's at these samples, and all ranks make the same steps with the same settings."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from allranks.errors import TaskError
from allranks.stepping.agreement import Pending
from allranks.stepping.pace import compare_paces, explain_pace
from allranks.stepping.scaler import Scaler
from tests.distributed.pool import Pools
from tests.distributed.sessions import config_of, session_of, step_through
from tests.distributed.tasks import Tiny

SETTINGS = ("train.global_batch=6", "schedule.name=linear", "schedule.warmup=2", "schedule.steps=9")


def noticed(move: Any, layout: str = "single", *overrides: str, kind: str = "mlp", steps: int = 5) -> dict[str, Any]:
    """What the watch of a session has noticed: by the sentinel (kind, words); `move` is called after each step."""
    session = session_of(Tiny(kind=kind), config_of(layout, *SETTINGS, *overrides, steps=steps))
    for number, _ in enumerate(step_through(session, steps), start=1):
        move(session, number)
    return {name: (one.kind, one.what) for name, one in session.posted.watch.noticed.items()}


def rest(session: Any, number: int) -> None:
    pass


def scheduled(session: Any, number: int) -> None:
    """As a scheduler of torch's does that nobody has asked for."""
    for group in session.optimizers.by_name[""].param_groups:
        group["lr"] *= 0.9 if number == 3 else 1.0


@pytest.mark.parametrize("overrides", [(), ("train.micro_batch=2",), ("schedule.name=constant",)])
def test_a_run_that_nobody_disturbs_is_silent(overrides: tuple[str, ...]) -> None:
    assert noticed(rest, "single", *overrides) == {}


def test_whoever_moves_the_rate_is_found_in_the_step_after() -> None:
    found = noticed(scheduled)
    assert list(found) == ["schedule"]
    kind, what = found["schedule"]
    assert kind == "rate_moved"
    assert what.startswith(
        "step 4: something besides the schedule moves the learning rate: group 0 of AdamW has 0.0009, "
    )
    assert what.endswith("the schedule says 0.001 after 12 samples")


def test_a_step_that_takes_another_factor_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from allranks.stepping.optimizer import Optimizers

    right = Optimizers.step

    def stepped_twice(self: Any, which: str, factor: float, *rest: Any) -> float:
        return right(self, which, factor * (0.5 if factor < 1 else 1.0), *rest)

    monkeypatch.setattr(Optimizers, "step", stepped_twice)
    assert noticed(rest)["schedule"][0] == "rate_moved"


def test_a_rate_that_is_a_tensor_is_not_looked_at() -> None:
    def replace(session: Any, number: int) -> None:
        for group in session.optimizers.by_name[""].param_groups:
            group["lr"] = torch.tensor(7.0)

    assert noticed(replace) == {}


def alone(layout: str, decay: bool, path: tuple[str, ...] = ()) -> Any:
    """In a worker: after 3 steps, what the agreement of the last says, and how it is explained."""
    session = session_of(Tiny(), config_of(layout, *SETTINGS))
    pending: Pending | None = None
    for stepped in step_through(session, 3):
        pending = stepped.outcome.pending
        if decay and dist.get_rank() == 1:
            session.optimizers.by_name[""].param_groups[0]["weight_decay"] *= 0.5
    assert pending is not None
    pending.path = path if dist.get_rank() else ()
    agreed, group = pending.read(), session.processes.world_group
    try:
        verdict = explain_pace(pending, 3, group, torch.device("cpu")) if agreed.diverged or path else None
    except TaskError as error:
        return agreed.diverged, str(error)
    return agreed.diverged, verdict if verdict is None else (verdict.kind, verdict.what)


@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["ddp", "fsdp", "tp=2"])
def test_ranks_of_one_mind_agree(pool: Pools, layout: str) -> None:
    assert pool(2).run(alone, layout, False) == [(False, None)] * 2


@pytest.mark.distributed
def test_a_setting_that_one_rank_changes_is_found(pool: Pools) -> None:
    for diverged, (kind, what) in pool(2).run(alone, "ddp", True):
        assert diverged and kind == "steps_differ"
        assert what.startswith(
            "step 3: the ranks no longer make the same steps: rank 0 has weight_decay 0.01 in group 0"
        )
        assert what.endswith("rank 1 has weight_decay 0.0025 in group 0 of AdamW")


def scaled(apart: bool) -> Any:
    """In a worker, under float16: the same, where rank 1 has moved its scale."""
    session = session_of(Tiny(), config_of("ddp", *SETTINGS, "train.precision=float16"))
    pending: Pending | None = None
    for stepped in step_through(session, 3):
        pending = stepped.outcome.pending
        if apart and dist.get_rank() == 1:
            (scaler,) = (one for one in session.beside if isinstance(one, Scaler))
            scaler.scale.fill_(2.0)
    assert pending is not None
    agreed, group = pending.read(), session.processes.world_group
    verdict = explain_pace(pending, 3, group, torch.device("cpu")) if agreed.diverged else None
    return agreed.diverged, verdict if verdict is None else (verdict.kind, verdict.what)


@pytest.mark.distributed
@pytest.mark.parametrize("apart", [False, True])
def test_scales_that_part_are_found(pool: Pools, apart: bool) -> None:
    for diverged, told in pool(2).run(scaled, apart):
        assert diverged == apart and (told is not None) == apart
        if told is not None:
            assert told[0] == "steps_differ" and told[1].endswith("rank 1 has scale 2.0")


@pytest.mark.distributed
def test_other_modules_come_before_other_paces(pool: Pools) -> None:
    for _, said in pool(2).run(alone, "ddp", True, ("blocks.1", ".")):
        assert said.startswith("in step 3 the ranks ran different modules")


def test_the_words() -> None:
    assert compare_paces(["step 3; sample 8", "step 3; sample 8"], 3) is None
    found = compare_paces(["step 3; sample 8", "step 3; sample 8", "step 3; sample 6; lr 1"], 3)
    assert found is not None and found.what.endswith("rank 0 has sample 8, rank 2 has sample 6")
    assert found.evidence == ("rank 0: step 3; sample 8", "rank 2: step 3; sample 6; lr 1")
    longer = compare_paces(["step 3", "step 3; lr 1"], 3)
    assert longer is not None and longer.what.endswith("rank 0 has none, rank 1 has lr 1")
