"""Requests to stop, as the command sees them."""

import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from allranks.failure import StoppedBeforeStart
from allranks.surviving.interrupts import AGAIN_SECONDS, Interrupts, ctrl_c_arrives, stopped_before_start

pytestmark = pytest.mark.timeout(method="thread")  # its other method takes SIGALRM


@pytest.fixture(autouse=True)
def signals_put_back() -> Iterator[None]:
    """Whatever this process's parent ignores: under nohup SIGHUP, in a shell's background SIGINT."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL), signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGHUP, before[0])
    signal.signal(signal.SIGINT, before[1])


@pytest.mark.parametrize(
    ("number", "first"),
    [
        (signal.SIGINT, signal.SIGINT),
        (signal.SIGTERM, signal.SIGTERM),
        (signal.SIGUSR1, signal.SIGTERM),
        (signal.SIGHUP, signal.SIGTERM),
    ],
)
def test_the_first_is_noted_and_the_second_is_urgent(number: signal.Signals, first: signal.Signals) -> None:
    heard: list[tuple[signal.Signals | None, bool]] = []
    before = signal.getsignal(number)
    with Interrupts(lambda: heard.append((interrupts.first, interrupts.urgent))) as interrupts:
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGINT)
    assert heard == [(first, False), (first, True)]
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("before", [signal.SIGHUP, signal.SIGTERM, signal.SIGINT])
def test_a_terminal_that_is_closed_is_no_second_request(before: signal.Signals) -> None:
    """Its SIGHUP comes twice, of itself and of the shell that it closes; a session's end sends it after SIGTERM."""
    with Interrupts(lambda: None) as interrupts:
        for number in (before, signal.SIGHUP, signal.SIGHUP):
            os.kill(os.getpid(), number)
        assert not interrupts.urgent
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupts.urgent


def test_outside_the_main_thread_nothing_is_taken_over() -> None:
    before = signal.getsignal(signal.SIGINT)
    found = []

    def enter() -> None:
        with Interrupts(lambda: None):
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert found == [before]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_request_before_there_are_workers_cleans_up(number: signal.Signals) -> None:
    cleaned: list[str] = []
    before = signal.signal(number, signal.SIG_DFL)  # under nohup one of them is ignored
    try:
        with pytest.raises(StoppedBeforeStart, match=number.name), stopped_before_start():
            try:
                os.kill(os.getpid(), number)
                time.sleep(5)
            except Exception:  # what a user's module may catch
                cleaned.append("caught")
            finally:
                cleaned.append("finally")
        assert cleaned == ["finally"] and signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_a_request_that_is_swallowed_comes_again() -> None:
    """As by the start of compiled modules, which clear what is raised while they look for others."""
    swallowed: list[type] = []
    with pytest.raises(StoppedBeforeStart, match="SIGUSR1"), stopped_before_start():
        for _ in range(2):
            try:
                if not swallowed:
                    os.kill(os.getpid(), signal.SIGUSR1)
                time.sleep(5)
            except BaseException as error:
                swallowed.append(type(error))
        time.sleep(5)
        pytest.fail("it never came again")
    assert swallowed == [StoppedBeforeStart] * 2
    time.sleep(2 * AGAIN_SECONDS)  # a SIGALRM now would end this process
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL


def test_what_is_being_cleaned_up_for_a_request_is_left_alone() -> None:
    cleaned = []
    with pytest.raises(StoppedBeforeStart), stopped_before_start():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        finally:
            try:
                raise KeyError("as code that cleans up may")
            except KeyError:
                time.sleep(3 * AGAIN_SECONDS)
            time.sleep(3 * AGAIN_SECONDS)
            cleaned.append("all")
    assert cleaned == ["all"]


