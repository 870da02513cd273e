"""Who is dead, stopped, hung or only slow; and what is none of these."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from allranks.config_guard import GuardConfig
from allranks.observing.heartbeat import FIRST, LONGEST, MARK, PHASE, PHASES, PULSE, STEP
from allranks.surviving import monitor as module
from allranks.surviving.kernel import process_state
from allranks.surviving.monitor import (
    LEAST_HANG_SECONDS,
    LEAST_SAVE_SECONDS,
    Alarm,
    Monitor,
    find_doubtful,
    find_hung,
    find_silent,
)
from tests.processes import wait_until
from tests.surviving.rows import row

GUARD = GuardConfig()


def rows(*changes: dict[str, Any]) -> list[Any]:
    return [row(rank, **one) for rank, one in enumerate(changes)]


def quiet(seconds: float, phase: str = "step", **more: Any) -> dict[str, Any]:
    return {"quiet_seconds": seconds, "phase": phase, **more}


def test_steps_that_take_long_here_may_take_long() -> None:
    assert find_hung(rows(quiet(LEAST_HANG_SECONDS - 1), quiet(14)), GUARD) is None
    assert find_hung(rows(quiet(16), quiet(16)), GUARD) == Alarm("hung", (0, 1), LEAST_HANG_SECONDS, act=True)
    slow: dict[str, Any] = {"longest_seconds": 6.0}
    assert find_hung(rows(quiet(29, **slow), quiet(29)), GUARD) is None
    assert find_hung(rows(quiet(31, **slow), quiet(31)), GUARD) is not None


def test_the_second_step_may_take_as_long_as_the_first() -> None:
    assert find_hung(rows(quiet(200, first_seconds=60.0, longest_seconds=0.0)), GUARD) is None
    assert find_hung(rows(quiet(200, first_seconds=60.0, longest_seconds=0.1)), GUARD) is not None


def test_the_limit_of_the_config_is_taken() -> None:
    assert find_hung(rows(quiet(4)), GuardConfig(hang_seconds=3.0)) is not None
    assert find_hung(rows(quiet(400, longest_seconds=0.1)), GuardConfig(hang_seconds=500.0)) is None


@pytest.mark.parametrize(
    ("phase", "limit"),
    [
        *[("start", 1800), ("first step", 1800), ("compilation", 1800), ("evaluation", 1800)],
        *[("checkpoint", 1800), ("end", 1800)],
    ],
)
def test_what_takes_long_has_limits_of_its_own(phase: str, limit: float) -> None:
    assert find_hung(rows(quiet(limit - 1, phase), quiet(limit - 1, phase)), GUARD) is None
    assert find_hung(rows(quiet(limit - 1, phase), quiet(60)), GUARD) is None, "the other one waits for it"
    found = find_hung(rows(quiet(limit + 1, phase), quiet(60)), GUARD)
    assert found is not None and found.act


def test_long_loading_is_told_of_and_left_in_peace_for_its_own_limit() -> None:
    assert find_hung(rows(quiet(16), quiet(16, "input")), GUARD) == Alarm("slow", (1,), LEAST_HANG_SECONDS, act=False)
    assert find_hung(rows(quiet(601), quiet(601, "input")), GUARD) == Alarm("hung", (1,), 600.0, act=True)


def test_where_loading_takes_long_it_may_and_who_waits_for_it_is_patient() -> None:
    always: dict[str, Any] = {"loading_seconds": 20.0}
    assert find_hung(rows(quiet(99, "input", **always)), GUARD) is None
    assert find_hung(rows(quiet(101, "input", **always)), GUARD) == Alarm("slow", (0,), 100.0, act=False)
    assert find_hung(rows(quiet(99), quiet(0, **always)), GUARD) is None, "it has waited until now"
    assert find_hung(rows(quiet(16, **always)), GUARD) is not None, "it loads no more, and there is no other"
    assert find_hung(rows(quiet(16), quiet(14, "input")), GUARD) is None, "that began to load a little later"
    assert find_hung(rows(quiet(17), quiet(16, "input")), GUARD) == Alarm("slow", (1,), LEAST_HANG_SECONDS, act=False)


def test_a_checkpoint_that_shows_nothing_is_told_of_early_and_ended_late() -> None:
    told = Alarm("slow", (1,), LEAST_SAVE_SECONDS, act=False, phase="checkpoint")
    assert find_silent(rows(quiet(29), quiet(29, "checkpoint")), GUARD) is None
    assert find_silent(rows(quiet(31), quiet(31, "checkpoint")), GUARD) == told
    assert find_silent(rows(quiet(31, "checkpoint"), quiet(31, "checkpoint")), GUARD) == replace(told, ranks=(0, 1))
    assert find_silent(rows(quiet(1801), quiet(1801, "checkpoint")), GUARD) == Alarm("hung", (0, 1), 15.0, act=True)
    assert find_silent(rows(quiet(31, "checkpoint", finished=True)), GUARD) is None, "a mirror has a limit of its own"
    assert find_silent(rows(quiet(1801, "checkpoint", finished=True)), GUARD) is not None


def test_where_checkpoints_take_long_they_may_before_it_is_told() -> None:
    always: dict[str, Any] = {"saving_seconds": 20.0}
    assert find_silent(rows(quiet(99, "checkpoint"), quiet(99, "checkpoint", **always)), GUARD) is None
    alarm = find_silent(rows(quiet(101, "checkpoint", **always), quiet(1)), GUARD)
    assert alarm == Alarm("slow", (0,), 100.0, act=False, phase="checkpoint")
    short = GuardConfig(checkpoint_seconds=25.0)
    assert find_silent(rows(quiet(24, "checkpoint")), short) is None
    assert find_silent(rows(quiet(26, "checkpoint")), short) == Alarm("hung", (0,), 25.0, act=True)


def test_a_step_longer_than_any_is_doubtful_before_it_is_a_hang() -> None:
    slow: dict[str, Any] = {"longest_seconds": 20.0}
    assert find_silent(rows(quiet(21, **slow), quiet(21)), GUARD) is None
    assert find_silent(rows(quiet(23, **slow), quiet(23)), GUARD) == Alarm("doubtful", (0, 1), 22.0, act=True)
    assert find_silent(rows(quiet(23, **slow), quiet(3)), GUARD) is None, "another one still comes further"
    assert find_silent(rows(quiet(101, **slow), quiet(101)), GUARD) == Alarm("hung", (0, 1), 100.0, act=True)
    assert find_doubtful(rows(quiet(23, "input", **slow)), GUARD) is None
    assert find_doubtful(rows(quiet(99, longest_seconds=0.0)), GUARD) is None, "no step to compare with yet"
    assert find_doubtful(rows(quiet(23, **slow)), GuardConfig(hang_seconds=300.0)) is None, "the user has said it"
    assert find_doubtful(rows(quiet(23, loading_seconds=21.0)), GUARD) is None


def test_a_doubt_does_not_keep_the_hang_behind_it_from_being_told(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    watch = Monitor(GUARD, 1)
    watch.begin_attempt(1)
    slot = watch.beats.slot(0)
    slot[PHASE], slot[LONGEST] = PHASES.index("step"), 20 * 10**9
    told = []
    for _ in range(110):
        clock.now += 1.0
        told.append(watch.look({0: os.getpid()}, {0: 0})[1])
    assert [alarm.kind for alarm in told if alarm is not None] == ["doubtful", "hung"]
    watch.beats.close()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.send_signal(signal.SIGKILL)


class Clock:
    """A clock that tests set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, real_states: bool = False) -> None:
        self.now = 1000.0
        if not real_states:
            monkeypatch.setattr(module, "process_state", lambda pid: "S")
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(time, "monotonic_ns", lambda: int(self.now * 1e9))

    def pass_seconds(self, watch: Monitor, seconds: float, pid: int) -> Alarm | None:
        """Look every second; the last alarm."""
        last = None
        for _ in range(round(seconds)):
            self.now += 1.0
            last = watch.look({0: pid}, {0: 5})[1] or last
        return last


