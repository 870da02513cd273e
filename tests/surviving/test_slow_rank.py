"""When the workers are asked, what is told of a slow one, and the real command with one."""

import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from allranks.observing.collectives import collectives_file
from allranks.observing.heartbeat import ANSWERED, ASKED
from allranks.run import Run
from allranks.surviving import slow_rank as module
from allranks.surviving.arrivals import Lag
from allranks.surviving.beats import SharedBeats
from allranks.surviving.evidence import Frame
from allranks.surviving.slow_rank import BETWEEN_STEPS, FIRST_STEPS, LOOKS, SlowRank, explain
from allranks.verdict import Verdict
from tests.commands import PROGRAMS, allranks
from tests.surviving.rows import row

OWN, TORCHS = Frame("/home/me/task.py", 31, "loss"), Frame(os.__file__, 3, "wait")
LAG = Lag(1, 0.96, 0.5)
STACK = 'Current thread 0x0000aa (most recent call first):\n  File "/home/me/task.py", line 31 in loss\n'


@pytest.fixture
def beats() -> Iterator[SharedBeats]:
    made = SharedBeats(2)
    made.clear()
    yield made
    made.close()


class Company:
    """Two workers that answer as they are told; rank 1 comes late to each collective, or not."""

    def __init__(self, beats: SharedBeats, logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.beats, self.logs, self.signals = beats, logs, 0
        self.watch = SlowRank(beats, logs)
        self.step, self.late, self.stages, self.arrived = 0, 0.5, (0, 0), 40
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(time, "time_ns", lambda: 0)
        monkeypatch.setattr(module, "_signal", self._answer_with_a_stack)

    def log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank:05d}.log"

    def _answer_with_a_stack(self, pid: int) -> None:
        self.signals += 1
        with self.log(pid - 100).open("a") as file:
            file.write(STACK)

    def look(self, **changes: object) -> Verdict | None:
        rows = [row(rank, step=self.step, **changes) for rank in range(2)]
        return self.watch.look(rows, {0: 0, 1: 1})

    def answer(self) -> None:
        for rank in range(2):
            late = self.late if rank == 1 else 0.0
            arrivals = [("g", number, int(1e9 * (number + late))) for number in range(1, self.arrived)]
            stage = {"axis": "pp", "ranks": [rank, 9] if self.stages[rank] == 0 else [9, rank]}
            told = {"groups": [stage], "arrivals": arrivals}
            collectives_file(self.log(rank)).write_text(json.dumps(told))
            self.beats.slot(rank)[ANSWERED] = self.beats.slot(rank)[ASKED]

    @property
    def asked(self) -> int:
        return self.beats.slot(0)[ASKED]

    def go_to_the_question(self) -> None:
        """To the step at which the workers are asked, and their answer."""
        before = self.asked
        self.look()
        self.step += max(FIRST_STEPS, BETWEEN_STEPS)
        self.now += 100.0
        self.look()
        assert self.asked == before + 1
        self.answer()


