"""A call in a process of its own: its answer comes back, what it touches does not, and its end is no secret."""

import os
from multiprocessing import current_process, forkserver
from pathlib import Path

import pytest

from allranks.errors import ProcessError
from allranks.surviving.aside import call_aside, call_spawned

pytestmark = pytest.mark.distributed

HERE = __name__


def look(text: str) -> tuple[int, str, str]:
    """Leaves traces wherever it can."""
    print("nobody sees this")
    os.system("echo nor this >&2")
    os.environ["ALLRANKS_ASIDE"] = text
    os.chdir("/")
    return os.getpid(), text.upper(), os.environ["ALLRANKS_TOLD"]


def fail() -> None:
    raise ValueError("mine\nand more")


def leave() -> None:
    raise SystemExit(4)


def test_the_answer_comes_back_and_nothing_else(
    small_server: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ALLRANKS_TOLD", "as it is now")
    before, folder = dict(os.environ), Path.cwd()
    pid, answer, told = call_aside(f"{HERE}:look", "text")
    assert pid != os.getpid() and (answer, told) == ("TEXT", "as it is now")
    assert dict(os.environ) == before and Path.cwd() == folder
    shown = capfd.readouterr()
    assert shown.out == "" and "this" not in shown.err


def test_in_a_fresh_interpreter_no_server_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLRANKS_TOLD", "now")
    before = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    monkeypatch.setenv("RANK", "0")
    pid, answer, _ = call_spawned(f"{HERE}:look", "text")
    assert pid != os.getpid() and answer == "TEXT"
    assert call_spawned("os:getenv", "RANK") is None and call_spawned("os:getenv", "ALLRANKS_TOLD") == "now"
    assert forkserver._forkserver._forkserver_pid == before  # type: ignore[attr-defined]


def test_a_daemon_is_told_that_it_may_start_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(current_process()._config, "daemon", True)  # type: ignore[attr-defined]
    with pytest.raises(ProcessError, match="started as a daemon"):
        call_spawned(f"{HERE}:look", "text")


def test_what_takes_too_long_is_ended(small_server: None) -> None:
    with pytest.raises(TimeoutError, match=r"time:sleep took longer than 0\.1 s"):
        call_aside("time:sleep", 600, within=0.1)


def test_what_goes_wrong_there_is_one_line_here(small_server: None) -> None:
    for name, line in (("fail", "ValueError: mine"), ("leave", "SystemExit: 4")):
        with pytest.raises(ProcessError, match=line) as caught:
            call_aside(f"{HERE}:{name}")
        assert "\n" not in str(caught.value)
    with pytest.raises(ProcessError, match=r"ended first \(exit code 3\)"):
        call_aside("os:_exit", 3)
