"""What a Task hints at, and what is refused of it."""

from typing import Any

import pytest

from allranks.errors import TaskError
from allranks.hints import Hints


def test_hints_that_fit_are_kept_as_they_are() -> None:
    given = Hints(blocks=["layers.*"], tensor={"up": "colwise"}, small={"width": 8}, batchnorm="local")
    assert (given.blocks, given.tensor, given.small) == (["layers.*"], {"up": "colwise"}, {"width": 8})


@pytest.mark.parametrize(
    ("hints", "said"),
    [
        ({"batchnorm": "globl"}, "hints().batchnorm is 'globl': expected one of sync, local, broadcast, or None"),
        ({"blocks": "layers.*"}, "hints().blocks is the string 'layers.*': give a list, ['layers.*']"),
        ({"split_before": "12"}, "hints().split_before is the string '12': give a list, ['12']"),
        ({"optional": "*"}, "hints().optional is the string '*': give a list, ['*']"),
        ({"blocks": (1, 2)}, "hints().blocks is (1, 2): give a list of modules' names"),
        ({"split_before": 3}, "hints().split_before is 3: give a list of modules' names"),
        ({"tensor": ["up"]}, "hints().tensor is ['up']: give a dict whose keys are names"),
        ({"sequence_dims": {0: 1}}, "hints().sequence_dims is {0: 1}: give a dict whose keys are names"),
    ],
)
def test_a_value_of_another_kind_is_refused_in_one_line(hints: dict[str, Any], said: str) -> None:
    with pytest.raises(TaskError) as raised:
        Hints(**hints)
    assert str(raised.value) == said
