"""Checkpoints by time: rank 0's clock says so once for each, and every rank saves the same step."""

import importlib
from pathlib import Path
from typing import Any

import pytest

from allranks.stepping.agreement import Agreed, Pending
from allranks.training.save_clock import SaveClock
from allranks.training.trainer import Trainer
from tests.distributed.pool import Pools
from tests.training.runs import QUICK, digests, events, same_run, saved, start, train_outside

AT_ONCE = "checkpoint.seconds=1e-9"  # due at every look
NINE = ("train.steps=9", "checkpoint.keep=9")
WAYS = pytest.mark.parametrize("way", ["checkpoint.asynchronous=false", "checkpoint.asynchronous=true"])


class Hand:
    """`time.monotonic` by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("allranks.training.save_clock.time.monotonic", lambda: self.now)


def told(due: int) -> tuple[Pending, Agreed]:
    agreed = Agreed(0.0, 0, 0, False, False, 0, due=due)
    return Pending(None, None, agreed), agreed


def test_one_vote_for_each_save(monkeypatch: pytest.MonkeyPatch) -> None:
    hand = Hand(monkeypatch)
    clock = SaveClock(100.0, counts=True)
    hand.now += 99
    assert not clock.vote()
    hand.now += 1
    assert [clock.vote() for _ in range(3)] == [True, False, False], "agreements that are on their way tell nothing"
    clock.hear(*told(0))
    due, first = [clock.due], told(1)
    clock.hear(*first)
    due.append(clock.due)
    clock.begin()
    clock.hear(*first)
    assert [*due, clock.due] == [False, True, False], "on CUDA the first agreement is read twice"
    hand.now += 99
    assert not clock.vote()
    hand.now += 1
    assert clock.vote()


def test_what_a_save_takes_does_not_count_and_a_vote_on_its_way_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    hand = Hand(monkeypatch)
    clock = SaveClock(100.0, counts=True)
    clock.begin()
    hand.now += 90
    clock.saved()
    hand.now += 90
    assert not clock.vote()
    hand.now += 10
    assert clock.vote()
    clock.saved()  # the one before was written beside the steps, and is committed while this vote is on its way
    hand.now += 200
    assert not clock.vote(), "it has voted for the save to come"
    clock.begin()
    hand.now += 100
    assert clock.vote()


def test_who_never_votes(monkeypatch: pytest.MonkeyPatch) -> None:
    hand = Hand(monkeypatch)
    clocks = SaveClock(100.0, counts=False), SaveClock(None, counts=True)
    hand.now += 1e9
    assert [clock.vote() for clock in clocks] == [False, False]
    assert [clock.runs for clock in clocks] == [True, False]
    assert [clock.key for clock in clocks] == ["checkpoint.seconds", "checkpoint.every"]
    assert clocks[1].decisions == ()
    (decision,) = SaveClock(1800.0, counts=True).decisions
    assert str(decision) == "a checkpoint every 30 min, because checkpoint.every is not given"


@WAYS
def test_a_run_saves_by_time_and_computes_the_same(tmp_path: Path, way: str) -> None:
    """Each save takes two steps: one tells that it is due, and the next one is told."""
    plain, timed = tmp_path / "plain", tmp_path / "timed"
    assert start("Curve", plain, *NINE) == 0
    assert start("Curve", timed, *NINE, AT_ONCE, way) == 0
    assert saved(plain) == [9] and saved(timed) == [1, 3, 5, 7, 9]
    same_run(plain, timed, 9)
    assert digests(plain, 9) == digests(timed, 9)
    assert [event["step"] for event in events(timed, "checkpoint")] == [1, 3, 5, 7, 9]
    decided = "a checkpoint every 30 min"
    assert decided in [event["what"] for event in events(plain, "decision")]


def test_sentinels_that_read_an_agreement_earlier_ask_for_no_second_save(tmp_path: Path) -> None:
    assert start("Curve", tmp_path / "run", *NINE, AT_ONCE, "guard.digest_every=1") == 0
    assert saved(tmp_path / "run") == [1, 3, 5, 7, 9]


def test_where_agreements_are_read_a_step_later_it_is_saved_a_step_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CUDA, where the first agreement is read twice."""
    real = Trainer.__init__

    def late(trainer: Trainer, *rest: Any) -> None:
        real(trainer, *rest)
        trainer._lag = 1

    monkeypatch.setattr(Trainer, "__init__", late)
    assert start("Curve", tmp_path / "run", *NINE, AT_ONCE) == 0
    assert saved(tmp_path / "run") == [1, 4, 7, 9]


def test_a_number_of_steps_or_a_nought_turns_it_off(tmp_path: Path) -> None:
    by_steps, never = tmp_path / "steps", tmp_path / "never"
    assert start("Curve", by_steps, *NINE, AT_ONCE, "checkpoint.every=4") == 0
    assert start("Curve", never, *NINE, "checkpoint.seconds=0") == 0
    assert saved(by_steps) == [4, 8, 9] and saved(never) == [9]
    assert not any("a checkpoint every" in event["what"] for event in events(never, "decision"))


@pytest.mark.distributed
@WAYS
def test_all_ranks_save_the_same_steps_and_a_run_goes_on_from_one(pool: Pools, tmp_path: Path, way: str) -> None:
    plain, timed = tmp_path / "plain", tmp_path / "timed"
    settings = (*QUICK, "checkpoint.keep=9")
    assert train_outside(pool, 2, "Curve", *settings, "train.steps=7", run=plain, layout="fsdp") == [0, 0]
    assert train_outside(pool, 2, "Curve", *settings, AT_ONCE, way, "train.steps=4", run=timed, layout="fsdp") == [0, 0]
    assert saved(timed) == [1, 3, 4]
    assert train_outside(pool, 2, None, "train.steps=7", resume=timed) == [0, 0]
    assert saved(timed) == [1, 3, 4, 5, 7]
    same_run(plain, timed, 7)
    assert digests(plain, 7) == digests(timed, 7)


@WAYS
def test_a_save_that_fails_and_is_borne_is_tried_after_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    portion: Any = importlib.import_module("allranks.checkpointing.portion")
    real = portion.write_file

    def refuse(path: Path, *rest: Any) -> Any:
        if path.parent.name.startswith("step-00000003"):
            raise OSError(28, "No space left on device")
        return real(path, *rest)

    monkeypatch.setattr(portion, "write_file", refuse)
    run = tmp_path / "run"
    assert start("Curve", run, *NINE, AT_ONCE, way) == 0
    assert saved(run) == [1, 5, 7, 9]
    (verdict,) = [event for event in events(run, "verdict") if event["kind"] == "checkpoint"]
    assert "step-00000003" in verdict["what"]