def test_a_stopped_process_is_seen_by_the_kernels_word(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, real_states=True)
    watch = Monitor(GUARD, 1)
    watch.begin_attempt(1)
    sleeper.send_signal(signal.SIGSTOP)
    monkeypatch.undo()
    wait_until(lambda: process_state(sleeper.pid) == "T")
    clock = Clock(monkeypatch, real_states=True)
    assert clock.pass_seconds(watch, 10, sleeper.pid) is None
    assert clock.pass_seconds(watch, 3, sleeper.pid) == Alarm("stopped", (5,), 10.0, act=True)
    sleeper.send_signal(signal.SIGCONT)
    monkeypatch.undo()
    wait_until(lambda: process_state(sleeper.pid) == "S")
    clock = Clock(monkeypatch, real_states=True)
    assert clock.pass_seconds(watch, 20, sleeper.pid) is None
    watch.beats.close()


def test_a_silence_is_told_once_and_again_only_to_act(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    watch = Monitor(GuardConfig(hang_seconds=5.0, input_seconds=20.0), 1)
    watch.begin_attempt(1)
    slot = watch.beats.slot(0)
    slot[PHASE], slot[STEP], slot[LONGEST], slot[FIRST] = PHASES.index("input"), 3, 10**8, 10**8
    alarms = []
    for _ in range(30):
        clock.now += 1.0
        alarms.append(watch.look({0: os.getpid()}, {0: 0})[1])
    assert [alarm.kind for alarm in alarms if alarm is not None] == ["slow", "hung"]
    assert (alarms[5], alarms[20]) != (None, None)
    assert watch.furthest_step == 3
    slot[MARK] = int(clock.now * 1e9)
    assert clock.pass_seconds(watch, 4, os.getpid()) is None
    watch.beats.close()


def test_a_time_in_which_this_process_did_not_run_counts_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    watch = Monitor(GuardConfig(hang_seconds=5.0), 1)
    watch.begin_attempt(1)
    watch.beats.slot(0)[PHASE] = PHASES.index("step")
    clock.now += 3600.0
    assert watch.look({0: os.getpid()}, {0: 0})[1] is None
    assert clock.pass_seconds(watch, 4, os.getpid()) is None
    assert clock.pass_seconds(watch, 3, os.getpid()) is not None
    watch.beats.close()


def test_a_new_attempt_begins_with_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Monitor(GUARD, 2)
    slot = watch.beats.slot(1)
    slot[STEP], slot[PULSE] = 9, time.monotonic_ns()
    watch.note_steps()
    assert watch.furthest_step == 0, "not all of them have finished it"
    watch.beats.slot(0)[STEP] = 7
    watch.note_steps()
    watch.begin_attempt(2)
    assert (watch.beats.steps(), watch.furthest_step) == ([0, 0], 7)
    assert [one.pulse_seconds for one in watch.look({0: os.getpid()}, {0: 0})[0]] == [None]
    watch.beats.close()


def test_a_worker_that_waits_as_a_spare_holds_nobody_up() -> None:
    watch = Monitor(GUARD, 2)
    watch.begin_attempt(1)
    assert not watch.all_have_made_a_step
    watch.beats.slot(0)[STEP] = 7
    watch.note_steps()
    assert (watch.furthest_step, watch.all_have_made_a_step) == (7, True)
    watch.begin_attempt(2)
    watch.beats.slot(0)[STEP] = 9
    watch.note_steps()
    assert (watch.furthest_step, watch.all_have_made_a_step) == (7, False), "it trains now"
    watch.beats.close()


def test_a_wait_for_a_core_is_no_hang_of_anybodys(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, waited = Clock(monkeypatch), {1: 100.0, 2: 0.0}
    monkeypatch.setattr(module, "core_seconds", lambda pid: (0.0, waited[pid]))
    watch = Monitor(GuardConfig(hang_seconds=5.0), 2)
    watch.begin_attempt(2)
    for place in (0, 1):
        watch.beats.slot(place)[PHASE] = PHASES.index("step")
    alarms = []
    for second in range(30):
        clock.now += 1.0
        waited[1] += 1.0 if second < 20 else 0.0
        alarms.append(watch.look({0: 1, 1: 2}, {0: 0, 1: 1})[1])
    assert alarms.index(next(filter(None, alarms))) == 24  # what was before the first look is not known
    watch.beats.close()


def test_a_wait_for_a_core_that_lasts_is_no_hang_either(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, ran = Clock(monkeypatch), [1.0]
    monkeypatch.setattr(module, "core_seconds", lambda pid: (ran[0], 2.0))
    monkeypatch.setattr(module, "process_state", lambda pid: "R")
    watch = Monitor(GuardConfig(hang_seconds=5.0), 1)
    watch.begin_attempt(1)
    watch.beats.slot(0)[PHASE] = PHASES.index("step")
    assert clock.pass_seconds(watch, 30, 7) is None
    alarm = None
    for _ in range(10):  # it computes, and comes no further
        ran[0] += 1.0
        alarm = clock.pass_seconds(watch, 1, 7) or alarm
    assert alarm is not None
    watch.beats.close()


def test_where_no_wait_for_a_core_is_told_of_who_computes_for_ever_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel without /proc/PID/schedstat, and a loop that holds Python's lock."""
    clock = Clock(monkeypatch)
    monkeypatch.setattr(module, "core_seconds", lambda pid: None)
    monkeypatch.setattr(module, "process_state", lambda pid: "R")
    watch = Monitor(GuardConfig(hang_seconds=5.0), 1)
    watch.begin_attempt(1)
    watch.beats.slot(0)[PHASE] = PHASES.index("step")
    assert clock.pass_seconds(watch, 5, 7) is None
    assert clock.pass_seconds(watch, 1, 7) == Alarm("hung", (5,), 5.0, act=True)
    watch.beats.close()


@pytest.mark.parametrize(("state", "frozen"), [("t", False), ("D", True), ("S", True)])
def test_who_is_held_by_a_debugger_or_frozen_is_stopped(
    monkeypatch: pytest.MonkeyPatch, state: str, frozen: bool
) -> None:
    clock = Clock(monkeypatch)
    monkeypatch.setattr(module, "process_state", lambda pid: state)
    monkeypatch.setattr(module, "is_frozen", lambda pid: frozen)
    watch = Monitor(GUARD, 1)
    watch.begin_attempt(1)
    watch.beats.slot(0)[PHASE] = PHASES.index("step")
    assert clock.pass_seconds(watch, 10, 7) is None
    assert clock.pass_seconds(watch, 3, 7) == Alarm("stopped", (5,), 10.0, act=True)
    watch.beats.close()


def test_who_is_traced_and_comes_further_is_not_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    monkeypatch.setattr(module, "process_state", lambda pid: "t")
    watch = Monitor(GUARD, 1)
    watch.begin_attempt(1)
    watch.beats.slot(0)[PHASE] = PHASES.index("step")
    for _ in range(10):
        assert clock.pass_seconds(watch, 3, 7) is None
        watch.beats.slot(0)[MARK] = int(clock.now * 1e9)
    watch.beats.close()
