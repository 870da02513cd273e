"""A backward is split where its halves meet, and else it is whole."""

from typing import Any

import pytest
import torch
from torch import nn

from allranks.parallel.torch_stage import goes_past, mend

LINEAR, TABLE = nn.Linear(3, 3), nn.Embedding(5, 3)
GIVEN = torch.ones(2, 3, requires_grad=True)
TOKENS = torch.tensor([1, 2])


def scaled(value: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = value * TABLE(TOKENS)
    return found


@pytest.mark.parametrize(
    ("sent", "past"),
    [
        ((LINEAR(GIVEN),), False),
        ((LINEAR(GIVEN) + TABLE(TOKENS),), False),
        ((scaled(GIVEN), GIVEN), False),
        ((GIVEN,), False),
        ((LINEAR(GIVEN), TABLE(TOKENS)), True),
        ((LINEAR(torch.ones(2, 3)),), True),
        ((LINEAR(GIVEN), TABLE(TOKENS).detach()), False),
        ((), False),
    ],
)
def test_what_is_made_of_nothing_received_goes_past(sent: tuple[torch.Tensor, ...], past: bool) -> None:
    assert goes_past((GIVEN, torch.ones(2)), sent) is past


def test_all_goes_past_what_has_no_gradient() -> None:
    assert goes_past((torch.ones(2, 3),), (LINEAR(torch.ones(2, 3)),))
    assert not goes_past((), ()) and goes_past((), (LINEAR(GIVEN),))


class Stage:
    """Writes down what torch's stage is asked for."""

    group_rank = 1

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        return []

    def get_bwd_send_ops(self, micro_step: int) -> list[Any]:
        return []

    def backward_one_chunk(self, chunk: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False):  # type: ignore[no-untyped-def]
        self.asked.append((chunk, "whole" if full_backward else "inputs", last_backward))

    def backward_weight_one_chunk(self, chunk: int, last_backward: bool = False) -> None:
        self.asked.append((chunk, "weights", last_backward))


def test_a_micro_step_that_goes_past_is_not_split() -> None:
    stage, whole = Stage(), {1}
    mend(stage, whole)
    for chunk in (0, 1, 2):
        stage.backward_one_chunk(chunk, full_backward=chunk == 2)
        if chunk < 2:
            stage.backward_weight_one_chunk(chunk, last_backward=True)
    assert stage.asked == [(0, "inputs", False), (0, "weights", True), (1, "whole", False), (2, "whole", False)]
