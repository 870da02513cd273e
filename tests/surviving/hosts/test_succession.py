"""A host that leads after another: from now on the run is its own, also where the other one lives."""

import os
import signal
import socket
from pathlib import Path

import pytest
from torch._C._distributed_c10d import HashStore

from allranks.config import resolve_config
from allranks.errors import RunError
from allranks.hosts_request import Endpoint
from allranks.observing.journal import Journal
from allranks.run import Run
from allranks.surviving.hosts.meeting import MeetingStore
from allranks.surviving.hosts.notices import Notices
from allranks.surviving.hosts.place import StoreLostError
from allranks.surviving.hosts.seal import Seal
from allranks.surviving.hosts.succession import succeed
from tests.test_lease import holding

FACTS = {"config": "abc"}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    config = resolve_config(task_defaults={}, toml=None, overrides=["train.steps=50"])
    found = Run.create(tmp_path, "Points", config, {"task": "points.py:Points"})
    found.begin_attempt()
    return found


@pytest.fixture
def notices() -> Notices:
    return Notices(
        MeetingStore(HashStore(), Endpoint("here", 1), "here", serves=True, call_seconds=5.0), Seal(b"0" * 16)
    )


def test_the_run_is_taken_from_a_frozen_leader(run: Run, notices: Notices) -> None:
    begun = run.checkpoints / "step-00000005.tmp-abc_1"
    begun.mkdir()
    (run.checkpoints / "step-00000004").mkdir()
    with holding(run.path / "lease") as (process, _):
        process.send_signal(signal.SIGSTOP)
        told = {"facts": FACTS, "host": socket.gethostname(), "pid": process.pid, "path": str(run.path)}
        notices.post("run", told)
        mine = Run.open(run.path)
        lost = succeed(mine, notices, FACTS)
        holder = mine.holder()
        assert holder is not None and holder.pid != process.pid
    assert (lost.rank, lost.host, lost.pid, lost.exit_code) == (0, told["host"], process.pid, 76)
    assert Run.open(run.path).attempts == 2 and not begun.exists()
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-00000004"]
    after = notices.read("run")
    assert after is not None and after["pid"] == holder.pid and after["path"] == told["path"]
    mine.release()


def test_from_an_heir_that_was_lost_before_it_introduced_itself_it_is_taken(run: Run, notices: Notices) -> None:
    with holding(run.path / "lease") as (process, _):
        here = socket.gethostname()
        notices.post("run", {"facts": FACTS, "host": "the first", "pid": 1, "path": str(run.path)})
        notices.post("heirs", [["the first", 1], [here, process.pid]])
        mine = Run.open(run.path)
        succeed(mine, notices, FACTS)
    assert notices.read("heirs") == sorted([["the first", 1], [here, process.pid], [here, os.getpid()]])
    mine.release()


def test_a_leader_that_has_left_as_it_was_asked_to_is_not_lost(run: Run, notices: Notices) -> None:
    notices.post("run", {"facts": FACTS, "host": socket.gethostname(), "pid": os.getpid(), "path": str(run.path)})
    notices.hand_over()
    mine = Run.open(run.path)
    left = succeed(mine, notices, FACTS)
    assert (left.exit_code, left.message) == (75, "its host led the run, and has left")
    lost = succeed(mine, notices, FACTS)
    assert (lost.exit_code, lost.message) == (76, "its host led the run, and is lost"), "another of that name and pid"
    mine.release()


def test_who_leads_no_more_comes_no_further_than_its_first_word(
    run: Run, notices: Notices, monkeypatch: pytest.MonkeyPatch
) -> None:
    notices.post("run", {"facts": FACTS, "host": "the first", "pid": 1, "path": str(run.path)})

    def refuse(*_: object) -> None:
        raise StoreLostError("this host led")

    monkeypatch.setattr(MeetingStore, "write", refuse)
    with pytest.raises(StoreLostError, match="this host led"):
        succeed(Run.open(run.path), notices, FACTS)
    assert Run.open(run.path).attempts == 1 and run.holder() is None


def test_what_an_old_rank_0_still_appends_nobody_reads(run: Run, notices: Notices) -> None:
    notices.post("run", {"facts": FACTS, "host": "the first", "pid": 1, "path": str(run.path)})
    old = Journal(run.journal())
    for step in range(1, 5):
        old.write("step", step=step, by="old")
    mine = Run.open(run.path)
    succeed(mine, notices, FACTS)
    new = Journal(run.journal())
    new.write("resume", step=2)
    new.write("step", step=3, by="new")
    new.write("step", step=4, by="new")
    old.write("step", step=3, by="old")
    assert [(one["step"], one["by"]) for one in run.steps()] == [(1, "old"), (2, "old"), (3, "new"), (4, "new")]
    old.close()
    new.close()
    mine.release()


def test_an_old_leader_that_wakes_counts_no_attempt(run: Run, notices: Notices) -> None:
    old = Run.open(run.path)
    old.acquire()
    notices.post("run", {"facts": FACTS, "host": socket.gethostname(), "pid": os.getpid(), "path": str(run.path)})
    mine = Run.open(run.path)
    succeed(mine, notices, FACTS)
    with pytest.raises(RunError, match="it was taken from this process"):
        old.begin_attempt()
    assert Run.open(run.path).attempts == mine.attempts == 2 and old.attempts == 1
    assert mine.begin_attempt() == 3 and list(run.path.glob(".run.json*")) == []
    mine.release()


def test_a_run_that_is_not_introduced_any_more_is_a_lost_meeting(run: Run, notices: Notices) -> None:
    with pytest.raises(StoreLostError, match="the meeting has ended"):
        succeed(run, notices, FACTS)


def test_from_who_never_led_nothing_is_taken(run: Run, notices: Notices) -> None:
    with holding(run.path / "lease") as (process, _):
        notices.post("run", {"facts": FACTS, "host": "another", "pid": process.pid, "path": str(run.path)})
        with pytest.raises(RunError, match=f"in use by pid {process.pid}"):
            succeed(Run.open(run.path), notices, FACTS)
    assert Run.open(run.path).attempts == 1
