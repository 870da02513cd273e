"""The progress line on a terminal and elsewhere."""

import io
import time

import pytest
from rich.console import Console

from allranks.observing.progress import ProgressLine


def plain() -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=False, width=40), file


def run(line: ProgressLine, first: int, last: int) -> None:
    for step in range(first, last + 1):
        line.update(step, 2.0 / step, 1234.0)
    line.close()
    line.close()


def test_without_a_terminal_each_tenth_is_one_line() -> None:
    console, file = plain()
    run(ProgressLine(1000, console=console), 1, 1000)
    lines = file.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == [f"step {n}/1000" for n in range(100, 1001, 100)]
    assert lines[4].startswith("step 500/1000  50%  loss 0.0040  1.2k samples/s  ETA ")
    assert lines[-1].endswith("samples/s"), "nothing is left to wait for"


def test_the_last_state_is_always_said() -> None:
    console, file = plain()
    run(ProgressLine(1000, console=console), 1, 42)
    assert file.getvalue().startswith("step 42/1000  4%  ")
    assert len(file.getvalue().splitlines()) == 1


def test_skipped_steps_are_counted() -> None:
    console, file = plain()
    line = ProgressLine(10, console=console)
    line.update(4, 0.5, 10.0, 3)
    line.close()
    assert "loss 0.5000  3 skipped  10 samples/s" in file.getvalue()


def test_nothing_is_said_where_nothing_happened() -> None:
    console, file = plain()
    ProgressLine(1000, first_step=500, console=console).close()
    assert file.getvalue() == ""


def test_a_slow_run_speaks_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    console, file = plain()
    line = ProgressLine(1_000_000, first_step=40, console=console)
    for step in range(41, 91):
        now[0] += 1.0
        line.update(step, None, 8.0)
    said = file.getvalue().splitlines()
    assert [text.split("  ")[0] for text in said] == [f"step {n}/1000000" for n in (50, 60, 70, 80, 90)]
    assert said[-1] == "step 90/1000000  0%  8 samples/s  ETA 11 d 14 h"


def test_without_a_known_end_there_is_no_percentage(monkeypatch: pytest.MonkeyPatch) -> None:
    console, file = plain()
    run(ProgressLine(None, console=console), 1, 3)
    assert file.getvalue() == "step 3  loss 0.6667  1.2k samples/s\n"


def test_on_a_terminal_the_line_is_live_and_stays_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    file = io.StringIO()
    line = ProgressLine(8, console=Console(file=file, force_terminal=True, width=100, _environ={"TERM": "xterm"}))
    line.update(4, 1.25, 10.0)
    deadline = time.monotonic() + 30
    while "step 4/8" not in file.getvalue() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert "step 4/8  50%  loss 1.2500" in file.getvalue()
    line.update(8, 1.0, 10.0)
    line.close()
    assert "━" * 24 in file.getvalue()
    assert file.getvalue().rindex("step 8/8  100%  loss 1.0000") > file.getvalue().rindex("step 4/8")
