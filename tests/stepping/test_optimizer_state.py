"""State of an optimizer, leaf by leaf: lists and dicts in it are kept, and what cannot be is refused by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from allranks.errors import TaskError
from allranks.parameter_map import Box, Entry
from allranks.stepping.optimizer_state import check_leaves, leaves_of, put_numbers
from allranks.training.proof import prove
from tests.distributed.pool import Pools
from tests.distributed.sessions import config_of, session_of, step_through
from tests.distributed.tasks import Tiny
from tests.training.snapshots import check_exchange, contents_of, find, saver_of


class Nesting(torch.optim.Optimizer):
    """Momentum that lies in a list and a dict, beside what is whole on every rank, numbers, None and a word."""

    def __init__(self, parameters: Any, size: int = 2) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.size = size

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[parameter]
            if not state:
                state["averages"] = [{"slow": torch.zeros_like(parameter)}, torch.zeros_like(parameter)]
                state["scale"] = (torch.zeros(self.size, 2), [])
                state["told"] = [0, None, "warm", 1.0]
            slow, fast = state["averages"][0]["slow"], state["averages"][1]
            slow.mul_(0.9).add_(parameter.grad, alpha=0.1)
            fast.mul_(0.5).add_(parameter.grad, alpha=0.5)
            state["scale"][0].add_(1.0)
            state["told"][0] += 1
            state["told"][3] *= 0.5
            factor = state["told"][0] * state["told"][3] + state["scale"][0].sum().item()
            parameter.add_(slow + fast, alpha=-self.param_groups[0]["lr"] * factor)


class Nested(Tiny):
    def optimizer(self, parameters: Any) -> Any:
        return Nesting(parameters)


class WithoutFactors(Tiny):
    """Parts that do not know the whole may have none."""

    def optimizer(self, parameters: Any) -> Any:
        return Nesting(parameters, 0)


NAMES = ("averages[0]['slow']", "averages[1]", "scale[0]", "told[0]", "told[3]")


def test_leaves_have_the_names_of_their_paths() -> None:
    state = {"a": [1, {"b": None}], "c": torch.ones(2), "d": [], "e": (torch.zeros(1),)}
    assert [name for name, _ in leaves_of(state)] == ["a[0]", "a[1]['b']", "c", "e[0]"]


def test_numbers_are_put_back_beside_tensors() -> None:
    tensor = torch.ones(2)
    state: dict[Any, Any] = {"a": [1, {"b": None}, tensor], "count": 2, "c": tensor}
    put_numbers(state, {"a[0]": 3, "count": 4})
    assert state["a"][:2] == [3, {"b": None}] and state["count"] == 4
    assert state["a"][2] is tensor and state["c"] is tensor


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("task", "one", "other"),
    [
        (Nested(), "fsdp", "ddp"),
        (Nested(), "single", "fsdp"),
        (WithoutFactors(), "dp_shard=2,sharding=optimizer", "fsdp"),
        (WithoutFactors(), "ddp", "dp_shard=2,sharding=optimizer"),
    ],
)
def test_nested_state_goes_from_layout_to_layout(pool: Pools, tmp_path: Path, task: Any, one: str, other: str) -> None:
    """What has the parameter's shape is cut as it is; all else is whole, whoever saves it."""
    configs = (config_of(one), 1 + (one != "single")), (config_of(other), 2)
    found = check_exchange(pool, tmp_path, task, *configs, 3)
    assert found["optimizer.averages[0]['slow'].0.weight"].shape == found["0.weight"].shape == (7, 5)
    scale = found["optimizer.scale[0].0.weight"]
    assert torch.equal(scale, torch.full((2 if isinstance(task, Nested) else 0, 2), 3.0))


def test_a_resume_goes_on_as_the_run_does(tmp_path: Path) -> None:
    """Numbers count, too: the update depends on two of them."""
    session, contents = contents_of(Nested(), config_of("single", steps=6), 3)
    saver_of(session, contents, tmp_path).save(3)
    assert prove(find(tmp_path, session), session, contents) is None
    numbers = session.optimizers.numbers()
    assert {name for name in numbers if name.endswith(".0.bias")} == {f"optimizer.{name}.0.bias" for name in NAMES[3:]}
    expected = [stepped.loss for stepped in step_through(session, 3)]
    resumed, into = contents_of(Nested(), config_of("single", steps=6), 0)
    into.load(find(tmp_path, resumed))
    assert resumed.optimizers.numbers() == numbers
    assert [stepped.loss for stepped in step_through(resumed, 3)] == expected


