"""What an own loop's checkpoint holds: a resumed loop is bitwise the uninterrupted one, at any number of processes."""

from pathlib import Path
from typing import Any

import pytest
import torch

import allranks
from allranks.errors import CheckpointError
from allranks.run import Run
from allranks.training.own.state import OwnState, from_json, to_json
from tests.distributed.pool import Pools
from tests.training.own.cases import Samples, built, count, crashing, loss_of, refusal, resumable

WIDE = 400  # more than one of DDP's buckets


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("size", "layout", "settings"),
    [
        (1, "single", {"global_batch": 6}),
        (2, "ddp", {"global_batch": 6, "micro_batch": 1}),
        (4, "ddp", {"global_batch": 8, "width": WIDE}),
        (4, "ddp", {"global_batch": 12, "micro_batch": 1, "width": WIDE}),
        (2, "dp_shard=2", {"global_batch": 6, "micro_batch": 2}),
        (4, "dp_replicate=2,dp_shard=2", {"global_batch": 8}),
    ],
    ids=str,
)
def test_a_resumed_loop_is_bitwise_the_uninterrupted_one(
    pool: Pools, tmp_path: Path, size: int, layout: str, settings: dict[str, Any]
) -> None:
    whole, broken = str(tmp_path / "whole"), str(tmp_path / "broken")
    expected = pool(size).run(lambda: resumable(whole, layout, **settings), timeout=240)
    assert all(pool(size).run(lambda: crashing(broken, layout, 5, **settings), timeout=240))
    found = pool(size).run(lambda: resumable(broken, layout, **settings), timeout=240)
    for before, after in zip(expected, found, strict=True):
        assert before.keys() == after.keys()
        assert [name for name in before if not torch.equal(before[name], after[name])] == []
    lines = [
        [(s["step"], s["loss"], s["lr"], s["grad_norm"], s["ledger"]) for s in Run.open(Path(run)).steps()]
        for run in (whole, broken)
    ]
    assert lines[0] == lines[1]
    assert [line[2] for line in lines[0]] == [0.01, 0.01, 0.005, 0.005, 0.005, 0.0025, 0.0025]
    assert [event["step"] for event in Run.open(Path(broken)).events() if event["event"] == "resume"] == [4]


def test_another_number_of_processes_goes_on_with_the_same_samples(pool: Pools, tmp_path: Path) -> None:
    def case(folder: str, layout: str, steps: int) -> None:
        with allranks.join(layout=layout, precision="float64", run=folder) as world:
            model = world.parallelize(built(7))
            optimizer = world.optimizer(model, torch.optim.AdamW, lr=0.01)
            stream = world.stream(Samples(), global_batch=7, micro_batch=2, steps=steps)
            world.resume(model, optimizer, stream)
            for batch in stream:
                world.backward(loss_of(model, batch), targets=count(batch))
                world.step(optimizer, max_norm=1.0)

    pool(1).run(case, str(tmp_path / "one"), "single", 8)
    for size, layout, steps in ((2, "ddp", 2), (3, "ddp", 4), (2, "dp_shard=2", 6), (1, "single", 8)):
        pool(size).run(case, str(tmp_path / "many"), layout, steps, timeout=120)
    one, many = (Run.open(tmp_path / name).steps() for name in ("one", "many"))
    assert [(step["step"], step["samples"], step["ledger"]) for step in one] == [
        (step["step"], step["samples"], step["ledger"]) for step in many
    ]
    assert [step["loss"] for step in many] == pytest.approx([step["loss"] for step in one], rel=1e-10)


class Memory:
    """An object of the user's with a state."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def test_the_user_s_own_objects(pool: Pools, tmp_path: Path) -> None:
    def case(**others: Any) -> tuple[str, list[Any]]:
        def loop() -> None:
            with allranks.join(precision="float64", run=str(tmp_path / "run")) as world:
                model = world.parallelize(built(7))
                optimizer = world.optimizer(model, torch.optim.SGD, lr=0.01)
                stream = world.stream(Samples(), global_batch=7, steps=1)
                world.resume(model, optimizer, stream, **others)
                for batch in stream:
                    world.backward(loss_of(model, batch), targets=count(batch))
                    world.step(optimizer)

        return refusal(loop), [other.state for other in others.values() if isinstance(other, Memory)]

    def run(**others: Any) -> tuple[str, list[Any]]:
        found: tuple[str, list[Any]] = pool(1).run(lambda: case(**others))[0]
        return found

    nothing = "nothing was refused"
    kept = {"best": float("inf"), "seen": {3: [1, 2.5], 4: []}, "name": None}
    assert run(memory=object())[0].endswith("object needs state_dict() and load_state_dict(state)")
    assert run(memory=Memory({"a": torch.ones(1)}))[0] == (
        "TaskError: world.resume(memory=...): its state_dict() cannot be kept: memory.a: a torch.Tensor cannot be kept "
        "as JSON: state is made of None, bool, int, float, str, lists and dicts"
    )
    assert run(memory=Memory(kept)) == (nothing, [kept])
    assert run(memory=Memory({"best": 0})) == (nothing, [kept])
    for others in ({}, {"other": Memory(1)}):
        assert run(**others)[0] == (
            "CheckpointError: the checkpoint keeps ['memory'] besides model, optimizer and stream, but world.resume "
            f"was given {sorted(others) or 'nothing'}: give the same names"
        )


def test_json_and_back() -> None:
    value = {"a": (1, 2), "b": {1: {"c": {2.5: "x"}}}, "d": []}
    assert from_json(to_json(value)) == {"a": [1, 2], "b": {1: {"c": {2.5: "x"}}}, "d": []}


@pytest.mark.parametrize(
    ("state", "member"),
    [
        ([], "state.task.:"),
        ({"groups": {}}, "groups"),
        ({"groups": [{"settings": {}}]}, "groups.0.parameters"),
        ({"groups": [{"parameters": ["w"], "settings": {"lr": "x"}}]}, "groups.0.settings.lr"),
        (
            {"groups": [{"parameters": ["w"], "settings": {"params": 1.0}}]},
            "groups.0: Value error, params is no setting",
        ),
        ({"others": []}, "others"),
        ({"others": {"memory": {"__pairs__": 3}}}, "others"),
        ({"others": {"memory": {"__pairs__": [[1, 2, 3]]}}}, "others"),
        ({"others": {"memory": {"__pairs__": [[{}, 2]]}}}, "others"),
    ],
)
def test_what_an_own_loop_cannot_have_kept_is_named(state: Any, member: str) -> None:
    nothing: Any = None
    memory = Memory(1)
    own = OwnState(nothing, nothing, {"memory": memory}, print)
    with pytest.raises(CheckpointError, match=r"^state\.task\..*; the checkpoint is damaged$") as refused:
        own.load_state_dict(state)
    assert member in str(refused.value) and "\n" not in str(refused.value) and memory.state == 1