@pytest.fixture
def company(beats: SharedBeats, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Company:
    return Company(beats, tmp_path, monkeypatch)


def test_workers_are_asked_after_some_steps_and_not_too_often(company: Company) -> None:
    company.look(phase="first step")
    company.step = FIRST_STEPS + 5
    company.look(phase="first step")
    company.look()
    assert company.asked == 0, "the steps count from when the first one of this attempt is done"
    company.step += FIRST_STEPS
    company.late = 0.0
    company.look()
    assert company.asked == 1
    company.answer()
    company.look()
    company.step += BETWEEN_STEPS
    company.look()
    assert company.asked == 1, "fast steps: a question takes time too"
    company.now += module.BETWEEN_SECONDS
    company.look()
    assert company.asked == 2
    company.now += module.ANSWER_SECONDS + 1
    company.look()
    company.step += BETWEEN_STEPS
    company.now += module.BETWEEN_SECONDS
    company.look()
    assert company.asked == 3, "who has not answered is asked again"


def test_workers_that_know_of_no_arrivals_are_asked_once_in_an_attempt(company: Company) -> None:
    """Over NCCL each answer would cost a dump of all its collectives, of which nothing is read."""
    company.arrived = 0
    company.go_to_the_question()
    company.look()
    company.step += BETWEEN_STEPS
    company.now += 10 * module.BETWEEN_SECONDS
    company.look()
    assert company.asked == 1
    company.watch.begin_attempt()
    company.arrived = 40
    company.look()
    company.go_to_the_question()
    assert company.asked == 2


def test_a_slow_rank_is_told_of_once_with_its_line(company: Company) -> None:
    company.go_to_the_question()
    told = [verdict for _ in range(LOOKS + 1) if (verdict := company.look()) is not None]
    assert len(told) == 1 and told[0].kind == "slow_rank" and told[0].what.startswith("rank 1 is slow: it works 100% ")
    assert f"in {LOOKS} of {LOOKS} looks its line was /home/me/task.py:31 in loss" in told[0].evidence
    assert company.signals == LOOKS
    company.go_to_the_question()
    assert [company.look() for _ in range(LOOKS + 1)] == [None] * (LOOKS + 1), "it is known"
    company.late = 0.0
    company.go_to_the_question()
    company.look()
    company.late = 0.5
    company.go_to_the_question()
    assert any(company.look() for _ in range(LOOKS + 1)), "it was well meanwhile"


def test_stages_of_a_pipeline_are_not_compared(company: Company) -> None:
    company.stages = (0, 1)
    company.go_to_the_question()
    assert [company.look() for _ in range(LOOKS + 1)] == [None] * (LOOKS + 1)


def test_who_ends_meanwhile_is_forgotten(company: Company) -> None:
    company.go_to_the_question()
    company.look()
    assert company.watch.look([row(0, step=50), row(2, step=50)], {0: 0, 2: 1}) is None
    company.watch.begin_attempt()
    assert company.look() is None and company.watch.look([row(0)], {0: 0}) is None


@pytest.mark.parametrize(
    ("phase", "frame", "starved", "told"),
    [
        ("step", OWN, 0.0, ("in 2 of 2 looks it was in a step", "in 2 of 2 looks its line was /home/me/task.py:31")),
        ("input", None, 0.0, ("in 2 of 2 looks it was loading data",)),
        ("step", None, 0.4, ("in 2 of 2 looks it was in a step", "for 40% of that time it wanted a core and had none")),
    ],
)
def test_what_is_told(phase: str, frame: Frame | None, starved: float, told: tuple[str, ...]) -> None:
    verdict = explain(LAG, 45, [(phase, frame)] * 2, starved)
    assert verdict.what == (
        "rank 1 is slow: it works 96% of the time, the others 50% of theirs and wait for it in the rest; without that "
        "a step would take 54% of its time (after step 45)"
    )
    assert len(verdict.evidence) == len(told)
    assert all(line.startswith(start) for line, start in zip(verdict.evidence, told, strict=True))
    assert ("look at /home/me/task.py:31 in loss" in verdict.next) == (frame is not None)
    assert "nvidia-smi" in verdict.next


def told_by(run: Path) -> list[Mapping[str, object]]:
    return [event for event in Run.open(run).events() if event["event"] == "verdict"]


@pytest.mark.full
@pytest.mark.distributed
def test_the_command_names_the_slow_rank_and_its_line_within_fifty_steps(tmp_path: Path) -> None:
    faulty = str(PROGRAMS / "faulty.py")
    words = ("--nproc", "2", "--layout", "ddp", "train.global_batch=8", "train.steps=60", "--run", "run")
    ran = allranks("train", faulty, *words, "task.fault=slow", folder=tmp_path)
    (verdict,) = told_by(tmp_path / "run")
    assert verdict["kind"] == "slow_rank" and str(verdict["what"]).startswith("rank 1 is slow: it works ")
    assert any("faulty.py:" in str(line) and "in loss" in str(line) for line in verdict["evidence"])  # type: ignore[attr-defined]
    assert int(str(verdict["what"]).rpartition("after step ")[2].rstrip(")")) <= 50
    assert "rank 1 is slow" in ran.stderr


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.parametrize("words", [("task.fault=none",), ("task.fault=slow", "guard.slow_rank=off")])
def test_the_command_says_nothing_where_none_is_slow_or_nobody_looks(tmp_path: Path, words: tuple[str, ...]) -> None:
    plain = ("--nproc", "2", "--layout", "ddp", "train.global_batch=8", "train.steps=80", "--run", "run")
    allranks("train", str(PROGRAMS / "faulty.py"), *plain, *words, folder=tmp_path)
    assert told_by(tmp_path / "run") == []
