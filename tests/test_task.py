"""The Task: its settings, and the rules by which forward's inputs and the count of targets are found in a batch."""

from collections import UserDict
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch
from torch import nn

from allranks.errors import TaskError
from allranks.task import Task, has_step, load_task, resolve_inputs, resolve_targets


class Plain(Task):
    """Nothing overridden but what is required."""

    def model(self) -> nn.Module:
        return nn.Linear(3, 2)

    def dataset(self, split: str) -> Any:
        return [(torch.zeros(3), 0)] * 4 if split == "train" else None

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(output, batch[1], reduction="sum")


class Settable(Plain):
    """One setting of each kind."""

    shared: ClassVar[str] = "no setting"
    _private: int = 0
    width: int = 128
    rate: float = 0.5
    name: str = "a"
    flag: bool = False
    sizes: list[int] = [1]
    mode: Literal["fast", "exact"] = "fast"
    text: str | None = None
    folder: Path = Path("here")
    plain = 3


class HuggingFaceLike(nn.Module):
    """forward with the names of a Hugging Face model."""

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None, **others: Any) -> Any:
        return input_ids


def test_settings_take_the_type_of_their_annotation() -> None:
    task = Settable(
        width="256", rate="1e-3", name=7, flag="true", sizes="[2, 3]", mode="exact", text="*.py", folder="x"
    )
    values = (task.width, task.rate, task.name, task.flag, task.sizes, task.mode, task.text, task.folder)
    assert values == (256, 1e-3, "7", True, [2, 3], "exact", "*.py", Path("x"))
    assert task.settings == {
        "width": 256,
        "rate": 1e-3,
        "name": "7",
        "flag": True,
        "sizes": [2, 3],
        "mode": "exact",
        "text": "*.py",
        "folder": "x",
    }
    assert Settable().settings["width"] == 128
    assert Settable.width == 128


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"widht": 3}, "no setting 'widht'; did you mean 'width'"),
        ({"zzz": 3}, "no setting 'zzz'; it has width, rate"),
        ({"plain": 3}, "annotate the attribute"),
        ({"shared": "x"}, "no setting 'shared'"),
        ({"_private": 1}, "no setting '_private'"),
        ({"width": "4.5"}, r"task.width='4.5' does not fit width: int of Settable"),
        ({"width": "many"}, "valid integer"),
        ({"mode": "slow"}, "'fast' or 'exact'"),
    ],
)
def test_a_setting_that_does_not_fit_is_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(TaskError, match=says):
        Settable(**settings)


def test_a_setting_without_a_value_or_with_a_type_no_file_can_hold_is_refused() -> None:
    class Needs(Plain):
        path: str

    class Odd(Plain):
        net: nn.Module = nn.Linear(1, 1)

    with pytest.raises(TaskError, match=r"Needs needs a value for path: give task.path="):
        Needs()
    assert Needs(path="x").settings == {"path": "x"}
    with pytest.raises(TaskError, match="Module in Odd can be no setting"):
        Odd(net=3)


def test_a_missing_method_is_named() -> None:
    class Half(Task):
        def model(self) -> nn.Module:
            return nn.Linear(1, 1)

    class Stepping(Half):
        def dataset(self, split: str) -> Any:
            return [1]

        def step(self, models: Any, batch: Any) -> Any:
            yield "", torch.zeros(()), 1

    with pytest.raises(TaskError, match=r"Half lacks dataset\(self, split\) and loss\(self, output, batch\)"):
        Half()
    assert has_step(Stepping())
    assert not has_step(Plain())


def test_the_defaults_of_the_optional_methods() -> None:
    task = Plain()
    assert task.metrics(None, None) == {}
    assert task.optimizer([]) is None
    assert task.summary(nn.Linear(1, 1)) == ""
    assert task.state_dict() == {}
    batch = task.collate([(torch.zeros(3), 1), (torch.ones(3), 2)])
    assert batch[0].shape == (2, 3)
    assert batch[1].tolist() == [1, 2]


