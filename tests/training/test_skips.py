"""Whole runs whose gradients are not finite: skipped, told of with their origin, and ended when it is enough."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from allranks.data.sampler import Sampler
from allranks.errors import GuardError
from allranks.run import Run
from allranks.stepping.agreement import Agreed
from allranks.training.skips import Skips
from tests.distributed.pool import Pools
from tests.distributed.sessions import config_of, session_of
from tests.distributed.tasks import Tiny
from tests.training.runs import digests, events, losses, saved, start, train, train_outside

EACH = ("checkpoint.every=1", "checkpoint.keep=99")


def skipped(run: Path) -> list[int]:
    return [event["step"] for event in Run.open(run).steps() if "skipped" in event]


def moved(run: Path, step: int) -> set[str]:
    before, after = digests(run, step - 1), digests(run, step)
    return {name for name in after if after[name] != before[name]}


def test_a_bad_sample_costs_its_step_and_nothing_else(tmp_path: Path) -> None:
    """Model, buffers, optimizer, its step counts and the average are bitwise as before it; the verdict names it."""
    run = tmp_path / "run"
    assert start("Poisoned", run, "train.steps=10", "train.ema=0.9", *EACH) == 0
    (step, *later) = skipped(run)
    assert moved(run, step) == set() and moved(run, step + 1), "the step after it is a step again"
    assert len(later) == 1, "47 samples, 10 a step: it comes once more in the second epoch"
    (first, second) = events(run, "verdict")
    assert (first["kind"], first["step"], second["step"]) == ("not_finite", step, later[0])
    assert first["what"] == f"step {step} changed nothing: its gradients are not finite"
    (line,) = first["evidence"]
    order, fed = Sampler(range(47)), range(10 * (step - 1), 10 * step)
    samples = [*order, *order][fed.start : fed.stop]
    assert 17 in samples
    assert line == (
        "rank 0: first seen in what goes into the model: look at the data; it was fed samples "
        f"{', '.join(map(str, samples[:8]))}, ... (positions {fed[0]} to {fed[-1]})"
    )
    assert all(losses(run)[other][0] is not None for other in losses(run) if other not in (step, *later))
    assert len({ledger for _, _, ledger in losses(run).values()}) == 10, (
        "what was fed stands in the ledger all the same"
    )


def test_the_ledger_is_that_of_a_run_without_the_bad_sample(tmp_path: Path) -> None:
    assert start("Poisoned", tmp_path / "bad", "train.steps=5") == 0
    assert start("Curve", tmp_path / "good", "train.steps=5") == 0
    bad, good = losses(tmp_path / "bad"), losses(tmp_path / "good")
    assert [bad[step][2] for step in bad] == [good[step][2] for step in good]


def test_it_ends_at_once_where_the_config_says_so_and_a_resume_goes_on_after_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(
        GuardError, match=r"the gradients of step \d are not finite: the run ends \(guard.nonfinite=stop"
    ) as told:
        start("Poisoned", run, "train.steps=7", "guard.nonfinite=stop")
    assert told.value.exit_code == 93
    assert len(skipped(run)) == 1 and saved(run) == [max(losses(run))]
    assert events(run, "end")[-1]["reason"] == "failed"
    assert train(None, "guard.nonfinite=skip", resume=run) == 0
    assert max(losses(run)) == 7


def test_too_many_in_a_row_end_the_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(GuardError, match=r"of 3 steps in a row.*guard.nonfinite_limit=3.*take a lower optimizer.lr"):
        start("Poisoned", run, "train.steps=20", "task.bad=5", "task.healthy=99", "guard.nonfinite_limit=3")
    assert 3 <= len(skipped(run)) <= 4 and len(events(run, "verdict")) == 2


def test_the_last_step_is_looked_at_too(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(GuardError, match="of 2 steps in a row"):
        start("Poisoned", run, "train.steps=2", "task.bad=5", "task.healthy=99", "guard.nonfinite_limit=2")
    assert saved(run) == [2]


def test_a_rate_that_is_far_too_high_cannot_spoil_the_parameters(tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = ("optimizer.name=sgd", "optimizer.lr=1e200", "train.max_norm=1")
    with pytest.raises(GuardError):
        start("Curve", run, "train.steps=60", *settings)


def test_one_optimizer_of_several_may_skip_alone(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert start("Gan", run, "train.steps=3") == 0 and skipped(run) == []


def test_ranks_that_are_not_alike_end_the_run() -> None:
    told: list[Any] = []
    skips = Skips(session_of(Tiny(), config_of("single")), lambda verdict, step: told.append(verdict))
    verdict = skips.see(Agreed(1.0, 1, 1, False, False, 0, skipped=1, num_ranks=2), 5)
    assert verdict is not None and verdict.kind == "ranks_differ" and not told
    assert "1 of 2 ranks found gradients in step 5" in verdict.what


def test_a_row_ends_with_a_good_step() -> None:
    told: list[Any] = []
    config = config_of("single", "guard.nonfinite_limit=2")
    skips = Skips(session_of(Tiny(), config), lambda verdict, step: told.append(step))
    bad, good = (Agreed(1.0, 1, 1, False, False, 0, skipped=skipped) for skipped in (1, 0))
    assert [skips.see(one, step) for step, one in enumerate([bad, good, bad, good])] == [None] * 4
    assert skips.see(bad, 4) is None and skips.see(bad, 5) is not None


@pytest.mark.distributed
def test_the_rank_that_read_the_sample_is_named(pool: Pools, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train_outside(pool, 2, "Poisoned", "train.global_batch=10", "train.steps=5", *EACH, run=run) == [0, 0]
    (step,) = skipped(run)
    assert moved(run, step) == set()
    (told,) = events(run, "verdict")
    (line,) = told["evidence"]
    rank, first, last = map(int, re.findall(r"^rank (\d): .*positions (\d+) to (\d+)", line)[0])
    assert (first, last) == (10 * (step - 1) + 5 * rank, 10 * (step - 1) + 5 * rank + 4), "its part of the step"
    assert "first seen in what goes into the model" in line and re.search(r"samples .*\b17\b", line)


@pytest.mark.distributed
def test_a_step_that_one_copy_leaves_out_is_not_said_to_have_changed_nothing(pool: Pools, tmp_path: Path) -> None:
    settings = ("train.global_batch=10", "layout.local_sgd=5", "train.steps=5", "checkpoint.every=1")
    run = tmp_path / "skip"
    assert train_outside(pool, 2, "Poisoned", *settings, run=run) == [0, 0]
    (told,) = events(run, "verdict")
    step = told["step"]
    assert told["what"] == f"1 of 2 ranks left step {step} out: their gradients are not finite"
    run = tmp_path / "stop"
    said = train_outside(pool, 2, "Poisoned", *settings, "guard.nonfinite=stop", run=run)
    assert all(f"the gradients of step {step} are not finite on 1 of 2 ranks: the run ends" in str(one) for one in said)
    assert all("the other copies have made them, and all is saved" in str(one) for one in said)


def test_a_row_in_which_copies_have_made_some_steps_ends_in_other_words() -> None:
    config = config_of("single", "guard.nonfinite_limit=2")
    session = session_of(Tiny(), config)
    some, all_ = (Agreed(1.0, 1, 1, False, False, 0, skipped=skipped, num_ranks=2) for skipped in (1, 2))
    for row, where in (((some, all_), " on some ranks"), ((all_, some), " on some ranks"), ((all_, all_), "")):
        skips = Skips(session, lambda verdict, step: None)
        skips._session = SimpleNamespace(spikes=None, outer=session)  # type: ignore[assignment]
        assert skips.see(row[0], 4) is None
        ended = skips.see(row[1], 5)
        assert ended is not None and f"the last of them step 5, are not finite{where}: the run ends" in ended.what
        assert ("the parameters are as before them, and saved" in ended.what) == (where == "")


SPIKED = ("train.steps=30", "guard.spike_window=5", "optimizer.lr=0.001", "task.from_loss=25")


def test_a_spike_is_told_of_or_left_out(tmp_path: Path) -> None:
    for action in ("log", "skip", "off"):
        run = tmp_path / action
        assert start("Spiking", run, *SPIKED, f"guard.spike={action}", *EACH) == 0
        told = [event for event in events(run, "verdict") if event["kind"] == "spike"]
        assert len(told) == {"log": 2, "skip": 1, "off": 0}[action]
        assert len(skipped(run)) == (action == "skip")
        if action == "skip":
            assert moved(run, told[0]["step"]) <= {"spikes.norms", "spikes.skipped"}
            assert told[0]["step"] == skipped(run)[0] and "changed nothing (guard.spike=skip)" in told[0]["what"]
        if action == "log":
            assert {"the loss" in one["what"] for one in told} == {True, False}
