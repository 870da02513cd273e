"""The optimizers of a run: built, linked, moved by the schedule, and seen as logical tensors."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from allranks.config import OptimizerConfig
from allranks.errors import TaskError
from allranks.parallel.spread import Spread
from allranks.parameter_map import Box
from allranks.stepping.optimizer import Optimizers, build_optimizers, make_optimizer
from tests.distributed.pool import Pools
from tests.distributed.sessions import config_of, session_of
from tests.distributed.tasks import Tiny

Build = Callable[[], Any]


class Given(Tiny):
    """A model given by the test."""

    _build: Build

    def model(self) -> Any:
        return self._build()

    def step(self, models: Any, batch: Any) -> Any:
        yield from ()


def spread(build: Build) -> Spread:
    """One process; a Task with a step of its own is not run at the start."""
    task = Given.__new__(Given)
    task._build, task.kind = build, "mlp"
    return session_of(task, config_of("single", precision="float32")).spread


def optimizers(build: Build, make: Callable[[Any], Any] = lambda parameters: None, **config: Any) -> Optimizers:
    return build_optimizers(spread(build), OptimizerConfig(**config), make)


def pair() -> dict[str, nn.Module]:
    return {"g": nn.Linear(2, 2), "d": nn.Linear(2, 1)}


def test_from_the_config() -> None:
    parameters = [nn.Parameter(torch.ones(2))]
    adamw = make_optimizer(parameters, OptimizerConfig(name="adamw", lr=0.5, weight_decay=0.25, beta1=0.1, beta2=0.2))
    assert type(adamw) is torch.optim.AdamW
    (group,) = adamw.param_groups
    assert (group["lr"], group["weight_decay"], group["betas"], group["fused"]) == (0.5, 0.25, (0.1, 0.2), True)
    assert type(make_optimizer(parameters, OptimizerConfig(name="adam"))) is torch.optim.Adam
    sgd = make_optimizer(parameters, OptimizerConfig(name="sgd", momentum=0.9))
    assert (type(sgd), sgd.param_groups[0]["momentum"]) == (torch.optim.SGD, 0.9)


def test_one_a_module_and_none_for_a_frozen_one() -> None:
    found = optimizers(lambda: pair() | {"critic": nn.Linear(2, 2).requires_grad_(False)})
    assert list(found.by_name) == ["g", "d"]
    assert [tuple(p.shape) for p in found.parameters("d")] == [(1, 2), (1,)]


def test_nothing_to_train_is_refused() -> None:
    with pytest.raises(TaskError, match="no trainable parameter"):
        optimizers(lambda: nn.Linear(2, 2).requires_grad_(False))
    with pytest.raises(TaskError, match="no trainable parameter"):
        optimizers(nn.ReLU)


def test_the_tasks_own() -> None:
    seen: list[Any] = []

    def make(parameters: Any) -> torch.optim.Optimizer:
        seen.append(parameters)
        return torch.optim.Adagrad(parameters, lr=0.5)

    found = optimizers(lambda: nn.Linear(2, 2), make)
    assert list(found.by_name) == [""]
    assert [len(parameters) for parameters in seen] == [2]

    def make_two(parameters: Any) -> dict[str, torch.optim.Optimizer]:
        return {which: torch.optim.SGD(some) for which, some in parameters.items()}

    assert list(optimizers(pair, make_two).by_name) == ["g", "d"]


@pytest.mark.parametrize("made", [3, {}, {"a": 3}, [torch.optim.SGD]])
def test_what_is_no_optimizer_is_refused(made: Any) -> None:
    with pytest.raises(TaskError, match=r"optimizer\(\) returned (int|dict|list): return a torch optimizer"):
        optimizers(lambda: nn.Linear(2, 2), lambda parameters: made)


def test_one_that_needs_a_closure_is_refused() -> None:
    with pytest.raises(TaskError, match=r"^LBFGS.step\(\) needs a closure, and a step is made once"):
        optimizers(lambda: nn.Linear(2, 2), torch.optim.LBFGS)


def test_one_whose_step_a_scheduler_has_wrapped_needs_none() -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        made = torch.optim.AdamW(parameters)
        torch.optim.lr_scheduler.StepLR(made, 10)
        return made

    optimizers(lambda: nn.Linear(2, 2), make)


def test_a_parameter_left_out_is_named() -> None:
    with pytest.raises(TaskError, match=r"leaves out 1 trainable parameter\(s\), first 'bias'"):
        optimizers(lambda: nn.Linear(2, 2), lambda parameters: torch.optim.SGD(parameters[:1]))


def test_a_stranger_is_seen() -> None:
    """A deep copy, or the parameters of the model before it was spread."""
    with pytest.raises(TaskError, match=r"1 tensor\(s\) that are not the model's parameters \(first: shape \(3,\)\)"):
        optimizers(
            lambda: nn.Linear(2, 2), lambda parameters: torch.optim.SGD([*parameters, nn.Parameter(torch.ones(3))])
        )


def test_a_step_moves_every_group_by_its_own_peak() -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        weight, bias = parameters
        return torch.optim.SGD([{"params": [weight], "lr": 1.0}, {"params": [bias], "lr": 0.5}])

    found = optimizers(lambda: nn.Linear(2, 2), make)
    weight, bias = found.parameters("")
    before = weight.detach().clone(), bias.detach().clone()
    for factor in (0.5, 0.25):
        weight.grad, bias.grad = torch.ones_like(weight), torch.ones_like(bias)
        assert found.step("", factor) == factor
    assert torch.allclose(weight, before[0] - 0.75)
    assert torch.allclose(bias, before[1] - 0.375)
    assert weight.grad is None and bias.grad is None


def test_several_over_one_model_step_together() -> None:
    """One module under two optimizers (Muon and AdamW, say), without a step of the Task's own."""

    def make(parameters: Any) -> dict[str, torch.optim.Optimizer]:
        return {"weights": torch.optim.SGD(parameters[:1], lr=1.0), "biases": torch.optim.SGD(parameters[1:], lr=0.5)}

    found = optimizers(lambda: nn.Linear(2, 2), make)
    assert [tuple(p.shape) for p in found.parameters("")] == [(2, 2), (2,)]
    before = [p.detach().clone() for p in found.parameters("")]
    for parameter in found.parameters(""):
        parameter.grad = torch.ones_like(parameter)
    assert found.step("", 0.5) == 0.5
    moved = [(old - new).flatten()[0].item() for old, new in zip(before, found.parameters(""), strict=True)]
    assert moved == pytest.approx([0.5, 0.25])
    assert [entry.name for entry, _ in found.parts()] == []


MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: make_optimizer(p, OptimizerConfig(name="adamw")),
    "sgd": lambda p: make_optimizer(p, OptimizerConfig(name="sgd", momentum=0.9)),
    "plain": lambda p: make_optimizer(p, OptimizerConfig(name="sgd", momentum=0.0)),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True, weight_decay=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, weight_decay=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, weight_decay=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, weight_decay=0.1),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_state_can_be_read_back_into_a_fresh_run(kind: str) -> None:
    """One parameter never gets a gradient: it has no state afterwards either, as in the run that was saved."""

    def train(found: Optimizers, num_steps: int) -> None:
        used = found.parameters("")[:2]
        for step in range(num_steps):
            for parameter in used:
                parameter.grad = torch.full_like(parameter, 0.5 + step)
            found.step("", 0.5)

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, bias=False))

    old = optimizers(build, MAKERS[kind])
    train(old, 3)
    stored = {entry.name: tensor.clone() for entry, tensor in old.parts()}
    values = [p.detach().clone() for p in old.parameters("")]

    new = optimizers(build, MAKERS[kind])
    settings = [dict(group, params=None) for group in new.by_name[""].param_groups]
    new.materialise()
    assert [dict(group, params=None) for group in new.by_name[""].param_groups] == settings
    fresh = [p.detach() for p in optimizers(build, MAKERS[kind]).parameters("")]
    assert all(torch.equal(a, b) for a, b in zip(new.parameters(""), fresh, strict=True)), "a parameter moved"
    assert all(p.grad is None for p in new.parameters(""))
    new.forget_unless(lambda name: name in stored)
    found = dict((entry.name, tensor) for entry, tensor in new.parts())
    assert found.keys() == stored.keys()
    for name, tensor in found.items():
        tensor.copy_(stored[name])
    new.load_numbers(old.numbers())
    with torch.no_grad():
        for parameter, value in zip(new.parameters(""), values, strict=True):
            parameter.copy_(value)
    train(old, 2)
    train(new, 2)
    assert all(torch.equal(a, b) for a, b in zip(old.parameters(""), new.parameters(""), strict=True))


def test_names_of_the_state() -> None:
    found = optimizers(pair)
    found.materialise()
    names = [entry.name for entry, _ in found.parts()]
    assert names[:3] == ["optimizer.g.step.g.weight", "optimizer.g.exp_avg.g.weight", "optimizer.g.exp_avg_sq.g.weight"]
    single = optimizers(lambda: nn.Linear(2, 2))
    single.materialise()
    entries = {entry.name: entry for entry, _ in single.parts()}
    assert entries["optimizer.exp_avg.weight"].shape == (2, 2)
    assert entries["optimizer.step.weight"].shape == ()