x, y = torch.randn(4, 3), torch.tensor([1, -100, 0, 1])
TOKENS = {"input_ids": torch.zeros(2, 5, dtype=torch.long), "attention_mask": torch.ones(2, 5)}


def test_inputs_of_a_pair_and_of_a_dict_with_x() -> None:
    for batch in ((x, y), [x, y]):
        resolved = resolve_inputs(Plain(), nn.Linear(3, 2), batch)
        assert resolved.call(batch)[0] is x
        assert "element 0" in resolved.because
    resolved = resolve_inputs(Plain(), nn.Linear(3, 2), {"x": x, "input": y})
    assert resolved.call({"x": x, "input": y})[0] is x
    assert 'batch["x"]' in resolved.because
    assert resolve_inputs(Plain(), nn.Linear(3, 2), {"x": x, "y": y}).because == 'batch["x"]'


@pytest.mark.parametrize("kind", [dict, UserDict])
def test_inputs_that_forward_names(kind: type) -> None:
    batch = kind({**TOKENS, "labels": y, "index": x})
    resolved = resolve_inputs(Plain(), HuggingFaceLike(), batch)
    assert list(resolved.call(batch)) == ["input_ids", "attention_mask", "labels"]
    assert "HuggingFaceLike.forward names: input_ids, attention_mask, labels" in resolved.because
    later = kind({"input_ids": TOKENS["input_ids"]})
    assert list(resolved.call(later)) == ["input_ids"]


def test_the_tasks_own_inputs_come_first() -> None:
    class Own(Plain):
        answer: ClassVar[Any] = None

        def inputs(self, batch: Any) -> Any:
            return type(self).answer

    def arguments(answer: Any) -> Any:
        Own.answer = answer
        resolved = resolve_inputs(Own(), nn.Linear(3, 2), (x, y))
        assert resolved.because == "the Task says so"
        return resolved.call((x, y))

    assert arguments((y, x)) == (y, x)
    assert arguments([y, x]) == (y, x)
    assert arguments({"input": y}) == {"input": y}
    assert arguments(y)[0] is y
    with pytest.raises(TaskError, match=r"Own.inputs returned 3: expected a tuple or dict"):
        arguments(3)


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        (x, r"a batch is a float32 tensor \[4, 3\], neither a pair nor a dict"),
        ((x, x, y), r"a tuple of 3 .* neither a pair nor a dict"),
        (
            {"image": x, "y": y},
            r"\{image: a float32 tensor \[4, 3\], y: .* needs input: write inputs\(self, batch\) in Plain",
        ),
    ],
)
def test_a_batch_without_any_inputs_is_refused(batch: Any, says: str) -> None:
    with pytest.raises(TaskError, match=says):
        resolve_inputs(Plain(), nn.Linear(3, 2), batch)


def test_a_forward_that_names_nothing_is_refused() -> None:
    class Anything(nn.Module):
        def forward(self, *args: Any, **others: Any) -> Any:
            return args

    with pytest.raises(TaskError, match="names none of these"):
        resolve_inputs(Plain(), Anything(), {"image": x})
    with pytest.raises(TaskError, match=r"Bilinear.forward.* needs input2: write inputs"):
        resolve_inputs(Plain(), nn.Bilinear(3, 3, 2), {"input1": x, "y": y})


