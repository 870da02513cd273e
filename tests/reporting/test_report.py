"""A Report from directories as runs leave them: done, stopped, killed, raised, running, never started."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from allranks.config import resolve_config
from allranks.reporting.report import report
from allranks.reporting.text import render_text
from allranks.run import Run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    config = resolve_config(task_defaults={}, toml=None, overrides=["train.steps=4"])
    return Run.create(tmp_path, "Digits", config, {"task": "/tasks/digits.py:Digits"})


def write(run: Run, rank: int, *events: dict[str, Any], torn: str = "") -> None:
    lines = [json.dumps({"t": 100.0 + at, **event}) + "\n" for at, event in enumerate(events)]
    run.journal(rank).write_text("".join(lines) + torn)


def start(rank: int = 0, attempt: int = 1) -> dict[str, Any]:
    names = {"local_rank": rank, "world_size": 2, "pid": 7, "host": "node", "device": "cpu", "layout": "dp_replicate=2"}
    return {"event": "start", "rank": rank, "attempt": attempt, **names}


def step(number: int, **more: object) -> dict[str, Any]:
    return {"event": "step", "step": number, "samples": 32 * number, "loss": 4.0 / number, "seconds": 0.5, **more}


def end(reason: str = "done", **more: object) -> dict[str, Any]:
    return {"event": "end", "reason": reason, "seconds": {"input": 0.5, "forward_backward": 1.5}, **more}


def checkpoint(run: Run, name: str, *, committed: bool = True) -> None:
    directory = run.checkpoints / name
    directory.mkdir()
    (directory / "rank-00000.safetensors").write_bytes(b"x" * 1000)
    if committed:
        (directory / "COMMITTED").write_text("not of the size, as in `checkpoint list`")


def test_a_run_that_is_done(run: Run) -> None:
    metrics = {"event": "evaluation", "step": 4, "metrics": {"accuracy": 0.75}}
    write(run, 0, start(), *(step(n) for n in (1, 2, 3, 4)), metrics, end(memory_bytes=5000))
    write(run, 1, start(1), end(memory_bytes=6000))
    checkpoint(run, "step-00000004")
    found = report(run)
    assert (found.state, found.step, found.total_steps, found.samples) == ("done", 4, 4, 128)
    assert found.loss is not None
    assert (found.loss.first, found.loss.last) == (4.0, 1.0)
    assert (found.validation_step, found.validation) == (4, {"accuracy": 0.75})
    assert (found.step_seconds, found.samples_per_second) == (0.5, 64.0)
    assert (found.seconds_by_cause, found.seconds_unsplit) == ({"input": 0.5, "forward_backward": 1.5}, 0.0)
    assert found.memory_bytes == {0: 5000, 1: 6000}
    assert [(c.name, c.step, c.committed, c.num_bytes) for c in found.checkpoints] == [("step-00000004", 4, True, 1000)]
    assert found.error is None


def test_a_run_that_never_started(run: Run) -> None:
    found = report(run)
    assert (found.state, found.because, found.step, found.loss) == ("crashed", "no process ever started here", 0, None)
    assert "none: it ended before the first step" in render_text(found)


def test_a_run_that_was_killed_in_the_middle_of_a_line(run: Run) -> None:
    write(run, 0, start(), step(1), step(2), torn='{"t": 9.0, "event": "st')
    write(run, 1, start(1), torn='{"t"')
    checkpoint(run, "step-00000002")
    checkpoint(run, "step-00000003.tmp-ab", committed=False)
    found = report(run)
    assert (found.state, found.step, found.seconds_unsplit) == ("crashed", 2, 1.0)
    assert "breaks off" in found.because
    assert [checkpoint.committed for checkpoint in found.checkpoints] == [True, False]


def test_the_rank_that_failed_first_is_the_one_to_name(run: Run) -> None:
    write(run, 0, start(), step(1), step(2), end("failed", error="ConnectionError: peer lost"))
    write(run, 1, start(1), end("failed", error="ValueError: user's mistake"))
    found = report(run)
    assert (found.state, found.because) == ("crashed", "rank 1 raised an error")
    assert found.error == "rank 1: ValueError: user's mistake"


def test_an_error_that_only_the_log_knows(run: Run) -> None:
    write(run, 0, start(), step(1))
    write(run, 1, start(1))
    run.log(0).write_text("step 1\nall is well\n")
    run.log(1).write_text("Traceback (most recent call last):\n  ...\nZeroDivisionError: division by zero\nbye\n")
    assert report(run).error == "rank 1: ZeroDivisionError: division by zero"


def test_the_end_of_an_earlier_attempt_is_not_the_end_of_this_one(run: Run) -> None:
    write(run, 0, start(attempt=1), step(1), end("stopped"), start(attempt=2), step(2))
    write(run, 1, start(1, attempt=1), end("failed", error="old"))
    found = report(run)
    assert (found.state, len(found.attempts), found.error) == ("crashed", 2, None)
    write(run, 0, start(attempt=1), step(1), end("failed"), start(attempt=2), step(2), end("stopped"))
    assert report(run).state == "stopped"


def test_a_held_lease_is_a_running_run(run: Run) -> None:
    write(run, 0, start(), step(1))
    run.acquire()
    assert report(Run.open(run.path)).state == "running"
    run.release()
    assert report(run).state == "crashed"


def test_json_is_strict(run: Run) -> None:
    write(run, 0, start(), step(1), step(2, loss=None, loss_text="nan"), end())
    plain = report(run).to_json()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert plain["loss"]["last"] == "nan"
    assert plain["attempts"][0]["layout"] == "dp_replicate=2"


def test_the_start_event_knows_the_length_that_the_config_does_not(run: Run) -> None:
    write(run, 0, start() | {"total_steps": 9}, step(1))
    assert report(run).total_steps == 9


def test_no_journal_that_can_be_opened_makes_it_raise(run: Run) -> None:
    """Fields dropped, nulled and made words; lines cut and doubled; nothing of it raises."""
    generator = random.Random(0)
    events = [start(), step(1), step(2), {"event": "evaluation", "step": 2, "metrics": {"a": 1.0}}, end(memory_bytes=3)]
    events += [{"event": "verdict", "what": "w", "evidence": ["e"]}, {"event": "decision", "what": "d"}, step(3)]
    run.config_path.write_text("broken")
    (run.checkpoints / "step-7").mkdir()
    (run.checkpoints / "step-8").touch()
    for _ in range(300):
        damaged = []
        for event in generator.choices(events, k=9):
            fields = {name: value for name, value in event.items() if name == "event" or generator.random() < 0.8}
            for name in fields:
                if name != "event" and generator.random() < 0.2:
                    fields[name] = generator.choice([None, "word", [], {}, -1, 1e400, True])
            damaged.append(fields)
        text = "".join(json.dumps(event) + "\n" for event in damaged)
        run.journal().write_text(text[: generator.randrange(len(text))])
        assert json.dumps(report(run).to_json(), allow_nan=False)
        assert render_text(report(run))