class Counting(torch.optim.SGD):
    """Keeps a plain number beside its tensors."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["count"] = self.state[parameter].get("count", 0) + 1


def test_plain_numbers_of_the_state_travel_beside_the_tensors() -> None:
    old, new = (optimizers(lambda: nn.Linear(2, 2), lambda p: Counting(p, momentum=0.5)) for _ in range(2))
    for _ in range(3):
        for parameter in old.parameters(""):
            parameter.grad = torch.ones_like(parameter)
        old.step("", 1.0)
    assert old.numbers() == {"optimizer.count.weight": 3, "optimizer.count.bias": 3}
    new.materialise()
    new.load_numbers(old.numbers())
    assert new.numbers() == old.numbers()


class Adapting(torch.optim.SGD):
    """Counts its steps and estimates a rate in its groups, as Prodigy and schedule-free optimizers do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["estimates"] = [*group.get("estimates", []), group["k"] / 4]
            group["weight_decay"] += 0.5
        super().step(closure)


def test_what_an_optimizer_changes_in_its_groups_travels_and_what_it_does_not_is_the_codes() -> None:
    old, new = (optimizers(lambda: nn.Linear(2, 2), partial(Adapting, momentum=m)) for m in (0.5, 0.25))
    for _ in range(3):
        for parameter in old.parameters(""):
            parameter.grad = torch.ones_like(parameter)
        old.step("", 1.0)
    changed = {"k": 3, "estimates": [0.25, 0.5, 0.75], "weight_decay": 1.5}
    assert old.numbers() == {f"optimizer.group.0.{key}": value for key, value in changed.items()}
    new.materialise()
    new.load_numbers(old.numbers())
    (group,) = new.by_name[""].param_groups
    assert {key: group[key] for key in changed} == changed and group["momentum"] == 0.25


class Hoarding(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.param_groups[0]["seen"] = torch.ones(2)


def test_what_no_checkpoint_can_hold_is_refused() -> None:
    found = optimizers(lambda: nn.Linear(2, 2), Hoarding)
    assert found.numbers() == {}
    found.step("", 1.0)
    with pytest.raises(TaskError, match="Hoarding keeps 'seen' of type Tensor in its param_groups"):
        found.numbers()


class Tallying(torch.optim.SGD):
    """Keeps a word beside the parameters' states."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.state["tally\n"] = 1  # type: ignore[index]


def test_state_that_is_of_no_parameter_is_refused() -> None:
    found = optimizers(lambda: nn.Linear(2, 2), Tallying)
    with pytest.raises(TaskError, match=r"^Tallying keeps 'tally.n' in its state beside the parameters', and no"):
        found.step("", 1.0)


def test_a_scheduler_that_the_task_makes_leaves_the_rate_to_the_schedule() -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        made = torch.optim.SGD(parameters, lr=0.5)
        torch.optim.lr_scheduler.LambdaLR(made, lambda step: step / 10)
        return made

    found = optimizers(lambda: nn.Linear(2, 2), make)
    assert found.peaks == {"": [0.5]}
    assert [said.what for said in found.decisions] == [
        "the learning rate of SGD is 0.5 at the top of the schedule, and not 0"
    ]


def look() -> Any:
    """Under FSDP: the fused groups, the state of a cut parameter, and that of one without dims."""
    session = session_of(Tiny(kind="scalars"), config_of("fsdp", "optimizer.name=adamw", precision="float32"))
    found = session.optimizers
    groups = found.by_name[""].param_groups
    kinds = [{isinstance(p, DTensor) for p in group["params"]} for group in groups]
    before = {name: session.spread.local(name).clone() for name in session.spread.trainable()}
    found.materialise()
    moved = [name for name, value in before.items() if not torch.equal(value, session.spread.local(name))]
    parts = {entry.name: (entry, tensor) for entry, tensor in found.parts()}
    assert not any(isinstance(tensor, DTensor) for _, tensor in parts.values())
    chosen = ("exp_avg.first.weight", "step.first.weight", "exp_avg.blocks.0.gain")
    return kinds, moved, [(parts[f"optimizer.{name}"][0], parts[f"optimizer.{name}"][1].shape) for name in chosen]


@pytest.mark.distributed
def test_under_fsdp_state_is_cut_as_its_parameter_is(pool: Pools) -> None:
    for rank, (kinds, moved, found) in enumerate(pool(2).run(look)):
        assert kinds == [{False}, {True}], "a fused kernel takes one kind"
        assert moved == []
        (cut, cut_shape), (step, _), (scalar, _) = found
        rows = (4, 3)[rank]  # of 7
        assert (cut.shape, cut.box, tuple(cut_shape)) == ((7, 5), Box((4 * rank, 0), (rows, 5)), (rows, 5))
        assert cut.holders == (rank,)
        assert (step.shape, step.box, step.holders) == ((), Box((), ()), (0, 1))
        assert (scalar.shape, scalar.holders) == ((), (0, 1))


def test_an_update_that_is_left_out_counts_as_begun() -> None:
    found = optimizers(lambda: nn.Linear(2, 2))
    for skipped in (None, torch.ones(()), torch.zeros(())):
        for parameter in found.parameters(""):
            parameter.grad = torch.ones_like(parameter)
        found.update("", skipped)
    assert found.num_updates == 3
