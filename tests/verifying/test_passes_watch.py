"""Gradients are recorded as the optimizer is about to get them, whatever is still to be divided."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from allranks.stepping.passes import StepSums
from allranks.stepping.scaler import Scaler
from allranks.verifying.passes_watch import WatchedPasses, gradients_of, scaler_of


def session(*beside: Any) -> Any:
    held, other = (torch.zeros(2, requires_grad=True) for _ in range(2))
    held.grad, other.grad = torch.tensor([2.0, 4.0]), torch.ones(2)
    spread = SimpleNamespace(
        mesh=SimpleNamespace(layout=SimpleNamespace(sample_ranks=2)),
        trainable=lambda: {"held": held, "other": other, "none": torch.zeros(2, requires_grad=True)},
        map={"held": SimpleNamespace(box=None)},
    )
    return SimpleNamespace(
        spread=spread, optimizers=SimpleNamespace(parameters=lambda which: [held]), beside=(object(), *beside)
    )


def sums(targets: float | None = None) -> StepSums:
    return StepSums("", torch.zeros(()), None if targets is None else torch.tensor(targets), 0)


@pytest.mark.parametrize(("targets", "found"), [(None, [2.0, 4.0]), (4.0, [1.0, 2.0]), (0.0, [4.0, 8.0])])
def test_what_a_step_has_counted_itself_is_divided(targets: float | None, found: list[float]) -> None:
    parts = gradients_of(session(), sums(targets))
    assert list(parts) == ["held"] and parts["held"].value.tolist() == found


def test_the_scale_of_float16_is_taken_out() -> None:
    scaler = Scaler(torch.device("cpu"), None)
    scaler.scale.fill_(8.0)
    assert gradients_of(session(scaler), sums())["held"].value.tolist() == [0.5, 1.0]
    assert scaler_of(session(scaler)) is scaler and scaler_of(session()) is None


def test_every_update_is_recorded_before_what_follows() -> None:
    inner: Any = SimpleNamespace(run=lambda batch, scale: iter([sums(), sums()]))
    watched = WatchedPasses(inner)
    watched.session = session()
    for number, _ in enumerate(watched.run(SimpleNamespace(), 1.0), 1):  # type: ignore[arg-type]
        assert watched.step.updates == number and list(watched.step.raw) == ["held"]