def test_the_proof_misses_a_leaf_that_was_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session, contents = contents_of(Nested(), config_of("single"), 1)
    numbers = session.optimizers.numbers()
    del numbers["optimizer.told[3].0.weight"]
    monkeypatch.setattr(session.optimizers, "numbers", lambda: numbers)
    parts = [part for part in session.optimizers.parts() if part[0].name != "optimizer.averages[0]['slow'].0.weight"]
    monkeypatch.setattr(session.optimizers, "parts", lambda: parts)
    saver_of(session, contents, tmp_path).save(1)
    verdict = prove(find(tmp_path, session), session, contents)
    assert verdict is not None
    assert verdict.what.endswith("optimizer.averages[0]['slow'].0.weight is not in it")
    assert verdict.evidence == ("optimizer.told[3].0.weight is not in it",)


ENTRY = Entry("0.weight", (2, 3), "float32", Box.whole((2, 3)), (0,))


def checked(state: dict[Any, Any], then: Callable[[Any], None] = lambda state: None) -> None:
    parameter = nn.Parameter(torch.zeros(2, 3))
    optimizer, forms = Nesting([parameter]), dict[Any, Any]()
    optimizer.state[parameter] = state
    check_leaves(optimizer, parameter, ENTRY, forms)
    then(state)
    check_leaves(optimizer, parameter, ENTRY, forms)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"projector": nn.Identity()}, "keeps 'projector' of 0.weight as a Identity, which no checkpoint can hold"),
        ({"a": [torch.ones(1), {3}]}, r"keeps 'a\[1\]' of 0.weight as a set, which"),
        ({"a": {"b": 1}, "a['b']": 2}, r"""keeps "a\['b'\]" of 0.weight twice"""),
    ],
)
def test_what_no_checkpoint_can_hold_is_named(state: dict[Any, Any], words: str) -> None:
    with pytest.raises(TaskError, match=f"Nesting {words}"):
        checked(state)


@pytest.mark.parametrize(
    ("change", "leaf"),
    [
        (lambda state: state.update(q=[torch.ones(2)]), "q"),
        (lambda state: state["seen"].append(0.5), r"seen\[1\]"),
        (lambda state: state.update(late=1), "late"),
        (lambda state: state.pop("step"), "step"),
        (lambda state: state.update(step=torch.ones(3)), "step"),
        (lambda state: state.update(phase="hot"), "phase"),
        (lambda state: state.update(q=0.5), "q"),
    ],
)
def test_state_that_takes_its_form_later_is_refused(change: Callable[[Any], None], leaf: str) -> None:
    """A resume makes it anew by one update, and could not fill it."""
    with pytest.raises(TaskError, match=f"Nesting keeps '{leaf}' of 0.weight in another form than after its first"):
        checked({"q": None, "seen": [0.5], "step": torch.ones(()), "phase": "warm"}, change)


def test_values_may_change() -> None:
    checked({"count": 0, "a": [torch.ones(2)]}, lambda state: state.update(count=0.5, a=[torch.zeros(2)]))


class Rows(torch.optim.SGD):
    """Keeps a norm for each row, which under FSDP knows that it is cut, and not as the parameter is."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            self.state[parameter]["rows"] = parameter.grad.square().sum(-1)
        super().step(closure)


class OfRows(Tiny):
    def optimizer(self, parameters: Any) -> Any:
        return Rows([p for p in parameters if p.dim() != 1] + [p for p in parameters if p.dim() == 1], lr=0.1)


def refusal_of_rows(layout: str) -> str:
    session = session_of(OfRows(), config_of(layout))
    try:
        for _ in step_through(session, 1):
            pass
    except TaskError as error:
        return str(error)
    cut = [value for state in session.optimizers.by_name[""].state.values() for value in state.values()]
    assert not any(isinstance(value, DTensor) for value in cut)
    return ""


@pytest.mark.distributed
def test_what_is_cut_in_a_way_of_its_own_is_refused(pool: Pools) -> None:
    assert pool(2).run(refusal_of_rows, "ddp") == [""] * 2
    for said in pool(2).run(refusal_of_rows, "fsdp"):
        assert said.startswith(
            "Rows keeps 'rows' of 0.weight cut as [Shard(dim=0)], and the parameter otherwise, which"
        )
