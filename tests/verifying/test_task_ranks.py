"""A Task as training has it, watched: here as the only rank, whose record is that of one device."""

from pathlib import Path

import pytest
import torch

from allranks.request import TrainRequest
from allranks.training.prepare import prepare
from allranks.verifying import task_ranks
from allranks.verifying.judge import judge
from allranks.verifying.task_ranks import MOST_VALIDATED, Errand, ledger, run_task_rank, shorten_validation
from allranks.verifying.task_verify import evidence_of, run_task_alone
from tests.commands import POINTS

WORDS = ("train.precision=float64", "train.global_batch=9", "train.micro_steps=2", "train.steps=4")


def test_one_rank_is_one_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    request = TrainRequest(task_spec=POINTS, overrides=WORDS, layout="single", device="cpu")
    errand = Errand(request, 4, str(tmp_path), saves=(2, 3))
    record, one = run_task_rank(errand), run_task_alone(errand)
    assert one.run.error == "" and len(record.run.steps) == 4
    assert record.layout == "single" and record.data_rank == 0 and record.run.saved_before == 2
    first = record.run.resumed
    assert first is not None and (first.first, len(first.steps), first.saved_before) == (2, 2, 3)
    assert first.resumed is not None and (first.resumed.first, len(first.resumed.steps)) == (3, 1)
    assert record.run.evaluation and first.evaluation is None
    assert judge(evidence_of(one, [record])) == [] and one.whole_validation == 0
    assert torch.get_default_dtype() == torch.float32


def test_a_long_validation_split_is_cut() -> None:
    task = prepare(TrainRequest(task_spec=POINTS, overrides=("task.num_points=203", "train.steps=1"))).task
    cut = shorten_validation(task)
    assert len(task.dataset("validation")) == 50 and len(task.dataset("train")) == 203 and cut == []
    whole = task.dataset
    task.dataset = lambda split: whole("train")  # type: ignore[method-assign]
    cut = shorten_validation(task)
    assert len(task.dataset("validation")) == MOST_VALIDATED and cut == [203]


def test_how_long_a_validation_split_is_that_was_cut_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_ranks, "MOST_VALIDATED", 13)
    request = TrainRequest(task_spec=POINTS, overrides=WORDS, layout="single", device="cpu")
    one = run_task_alone(Errand(request, 2, str(tmp_path)))
    assert one.run.error == "" and one.whole_validation == 50


def test_a_ledger_as_numbers() -> None:
    assert ledger("00000001ffffffff").tolist() == [1.0, float((1 << 32) - 1)]
