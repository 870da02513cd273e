"""The rates at the top of the schedule: those before a scheduler moved them, and never none at all."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from allranks.errors import TaskError
from allranks.stepping.peak_rates import check_peaks, peaks_of


def sgd(*rates: Any) -> torch.optim.SGD:
    made = torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(2))]} for _ in rates], lr=1.0)
    for group, rate in zip(made.param_groups, rates, strict=True):
        group["lr"] = rate
    return made


def test_each_group_has_its_own() -> None:
    assert peaks_of(sgd(0.5, torch.tensor(0.25))) == [0.5, 0.25]
    assert check_peaks({"": sgd(0.5, 0.0)}) == ()


def test_a_warm_up_of_a_scheduler_does_not_count() -> None:
    made = sgd(0.5, 0.25)
    LambdaLR(made, lambda step: step / 10)
    assert [group["lr"] for group in made.param_groups] == [0.0, 0.0]
    assert peaks_of(made) == [0.5, 0.25]
    (said,) = check_peaks({"": made})
    assert said.what == "the learning rate of SGD is 0.5 at the top of the schedule, and not 0"


def test_a_scheduler_that_has_moved_nothing_yet_is_not_told_of() -> None:
    made = sgd(0.5)
    LambdaLR(made, lambda step: 1.0)
    assert check_peaks({"": made}) == ()


def test_none_is_refused() -> None:
    with pytest.raises(TaskError, match=r"SGD has no learning rate in group 1, .*: give it lr="):
        peaks_of(sgd(0.5, None))


def test_nothing_but_zeros_is_refused() -> None:
    with pytest.raises(TaskError, match=r"optimizer\(\) made SGD with a learning rate of 0, .* nothing would be train"):
        check_peaks({"a": sgd(0.0), "b": sgd(0.0, 0.0)})
    assert check_peaks({"a": sgd(0.0), "b": sgd(0.1)}) == ()
