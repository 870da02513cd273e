"""What is told of a finished step of an own loop."""

import pytest
import torch

from allranks.stepping.agreement import Agreed, Pending
from allranks.training.own.turn import FinishedStep


@pytest.mark.parametrize(("size", "tokens"), [(4, {"tokens": 10.0}), (10, {})])
def test_a_step_is_told_per_target(size: int, tokens: dict[str, float]) -> None:
    pending = Pending(None, None, Agreed(5.0, 10, 1, False, False, 0xAB))
    step = FinishedStep(3, 30, size, 0.1, 0.5, pending, torch.tensor(2.0))
    assert step.values() == tokens | {"loss": 0.5, "grad_norm": 2.0, "ledger": "00000000000000ab"}
