"""The comparison itself: it sees what differs, names it, and lets pass what law 4 lets pass."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from allranks.digest import ledger_sum
from allranks.parameter_map import Box
from allranks.verifying.parity import Difference, RecordedStep, compare, fed
from allranks.verifying.reference import ReferenceStep

TOP, BOTTOM = Box((0, 0), (2, 3)), Box((2, 0), (2, 3))
WHOLE = torch.arange(1.0, 13.0, dtype=torch.float64).reshape(4, 3)
GAIN = torch.tensor(0.5, dtype=torch.float64)
MEAN = torch.tensor([0.25, -0.5], dtype=torch.float64)
LEDGER = f"{ledger_sum([0, 1, 2], [5, 6, 7]):016x}"


def reference(**changes: Any) -> ReferenceStep:
    tensors = {"weight": WHOLE, "gain": GAIN}
    held: dict[str, Any] = {"gradients": dict(tensors), "parameters": dict(tensors), "buffers": {"mean": MEAN}}
    return replace(ReferenceStep(loss=2.0, norm=3.0, **held), **changes)


def recorded(rank: int, **changes: Any) -> RecordedStep:
    """Two ranks hold two rows each, and both the gain."""
    box = (TOP, BOTTOM)[rank]
    parts = {"weight": (box, WHOLE[2 * rank : 2 * rank + 2].clone()), "gain": (Box((), ()), GAIN.clone())}
    positions, samples = ([0, 1], [5, 6]) if rank == 0 else ([2], [7])
    buffers = {"mean": (Box((0,), (2,)), MEAN.clone()), "calls": (Box((), ()), torch.tensor(rank))}
    held: dict[str, Any] = {"gradients": dict(parts), "parameters": dict(parts), "buffers": buffers}
    return replace(RecordedStep(2.0, 3.0, LEDGER, positions=positions, samples=samples, **held), **changes)


def with_part(rank: int, field: str, name: str, box: Box, part: torch.Tensor) -> RecordedStep:
    step = recorded(rank)
    return replace(step, **{field: getattr(step, field) | {name: (box, part)}})


def found(*steps: RecordedStep, expected: ReferenceStep | None = None, adaptive: bool = False) -> list[str]:
    differences = compare([[step] for step in steps], [expected or reference()], adaptive=adaptive)
    return [difference.what for difference in differences]


def test_equal_runs_do_not_differ() -> None:
    assert found(recorded(0), recorded(1)) == []


@pytest.mark.parametrize(
    ("loss", "norm", "what"), [(2.1, 3.0, ["loss"]), (2.0, 2.9, ["norm"]), (math.nan, 3.0, ["loss"])]
)
def test_numbers_of_any_rank_are_compared(loss: float, norm: float, what: list[str]) -> None:
    assert found(recorded(0), recorded(1, loss=loss, norm=norm)) == what


@pytest.mark.parametrize("field", ["gradients", "parameters"])
@pytest.mark.parametrize("rank", [0, 1])
def test_one_element_of_one_rank_is_seen(field: str, rank: int) -> None:
    word = {"gradients": "gradient of", "parameters": "parameter"}[field]
    for value in (1e-9, math.nan, math.inf):
        part = WHOLE[2 * rank : 2 * rank + 2].clone()
        part[1, 2] += value
        steps = [recorded(0), recorded(1)]
        steps[rank] = with_part(rank, field, "weight", (TOP, BOTTOM)[rank], part)
        assert found(*steps) == [f"{word} weight"]


def test_replicas_are_each_compared() -> None:
    assert found(recorded(0), with_part(1, "parameters", "gain", Box((), ()), GAIN * 2)) == ["parameter gain"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_buffer_of_any_rank_is_compared(rank: int) -> None:
    steps = [recorded(0), recorded(1)]
    steps[rank] = with_part(rank, "buffers", "mean", Box((0,), (2,)), MEAN * (1 + 1e-9))
    assert found(*steps) == ["buffer mean"]
    assert found(*(replace(step, buffers={}) for step in steps)) == ["buffer mean"], "no rank holds it"
    # Where each rank keeps its own by design, the reference has none.
    assert found(*steps, expected=reference(buffers={})) == []


def test_bounds_are_those_of_the_tensor_and_of_the_models_largest_gradient() -> None:
    """The weight's largest is 12: 1.2e-11 passes, and a gradient of the gain may be off by 12e-14, not only 5e-13."""
    for size, expected in ((1.0e-11, []), (2.0e-11, ["gradient of weight"])):
        assert found(recorded(0), with_part(1, "gradients", "weight", BOTTOM, WHOLE[2:] + size)) == expected
    tiny = reference(gradients={"weight": WHOLE, "gain": GAIN * 1e-9})
    steps = [with_part(rank, "gradients", "gain", Box((), ()), GAIN * 1e-9 + 1e-13) for rank in (0, 1)]
    assert found(*steps, expected=tiny) == []
    steps = [with_part(rank, "gradients", "gain", Box((), ()), GAIN * 1e-9 + 2e-13) for rank in (0, 1)]
    assert found(*steps, expected=tiny) == ["gradient of gain"]


