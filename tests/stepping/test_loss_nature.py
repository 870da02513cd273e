"""What evaluation mode leaves open, as numbers are drawn there, is decided in training mode, where they are fixed."""

import pytest

from allranks.errors import TaskError
from allranks.stepping.loss_nature import LossNature, Part, judge, judge_training
from allranks.task import Task
from tests.distributed.tasks import Tiny

RELATIVE = 1e-3


def parts(*losses: float) -> list[Part]:
    """Of the batch (once or twice) and its parts of 2 and 3 samples, as they are given."""
    numbers = [5] * (len(losses) - 2) + [2, 3]
    return [Part(loss, {"samples": float(number)}) for loss, number in zip(losses, numbers, strict=True)]


def judged(task: Task, evaluation: list[Part], training: list[float], *, chooses: bool = False) -> LossNature:
    """`training`: the losses of the batch, its two parts, and the batch with other draws."""
    nature = judge(task, evaluation, RELATIVE)
    whole, first, second, again = training
    found = [*parts(whole, first, second), *parts(again, 0.0, 0.0)[:1]]
    return judge_training(task, nature, found, RELATIVE, chooses=chooses)


MEAN, SUM, OTHER = [0.4, 0.1, 0.6, 0.4], [2.0, 0.2, 1.8, 2.0], [9.0, 0.2, 1.8, 9.0]


@pytest.mark.parametrize(
    "evaluation",
    [
        parts(1.0, 2.0, 0.5, 3.0),  # large noise: a sum that could be a mean
        parts(1.0, 1.02, 0.3, 0.2),  # two draws that happen to be near: a coupling, it seems
        parts(1.0, 1.02, 0.5, 0.45),  # or a sum and nothing else
    ],
)
def test_noise_leaves_it_to_training_mode(evaluation: list[Part]) -> None:
    with pytest.raises(TaskError, match=r"^Tiny\.loss returns a mean over samples \(0\.4 for 5 samples, "):
        judged(Tiny(), evaluation, MEAN)
    with pytest.raises(TaskError, match=r"^Tiny\.loss returns a mean, as the whole lies between its parts \(0\.5 for"):
        judged(Tiny(), evaluation, [0.5, 0.1, 0.6, 0.5])
    assert judged(Tiny(), evaluation, SUM).kind == "sum"
    assert judged(Tiny(), evaluation, OTHER).because.startswith("in training mode the parts of a batch do not add up")


def test_what_training_mode_cannot_tell_stays_as_evaluation_mode_says() -> None:
    other_means = [*MEAN[:3], 0.9]
    assert judged(Tiny(), parts(1.0, 1.02, 0.3, 0.2), other_means).kind == "coupled"
    nature = judged(Tiny(), parts(1.0, 2.0, 0.5, 3.0), other_means)
    assert nature.kind == "sum" and "it could not be told from a mean, as the model draws" in nature.because
    assert nature.because.endswith("by other means than torch's functions")


def test_a_sum_that_is_plain_in_evaluation_mode_is_no_mean_in_training_mode() -> None:
    assert judged(Tiny(), parts(2.0, 2.0, 0.2, 1.8), MEAN).kind == "coupled"


def test_a_coupling_that_is_plain_in_evaluation_mode_stays_one() -> None:
    assert judged(Tiny(), parts(9.0, 9.0, 0.2, 1.8), SUM).kind == "coupled"
