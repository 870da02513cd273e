"""Gradients are recorded as the optimizer is about to get them, whatever is still to be divided."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from allranks import fault_points
from allranks.data.micro_step import MicroStep, StepBatch
from allranks.data.random_keys import mix, seed_all
from allranks.digest import sample_hash
from allranks.stepping.passes import StepSums
from allranks.stepping.scaler import Scaler
from allranks.training import validate as validating
from allranks.verifying.passes_watch import (
    WatchedPasses,
    evaluation_told,
    forwards_told,
    gradients_of,
    rows_in_work,
    rows_of_step,
    scaler_of,
    values_of_step,
)

X = torch.arange(3.0)


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


def micro_step(key: int, *samples: int) -> MicroStep:
    numbers = np.array(samples, dtype=np.int64)
    return MicroStep(torch.tensor(samples or (0,)), int(bool(samples)), len(samples), key, numbers + 100, numbers)


def test_the_samples_in_work_are_known_by_what_seeds_their_forward() -> None:
    batch = StepBatch(0, 0, 3, (micro_step(11, 1, 2), micro_step(12, 3), micro_step(13)))
    first, second = [sample_hash(101, 1), sample_hash(102, 2)], [sample_hash(103, 3)]
    assert rows_of_step(batch) == first + second
    assert list(values_of_step(batch)) == first + second
    rows = rows_in_work(batch)
    for key, due in ((12, second), (11, first), (13, []), (99, [])):
        seed_all(key)
        assert rows() == due
    rows = rows_in_work(batch, turns=True)
    for key, due in ((mix(12, 0), second), (mix(11, 1), first), (12, []), (mix(13, 0), [])):
        seed_all(key)
        assert rows() == due, "of a Task's own step, which is seeded for each loss"


def test_the_samples_of_an_evaluation_are_told_forward_by_forward() -> None:
    told: list[list[int]] = []
    with evaluation_told(told.append):
        batches = vars(validating)["evaluation_batches"](torch.utils.data.TensorDataset(X), batch_size=2)
        sizes = [len(m.samples) for m in batches]
    assert sizes == [2, 1] and told == [[sample_hash(0, 0), sample_hash(1, 1)], [sample_hash(2, 2)]]


def test_every_forward_is_told() -> None:
    told: list[int] = []
    with forwards_told(lambda: told.append(1)):
        for point in ("forward", "backward", "forward"):
            fault_points.reach(point)
    fault_points.reach("forward")
    assert len(told) == 2
