"""Requests to stop: noted at once, never interrupting, and the second ends a process that is alone."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from allranks.training.stop import StopRequests

ALONE = """
import os, signal, time
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whatever the parent ignores
from allranks.training.stop import StopRequests
stops = StopRequests.install(alone={alone})
signals = [signal.{first}, signal.{second}]
for number in signals:
    os.kill(os.getpid(), number)
    print(stops.requested(), stops.seen(), flush=True)
"""


def test_a_signal_is_noted_and_interrupts_nothing() -> None:
    with StopRequests.install() as stops:
        assert stops.requested() is None
        assert stops.seen() == (False, False)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stops.seen() == (False, True)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # from the terminal and from the agent
        assert stops.seen() == (True, True)
        assert stops.requested() == "SIGTERM"


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGHUP])
def test_a_schedulers_warning_and_a_closed_terminal_read_as_sigterm(number: signal.Signals) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whatever this process's parent ignores
    try:
        with StopRequests.install() as stops:
            os.kill(os.getpid(), number)
            assert (stops.seen(), stops.requested()) == ((False, True), number.name)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_under_nohup_a_closed_terminal_is_no_request() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequests.install() as stops:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stops.requested() is None
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_old_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with StopRequests.install():
        assert signal.getsignal(signal.SIGINT) != before[0]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_request_held_back_until_then_is_seen() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        # To this thread: one to the process would go to any other thread that does not hold it back.
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        with StopRequests.install() as stops:
            assert stops.seen() == (True, False)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def test_outside_the_main_thread_nothing_is_installed() -> None:
    before = signal.getsignal(signal.SIGINT)
    found: list[object] = []

    def install() -> None:
        with StopRequests.install() as stops:
            found.append((stops.requested(), signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=install)
    thread.start()
    thread.join()
    assert found == [(None, before)]


def run(alone: bool, first: str, second: str) -> tuple[int, list[str]]:
    code = ALONE.format(alone=alone, first=first, second=second)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout.split("\n")


def test_alone_the_second_request_means_now() -> None:
    assert run(True, "SIGINT", "SIGINT") == (130, ["SIGINT (True, False)", ""])
    assert run(True, "SIGTERM", "SIGTERM") == (76, ["SIGTERM (False, True)", ""])
    assert run(True, "SIGUSR1", "SIGTERM") == (76, ["SIGUSR1 (False, True)", ""])


def test_alone_a_closed_terminal_is_never_the_second_request() -> None:
    assert run(True, "SIGHUP", "SIGHUP") == (0, ["SIGHUP (False, True)", "SIGHUP (False, True)", ""])
    assert run(True, "SIGHUP", "SIGTERM") == (76, ["SIGHUP (False, True)", ""])


def test_with_an_agent_the_second_request_changes_nothing() -> None:
    assert run(False, "SIGINT", "SIGINT") == (0, ["SIGINT (True, False)", "SIGINT (True, False)", ""])
