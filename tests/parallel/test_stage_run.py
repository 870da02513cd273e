"""What a stage's forward keeps for what its backward computes again."""

import gc
from typing import Any

import pytest
import torch

from allranks.errors import LayoutError
from allranks.parallel.stage_run import StageRun, current_run, running


def test_zeros_are_answered_with_what_was_received_for_them() -> None:
    zeros, received, other = torch.zeros(3), torch.ones(3, requires_grad=True), torch.zeros(3)
    run = StageRun(1, (received,), None)
    args: Any = (zeros, [other], 2)
    assert run.replace("block", args, {}) == (args, {})
    run.put("block", zeros, received)
    (found, (same,), number), named = run.replace("block", args, {"key": zeros})
    assert found is received and named["key"] is received and same is other and number == 2
    untouched: Any = ([other],)
    assert run.replace("block", untouched, {})[0] is untouched


def test_it_keeps_no_zeros() -> None:
    run, received = StageRun(1, (), None), torch.ones(3)
    run.put("block", torch.zeros(3), received)
    gc.collect()
    (kept,), _ = run.replace("block", (torch.zeros(3),), {})
    assert kept is not received and not run._instead


def test_a_run_is_over_when_its_forward_has_ended() -> None:
    run = StageRun(0, (), None)
    assert run.live and current_run() is None
    with running(run):
        assert current_run() is run and not run.over
    assert current_run() is None and run.over


class Within(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: StageRun, zeros: torch.Tensor, received: torch.Tensor) -> Any:
        run.put("block", zeros, received)
        return received.clone()


def test_what_an_autograd_function_calls_gets_no_gradient_and_is_refused() -> None:
    zeros, received = torch.zeros(3), torch.ones(3, requires_grad=True)
    run = StageRun(1, (received,), None)
    with torch.no_grad():
        run.put("block", zeros, received)  # the model wants none there
        Within.apply(StageRun(1, (received,), None), zeros, received)  # type: ignore[no-untyped-call]
    with pytest.raises(LayoutError, match="block is checkpointed by the model with use_reentrant=True"):
        Within.apply(run, zeros, received)  # type: ignore[no-untyped-call]
