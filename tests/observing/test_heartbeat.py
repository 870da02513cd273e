"""A worker's numbers: what the loop writes, and what the thread answers."""

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from allranks.observing.heartbeat import (
    ANSWERED,
    ASKED,
    FEW,
    FINISHED,
    FIRST,
    LOADED,
    LONGEST,
    MARK,
    NUM_FIELDS,
    PHASE,
    PHASES,
    PULSE,
    RECENT,
    SAVED,
    SLOT_BYTES,
    STACK_SIGNAL,
    STEP,
    Heartbeat,
    show_compilation,
)
from tests.processes import wait_until


@pytest.fixture(scope="module")
def dynamo() -> None:
    """torch's compiler sets an environment variable as it is imported: before any test looks."""
    importlib.import_module("torch._inductor.runtime.cache_dir_utils")
    importlib.import_module("torch._dynamo")


@pytest.fixture
def fields() -> memoryview:
    return memoryview(bytearray(SLOT_BYTES)).cast("q")


def at_time(monkeypatch: pytest.MonkeyPatch, *seconds: float) -> None:
    clock = iter(int(second * 1e9) for second in seconds)
    monkeypatch.setattr(time, "monotonic_ns", lambda: next(clock))


def test_the_first_step_is_told_apart_and_the_longest_other_one_is_kept(
    fields: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_time(monkeypatch, 0, 1, 1, 31, 31, 40, 40, 42, 42, 50, 50, 51, 51)
    heart = Heartbeat(fields)
    heart.begin_step()
    assert PHASES[fields[PHASE]] == "first step"
    heart.finish_step(8)
    heart.begin_step()
    assert PHASES[fields[PHASE]] == "step"
    heart.finish_step(9)
    heart.begin_step()
    heart.finish_step(10)
    assert (fields[FIRST], fields[LONGEST], fields[STEP]) == (30 * 10**9, 2 * 10**9, 10)


def test_what_the_host_waits_for_a_device_before_a_step_is_a_steps_time(fields: memoryview, clock: list[int]) -> None:
    heart = Heartbeat(fields)
    for waited in (0.0, 7.0):
        clock[0] += 10 * 10**9
        heart.begin_step(waited)
        clock[0] += 10**9
        heart.finish_step(1)
    assert (fields[FIRST], fields[LONGEST]) == (10**9, 8 * 10**9)


def test_the_end_of_the_work_is_shown_with_its_code(fields: memoryview) -> None:
    heart = Heartbeat(fields)
    heart.resumed(4)
    heart.finish_step(5)
    assert (heart.step, fields[FINISHED]) == (5, 0)
    heart.finish(75)
    assert fields[FINISHED] == 76


def test_compilation_in_a_later_step_is_a_phase_that_no_step_learns_from(
    fields: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_time(monkeypatch, 0, 0, 1, 31, 31, 40, 40, 41, 71, 72, 72)
    heart = Heartbeat(fields)
    heart.begin_step()
    heart.begin_compiling()
    assert PHASES[fields[PHASE]] == "first step", "which has its time for that"
    heart.end_compiling()
    heart.finish_step(1)
    heart.begin_step()
    heart.begin_compiling()
    assert PHASES[fields[PHASE]] == "compilation"
    heart.end_compiling()
    assert PHASES[fields[PHASE]] == "step"
    heart.finish_step(2)
    assert fields[LONGEST] == 2 * 10**9


@pytest.mark.usefixtures("dynamo")
def test_torchs_compiler_tells_when_it_is_at_work_also_after_a_reset(fields: memoryview) -> None:
    heart = Heartbeat(fields)
    heart.begin_step()
    heart.finish_step(1)
    heart.begin_step()
    seen = []

    def look(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., Any]:
        seen.append(PHASES[fields[PHASE]])
        return graph.forward

    for _ in range(2):
        show_compilation(heart)
        show_compilation(heart)
        torch.compile(lambda x: x * 2, backend=look)(torch.ones(2))
        torch._dynamo.reset()
    assert seen == ["compilation", "compilation"] and PHASES[fields[PHASE]] == "step"


def test_loading_is_a_phase_of_its_own_but_for_the_first_step(fields: memoryview) -> None:
    heart = Heartbeat(fields)
    heart.begin_step()
    with heart.loading():
        assert PHASES[fields[PHASE]] == "first step"
    heart.finish_step(1)
    heart.begin_step()
    with heart.loading():
        assert PHASES[fields[PHASE]] == "input"
        before = fields[MARK]
    assert PHASES[fields[PHASE]] == "step" and fields[MARK] > before


def made(heart: Heartbeat, clock: list[int], seconds: float, loading: float = 0.0) -> None:
    """One step that takes so long, besides loading."""
    heart.begin_step()
    with heart.loading():
        clock[0] += int(loading * 1e9)
    clock[0] += int(seconds * 1e9)
    heart.finish_step(1)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    now = [0]
    monkeypatch.setattr(time, "monotonic_ns", lambda: now[0])
    return now


def test_loading_is_no_part_of_how_long_a_step_takes(fields: memoryview, clock: list[int]) -> None:
    heart = Heartbeat(fields)
    made(heart, clock, 30, loading=5)
    assert (fields[FIRST], fields[LONGEST], fields[LOADED]) == (35 * 10**9, 0, 0), "the first one is taken as a whole"
    made(heart, clock, 1, loading=100)
    assert (fields[LONGEST], fields[LOADED]) == (10**9, 100 * 10**9)
    made(heart, clock, 2)
    assert (fields[LONGEST], fields[LOADED]) == (2 * 10**9, 100 * 10**9)


def test_how_long_a_checkpoint_shows_nothing_is_learned(fields: memoryview, clock: list[int]) -> None:
    heart = Heartbeat(fields)

    def save(*silences: int) -> int:
        heart.enter("checkpoint")
        for silence in silences:
            clock[0] += silence * 10**9
            heart.progress()
        heart.enter("step")
        return fields[SAVED] // 10**9

    clock[0] += 500 * 10**9
    assert save(3, 7, 2) == 7, "the longest of one, and nothing of what was before"
    assert [save(4), save(9)] == [7, 9]
    heart.enter("checkpoint")
    clock[0] += 11 * 10**9
    heart.enter("checkpoint")
    assert save() == 11, "one behind the other"


def test_a_hiccup_counts_by_less_and_what_comes_again_in_full(fields: memoryview, clock: list[int]) -> None:
    heart = Heartbeat(fields)
    for _ in range(1 + FEW):
        made(heart, clock, 1)
    made(heart, clock, 10)
    assert fields[LONGEST] == 4 * 10**9
    for _ in range(3 * RECENT):
        made(heart, clock, 1)
        assert fields[LONGEST] == 4 * 10**9, "that is remembered"
    made(heart, clock, 9)
    assert fields[LONGEST] == 4 * 10**9
    for count in range(RECENT - 1):
        made(heart, clock, 8 if count == 0 else 1)
        assert fields[LONGEST] == 8 * 10**9, "twice, and not long ago"
    for _ in range(2 * RECENT):
        made(heart, clock, 1)
    assert fields[LONGEST] == 4 * 10**9


def test_of_the_first_steps_the_longest_counts_in_full(fields: memoryview, clock: list[int]) -> None:
    heart = Heartbeat(fields)
    made(heart, clock, 60)
    for _ in range(FEW):
        made(heart, clock, 20 if fields[LONGEST] == 0 else 1)
        assert fields[LONGEST] == 20 * 10**9
    made(heart, clock, 1)
    assert fields[LONGEST] == 8 * 10**9


def test_a_question_is_answered_once_also_where_the_answer_fails(fields: memoryview) -> None:
    heart, answers = Heartbeat(fields), list[bool]()
    heart.pulse(answers.append)
    assert fields[PULSE] > 0 and not answers
    fields[ASKED] = 1
    heart.pulse(answers.append)
    heart.pulse(answers.append)
    assert (answers, fields[ANSWERED]) == ([False], 1)
    fields[ASKED] = 2
    heart.pulse(lambda stacks: os.stat("/nowhere"))  # type: ignore[arg-type]
    assert fields[ANSWERED] == 2
    fields[ASKED] = -3
    heart.pulse(answers.append)
    assert (answers, fields[ANSWERED]) == ([False, True], -3)


def test_a_process_that_joined_beats_and_shows_its_stack_while_it_holds_pythons_lock(tmp_path: Path) -> None:
    memory, log = tmp_path / "memory", tmp_path / "rank-00000.log"
    memory.write_bytes(bytes(2 * SLOT_BYTES))
    script = f"""
import re
from pathlib import Path
from allranks.observing import heartbeat
heartbeat.join({str(memory)!r}, 1, Path({str(log)!r}))
heartbeat.current().finish_step(7)
def in_compiled_code():
    re.match(r"(a?){{40}}a{{40}}", "a" * 40)
in_compiled_code()
"""

    def shown() -> memoryview:
        return memoryview(memory.read_bytes()).cast("q")[NUM_FIELDS:]

    def silent() -> bool:
        before = shown()[PULSE]
        time.sleep(1.2)
        return shown()[PULSE] == before > 0

    with subprocess.Popen([sys.executable, "-c", script]) as process:
        try:
            wait_until(lambda: shown()[STEP] == 7)
            wait_until(silent)  # no thread of its Python runs beside the regular expression
            os.kill(process.pid, STACK_SIGNAL)
            wait_until(lambda: "in in_compiled_code" in log.read_text())
        finally:
            process.send_signal(signal.SIGKILL)


def test_looking_at_the_stack_of_a_process_whose_threads_work_does_not_end_it(tmp_path: Path) -> None:
    """Python's own handler walks the frames of threads that run meanwhile, where it is asked for all of them."""
    memory, log = tmp_path / "memory", tmp_path / "rank-00000.log"
    memory.write_bytes(bytes(SLOT_BYTES))
    script = f"""
import shutil, tempfile, threading
from pathlib import Path
from allranks.observing import heartbeat
heartbeat.join({str(memory)!r}, 0, Path({str(log)!r}))
def work():
    while True:
        shutil.rmtree(tempfile.mkdtemp(dir={str(tmp_path)!r}))
for _ in range(2):
    threading.Thread(target=work, daemon=True).start()
heartbeat.current().finish_step(7)
work()
"""

    def shown() -> memoryview:
        return memoryview(memory.read_bytes()).cast("q")

    with subprocess.Popen([sys.executable, "-c", script]) as process:
        try:
            wait_until(lambda: shown()[STEP] == 7)
            for _ in range(500):
                os.kill(process.pid, STACK_SIGNAL)
                time.sleep(0.002)
            assert process.poll() is None, "it took some 30 signals where the stacks of all threads were written"
        finally:
            process.send_signal(signal.SIGKILL)
    assert log.read_text().count("Stack (most recent call first):") > 100