def test_an_error_that_is_made_of_a_request_is_the_request() -> None:
    with pytest.raises(StoppedBeforeStart, match="SIGTERM") as raised, stopped_before_start():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        except BaseException as error:
            raise ImportError("no such module") from error
    assert isinstance(raised.value.__cause__, ImportError)
    with pytest.raises(ImportError, match="by itself"), stopped_before_start():
        raise ImportError("by itself")


def test_no_run_starts_over_a_request_that_was_swallowed() -> None:
    with pytest.raises(StoppedBeforeStart, match="SIGUSR1"), stopped_before_start():
        try:
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(5)
        except BaseException:
            pass
        with Interrupts(lambda: None):
            pytest.fail("the run started")


def test_what_comes_after_the_run_does_not_change_its_end() -> None:
    with stopped_before_start():
        with Interrupts(lambda: None) as interrupts:
            os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR1)
    assert (interrupts.first, interrupts.urgent) == (signal.SIGTERM, False)


def test_what_a_parent_has_ignored_stays_so() -> None:
    for number, block in ((signal.SIGHUP, stopped_before_start()), (signal.SIGINT, ctrl_c_arrives())):
        signal.signal(number, signal.SIG_IGN)  # the fixture puts it back
        with block:
            assert signal.getsignal(number) == signal.SIG_IGN
        assert signal.getsignal(number) == signal.SIG_IGN


def test_under_nohup_a_closed_terminal_stops_no_run() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stopped_before_start(), Interrupts(lambda: None) as interrupts:
            os.kill(os.getpid(), signal.SIGHUP)
            assert interrupts.first is None
            os.kill(os.getpid(), signal.SIGTERM)
            assert interrupts.first == signal.SIGTERM
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_run_of_the_same_command_hears_what_the_first_one_did() -> None:
    with stopped_before_start():
        for _ in range(2):
            with Interrupts(lambda: None) as interrupts:
                os.kill(os.getpid(), signal.SIGHUP)
            assert interrupts.first == signal.SIGTERM
            os.kill(os.getpid(), signal.SIGHUP)


def test_an_alarm_that_somebody_has_set_is_theirs() -> None:
    """As a parent does (`alarm 60; exec allranks`), who wants this process to end then."""
    before = signal.signal(signal.SIGALRM, signal.SIG_DFL)
    try:
        with pytest.raises(StoppedBeforeStart), stopped_before_start():
            signal.alarm(60)
            assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL
        assert 50 < signal.alarm(0) <= 60
    finally:
        signal.signal(signal.SIGALRM, before)


def test_handlers_that_came_since_stay() -> None:
    def own(number: int, frame: object) -> None:
        """Of the user's code."""

    before = {number: signal.getsignal(number) for number in (signal.SIGALRM, signal.SIGUSR1)}
    try:
        with stopped_before_start():
            for number in before:
                signal.signal(number, own)
        assert [signal.getsignal(number) for number in before] == [own, own]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_ctrl_c_that_an_import_swallows_comes_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException:\n    pass\n"
    (tmp_path / "swallows_ctrl_c.py").write_text(lines)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KeyboardInterrupt), ctrl_c_arrives():
        importlib.import_module("swallows_ctrl_c")
        time.sleep(5)
        pytest.fail("it never came again")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    time.sleep(2 * AGAIN_SECONDS)  # a SIGALRM now would end this process
    del sys.modules["swallows_ctrl_c"]
    with pytest.raises(KeyboardInterrupt), ctrl_c_arrives():
        importlib.import_module("swallows_ctrl_c")
        raise RuntimeError("as of a module that was not imported whole")
    del sys.modules["swallows_ctrl_c"]
    with pytest.raises(KeyboardInterrupt), ctrl_c_arrives():
        importlib.import_module("swallows_ctrl_c")
        with Interrupts(lambda: None):
            pytest.fail("the run started")


def test_ctrl_c_at_any_other_time_is_the_programs() -> None:
    """Who catches it, as a debugger does, has heard it."""
    with ctrl_c_arrives():
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        time.sleep(2 * AGAIN_SECONDS)
