"""Steps under the recorder."""

import sys
from time import sleep
from typing import Any

import pytest
import torch

from allranks.errors import TaskError
from allranks.stepping.profiled_model import describe, spread_alone
from allranks.stepping.profiled_step import SAMPLES, first_batches, record
from allranks.task import Task
from tests.profiling.subjects import CLASSES, SEQ, WIDTH, Adversaries, Vectors, Words


def test_batches_are_the_first_samples_with_their_targets() -> None:
    words = first_batches(Words()).batches
    assert [(batch.num_samples, batch.num_targets) for batch in words] == [(n, n * SEQ) for n in SAMPLES]
    assert [tuple(batch.value[0].shape) for batch in words] == [(n, SEQ) for n in SAMPLES]
    assert [batch.num_targets for batch in first_batches(Adversaries()).batches] == [0, 0]


def test_their_collating_is_timed_with_their_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Words()
    collate = task.collate

    def slow(samples: Any) -> Any:
        sleep(0.02 * len(samples))
        return collate(samples)

    monkeypatch.setattr(task, "collate", slow)
    found = first_batches(task)
    assert found.order == "map" and found.sample_seconds >= 0.02


def steps(task: Task) -> list[tuple[int, int, list[str]]]:
    spread = spread_alone(task, task.model, "float32", "cpu")
    structure = describe(task, spread)
    found = [record(task, spread, structure, batch) for batch in first_batches(task).batches]
    assert all(parameter.grad is None for parameter in spread.trainable().values())
    products = [[c.modules[-1] for c in seen.recording.calls if c.op == "addmm"] for seen in found]
    return [(seen.num_samples, seen.num_targets, ran) for seen, ran in zip(found, products, strict=True)]


def test_a_step_runs_every_layer_and_leaves_no_gradients() -> None:
    assert steps(Vectors()) == [(n, n, ["0", "3", "6", "9"]) for n in SAMPLES]


def test_an_own_step_runs_all_of_its_turns() -> None:
    critic, generator = ["critic.0", "critic.2"], ["generator.0", "generator.2"]
    assert steps(Adversaries()) == [(n, n, [*generator, *critic, *critic, *critic]) for n in SAMPLES]


class Wrong(Vectors):
    def loss(self, output: torch.Tensor, batch: object) -> torch.Tensor:
        return output.view(WIDTH, CLASSES).sum()


def test_a_real_step_that_raises_shows_the_users_line() -> None:
    with pytest.raises(TaskError, match=r"(?s)Wrong's step raised:.*test_profiled_step.py.*output.view"):
        steps(Wrong())


class Unready(Vectors):
    def __init__(self, how: str) -> None:
        super().__init__()
        self._how = how

    def dataset(self, split: str) -> Any:
        if self._how == "dataset":
            raise FileNotFoundError("no images")
        if self._how == "end":
            sys.exit(0)
        if self._how == "ragged":
            return [(torch.zeros(length), 0) for length in (2, 3, 4)]
        return super().dataset(split)

    def loss(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        sys.exit(0)


@pytest.mark.parametrize(
    ("how", "said"),
    [("dataset", "FileNotFoundError: no images"), ("end", "SystemExit: 0"), ("ragged", "RuntimeError: stack expects")],
)
def test_data_that_raises_is_one_error_with_its_line(how: str, said: str) -> None:
    """Its traceback's exit code would be that of a plan that does not fit, and sys.exit's of one that does."""
    with pytest.raises(TaskError, match=rf"(?s)^Unready fails on the first samples of its dataset:\n.*{said}"):
        first_batches(Unready(how))


def test_a_step_that_ends_the_process_is_an_error() -> None:
    with pytest.raises(TaskError, match=r"(?s)^Unready's step raised:\n.*sys.exit\(0\)\n([ ~^]+\n)?SystemExit: 0"):
        steps(Unready("loss"))