def test_a_part_that_no_rank_holds_is_seen() -> None:
    missing = recorded(1)
    del missing.gradients["weight"]
    (difference,) = compare([[recorded(0)], [missing]], [reference()])
    assert (difference.what, difference.error) == ("gradient of weight", math.inf)


def test_a_gradient_that_one_device_does_not_have_is_seen() -> None:
    extra = with_part(1, "gradients", "frozen", Box((0,), (1,)), torch.zeros(1))
    assert found(recorded(0), extra) == ["gradient of frozen, which has none on one device,"]


def test_adam_is_compared_where_gradients_are_not_numerically_zero() -> None:
    noise = WHOLE.clone()
    noise[0, 0] = 1e-12
    expected = reference(gradients={"weight": noise, "gain": GAIN})
    steps = [
        replace(recorded(0), gradients={**recorded(0).gradients, "weight": (TOP, noise[:2])}),
        recorded(1),
    ]
    drifted = WHOLE[:2].clone()
    drifted[0, 0] += 1e-6
    steps[0] = replace(steps[0], parameters={**steps[0].parameters, "weight": (TOP, drifted)})
    assert found(*steps, expected=expected) == ["parameter weight"]
    assert found(*steps, expected=expected, adaptive=True) == []
    drifted[0, 1] += 1e-6
    assert found(*steps, expected=expected, adaptive=True) == ["parameter weight"]
    # By as much a buffer of the next step may be off, and by no more; under SGD not at all.
    drifted[0, 1] -= 1e-6
    for size, what in ((0.9e-6, []), (1.1e-6, ["buffer mean"])):
        later = with_part(1, "buffers", "mean", Box((0,), (2,)), MEAN + size)
        both = [[steps[0], steps[0]], [recorded(1), replace(later, parameters=recorded(1).parameters)]]
        adaptive = compare(both, [expected, expected], adaptive=True)
        assert [difference.what for difference in adaptive] == what
        assert "buffer mean" in [difference.what for difference in compare(both, [expected, expected])]
        assert found(steps[0], later, expected=expected, adaptive=True) == ["buffer mean"], "of this step's update"
    # What drifted in one step stays apart in the next, whatever its gradient is then.
    later = replace(recorded(0), parameters=steps[0].parameters)
    assert compare([[steps[0], later], [steps[1], recorded(1)]], [expected, reference()], adaptive=True) == []


def test_a_difference_is_a_sentence() -> None:
    difference = Difference(3, "gradient of weight", 1.5e-9, 1e-12)
    assert str(difference) == "step 3: gradient of weight differs by 1.5e-09, allowed are 1e-12"


def test_what_was_fed_is_put_together() -> None:
    assert fed([[recorded(0)], [recorded(1)]], 0, (0, 1)) == {0: 5, 1: 6, 2: 7}


def test_a_position_fed_twice_is_seen() -> None:
    with pytest.raises(AssertionError, match="1 positions were fed twice"):
        fed([[recorded(0)], [recorded(1, positions=[1], samples=[7])]], 0, (0, 1))


def test_a_ledger_of_something_else_is_seen() -> None:
    with pytest.raises(AssertionError, match="the ledger is not that of what was fed"):
        fed([[recorded(0)], [recorded(1, samples=[8])]], 0, (0, 1))
    with pytest.raises(AssertionError, match="the ledger is not that of what was fed"):
        fed([[recorded(0)], [recorded(1, ledger="0" * 16)]], 0, (0, 1))