@pytest.mark.parametrize(
    ("batch", "count", "because"),
    [
        ({"x": x, "y": y}, 3, 'labels in batch["y"], those not -100'),
        ({**TOKENS, "labels": torch.tensor([[1, 2, -100], [-100, 4, 5]])}, 4, 'labels in batch["labels"]'),
        ((x, y), 3, "labels in element 1"),
        ([x, y.to(torch.uint8)], 4, "labels in element 1"),
        ((x, torch.randn(4, 2)), 4, "length of the batch"),
        ({"x": x, "y": torch.ones(4, 2)}, 4, "length of the batch"),
        ({"x": x, "y": torch.ones(4, 2).bool()}, 4, "length of the batch"),
        ({"a": {"b": [x, x]}, "scale": torch.tensor(2.0)}, 4, "length of the batch"),
        (x, 4, "length of the batch"),
        ((x, x, y), 4, "length of the batch"),
    ],
)
def test_targets_by_the_rules(batch: Any, count: int, because: str) -> None:
    resolved = resolve_targets(Plain(), batch)
    assert resolved.call(batch) == count
    assert because in resolved.because


def test_targets_are_counted_in_each_batch_anew() -> None:
    resolved = resolve_targets(Plain(), (x, y))
    assert resolved.call((x[:1], torch.tensor([-100]))) == 0
    lengths = resolve_targets(Plain(), (x, x))
    assert lengths.call((x[:2], x[:2])) == 2


def test_the_tasks_own_targets_come_first_and_must_be_a_count() -> None:
    class Own(Plain):
        answer: ClassVar[Any] = None

        def targets(self, batch: Any) -> int:
            answer: int = type(self).answer
            return answer

    def count(answer: Any) -> Any:
        Own.answer = answer
        return resolve_targets(Own(), (x, y)).call((x, y))

    assert resolve_targets(Own(), (x, y)).because == "the Task says so"
    assert count(17) == 17
    assert count(torch.tensor(5)) == 5
    assert count(np.int64(6)) == 6 and type(count(np.int64(6))) is int
    for wrong in (1.5, True, None, -1, torch.ones(2), torch.tensor(1.5)):
        with pytest.raises(TaskError, match=r"Own.targets returned .* expected the number of targets"):
            count(wrong)


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        ({"x": x, "edges": torch.zeros(9)}, "its tensors have different lengths"),
        ({"x": "text"}, "it holds no tensor"),
        (torch.tensor(1.0), "it holds no tensor"),
    ],
)
def test_a_batch_without_a_length_is_refused(batch: Any, says: str) -> None:
    with pytest.raises(TaskError, match=says):
        resolve_targets(Plain(), batch)


def test_load_task_gives_the_settings_to_the_class(tmp_path: Path) -> None:
    file = tmp_path / "with_settings.py"
    file.write_text(
        "from allranks.task import Task\n"
        "class Mine(Task):\n"
        "    width: int = 1\n"
        "    def __init__(self, **settings):\n"
        "        super().__init__(**settings)\n"
        "        self.doubled = 2 // self.width * self.width ** 2\n"
        "    def model(self): ...\n"
        "    def dataset(self, split): ...\n"
        "    def loss(self, output, batch): ...\n"
    )
    task = load_task(str(file), {"width": "2"})
    assert (task.settings, vars(task)["doubled"]) == ({"width": 2}, 4)
    assert repr(task) == "Mine(width=2)"
    with pytest.raises(TaskError, match=r"did you mean 'width'"):
        load_task(str(file), {"wdth": 2})
    with pytest.raises(TaskError, match=r"(?s)cannot be made .*line 6.*self\.doubled.*ZeroDivisionError"):
        load_task(str(file), {"width": 0})


def test_a_task_that_ends_the_process_while_it_is_made_is_refused(tmp_path: Path) -> None:
    """A command would end with its code: 0 for "equal" or "it fits"."""
    file = tmp_path / "ending_task.py"
    file.write_text(
        "import sys\n"
        "from allranks.task import Task\n"
        "class Mine(Task):\n"
        "    def __init__(self, **settings): sys.exit(0)\n"
        "    def model(self): ...\n"
        "    def dataset(self, split): ...\n"
        "    def loss(self, output, batch): ...\n"
    )
    with pytest.raises(TaskError, match=r"(?s)Mine cannot be made .*line 4.*sys.exit\(0\).*\nSystemExit: 0"):
        load_task(str(file))
