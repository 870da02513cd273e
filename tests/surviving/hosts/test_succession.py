"""A host that leads after another: from now on the run is its own, also where the other one lives."""

import signal
import socket
from pathlib import Path

import pytest
from torch._C._distributed_c10d import HashStore

from allranks.config import resolve_config
from allranks.errors import RunError
from allranks.hosts_request import Endpoint
from allranks.run import Run
from allranks.surviving.hosts.meeting import MeetingStore
from allranks.surviving.hosts.notices import Notices
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


def test_from_who_never_led_nothing_is_taken(run: Run, notices: Notices) -> None:
    with holding(run.path / "lease") as (process, _):
        notices.post("run", {"facts": FACTS, "host": "another", "pid": process.pid, "path": str(run.path)})
        with pytest.raises(RunError, match=f"in use by pid {process.pid}"):
            succeed(Run.open(run.path), notices, FACTS)
    assert Run.open(run.path).attempts == 1
