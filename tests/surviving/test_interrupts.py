"""Requests to stop, as the command sees them."""

import os
import signal
import threading

import pytest

from allranks.surviving.interrupts import Interrupts


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
