"""What an orderly end of a process would wait for."""

import multiprocessing
import threading
import time

import pytest

from allranks.surviving import unended
from allranks.surviving.unended import CALL, forsake, hinders_the_end
from tests.processes import wait_until


def test_a_call_to_another_host_that_lasts_hinders_the_end() -> None:
    answer = threading.Event()
    thread = threading.Thread(target=answer.wait, name=CALL, daemon=True)
    thread.start()
    assert hinders_the_end()
    answer.set()
    thread.join()
    wait_until(lambda: not hinders_the_end())


def test_a_killed_process_hinders_the_end_until_it_has_died(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unended, "_killed", [])
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    process.start()
    assert process in multiprocessing.active_children()
    forsake(process)
    assert process not in multiprocessing.active_children() and hinders_the_end()
    process.kill()
    wait_until(lambda: not hinders_the_end())
