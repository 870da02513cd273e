"""Tensors of an output are found in dataclasses, too, whatever these do when they are made."""

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import InitVar, dataclass, field
from typing import Any

import pytest
import torch

from allranks.errors import TaskError
from allranks.parallel.outputs import in_float32, map_tensors

Pair = namedtuple("Pair", "first second")
LOW, COUNT = torch.ones(2, dtype=torch.bfloat16), torch.arange(2)


@dataclass
class Output:
    logits: torch.Tensor
    hidden: Any = None
    seed: InitVar[int] = 0
    made: list[int] = field(init=False)

    def __post_init__(self, seed: int) -> None:
        self.made = [seed]


@dataclass(frozen=True, slots=True)
class Frozen:
    logits: torch.Tensor
    inner: Output


class Named(OrderedDict[str, Any]):
    """As Hugging Face's outputs were: a dict whose entries are attributes as well."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        self[name] = value

    def __reduce__(self) -> Any:
        told: Any = super().__reduce__()
        made, _, *more = told
        return (made, tuple(self.values()), *more)


def test_dataclasses_are_copied_and_not_made_anew() -> None:
    inner = Output(LOW, {"all": [LOW, COUNT]}, seed=3)
    vars(inner)["extra"] = "kept"
    output = (Frozen(LOW, inner), Pair(LOW, 3))
    frozen, pair = in_float32(output, torch.bfloat16)
    assert type(frozen) is Frozen and type(pair) is Pair and pair.second == 3
    found = frozen.inner
    assert (found.made, vars(found)["extra"]) == ([3], "kept")
    tensors = (frozen.logits, pair.first, found.logits, found.hidden["all"][0])
    assert all(tensor.dtype is torch.float32 for tensor in tensors)
    assert found.hidden["all"][1] is COUNT
    assert output[0].logits is inner.logits is LOW and inner.hidden["all"][0] is LOW, "the user's own stays"


def test_a_dict_that_is_a_dataclass_changes_in_both() -> None:
    kind: Any = dataclass(type("Kind", (Named,), {"__annotations__": {"logits": torch.Tensor}}))
    made = kind(LOW)
    found = in_float32(made, torch.bfloat16)
    assert type(found) is kind and found.logits is found["logits"] and found.logits.dtype is torch.float32
    assert made["logits"] is LOW


def test_what_does_not_change_is_the_same_object() -> None:
    output = Output(COUNT, [COUNT])
    assert map_tensors(lambda tensor: tensor, output) is output
    assert in_float32(UserDict(), None) == {}
    assert map_tensors(lambda tensor: tensor + 1, Output) is Output


def test_an_output_in_which_nothing_is_found_is_refused() -> None:
    for output in (torch.distributions.Categorical(logits=LOW.float()), [3], None):
        with pytest.raises(
            TaskError, match=r"in which no tensor is found, so that loss would compute in bfloat16: ret"
        ):
            in_float32(output, torch.bfloat16)
