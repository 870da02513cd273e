"""The recorder: order, waiting for what is pending, the thread's errors, and what stands in journal and TensorBoard."""

import json
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from allranks.errors import RunError
from allranks.observing.journal import Journal
from allranks.observing.recorder import Recorder, StepRecord, Value

VALUES: Mapping[str, Value] = {"loss": 2.0, "grad_norm": 0.5, "ledger": "00000000000000ff", "accuracy": 0.25}


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    opened = Journal(tmp_path / "j.jsonl")
    yield opened
    opened.close()


def lines(journal: Journal) -> list[dict[str, Any]]:
    return [json.loads(line) for line in journal.path.read_text().splitlines()]


def step(number: int, values: Mapping[str, Value] = VALUES) -> StepRecord:
    return StepRecord(step=number, samples=32 * number, size=32, lr=0.1, seconds=0.5, ready=lambda: values)


def wait_for(journal: Journal, count: int) -> list[dict[str, Any]]:
    deadline = time.monotonic() + 30
    while len(found := lines(journal)) < count and time.monotonic() < deadline:
        time.sleep(0.005)
    return found


def test_a_step_s_line_has_the_frozen_names_in_their_order(journal: Journal) -> None:
    recorder = Recorder(journal, memory=lambda: 7)
    before = time.time()
    recorder.record(step(1))
    after = time.time()
    recorder.close()
    (line,) = lines(journal)
    assert before <= line.pop("t") <= after
    assert list(line) == [
        *("event", "step", "samples", "loss", "lr", "grad_norm", "ledger", "seconds", "accuracy", "memory_bytes")
    ]
    assert list(line.values()) == ["step", 1, 32, 2.0, 0.1, 0.5, "00000000000000ff", 0.5, 0.25, 7]


def test_lines_appear_by_themselves_once_the_reduction_is_there(journal: Journal) -> None:
    reduced = threading.Event()

    def ready() -> Mapping[str, Value]:
        assert reduced.wait(30)
        return {"loss": 1.0}

    recorder = Recorder(journal)
    recorder.record(step(1)._replace(ready=ready))
    recorder.record(step(2))
    recorder.write("checkpoint", step=2)
    time.sleep(0.1)
    assert lines(journal) == []
    reduced.set()
    found = wait_for(journal, 3)
    assert [(line["event"], line["step"]) for line in found] == [("step", 1), ("step", 2), ("checkpoint", 2)]
    recorder.close()


def test_operations_become_teraflops_a_second(journal: Journal, tmp_path: Path) -> None:
    recorder = Recorder(journal, tensorboard=tmp_path / "tb")
    recorder.record(step(1)._replace(flops=3e12, seconds=0.5))
    recorder.record(step(2))
    recorder.close()
    board = EventAccumulator(str(tmp_path / "tb"))
    board.Reload()
    assert [(point.step, point.value) for point in board.Scalars("train/tflops")] == [(1, 6.0)]


def test_inline_the_loop_s_thread_writes_what_is_at_hand_and_never_waits(journal: Journal) -> None:
    reduced, threads = threading.Event(), dict[int, int]()

    def ready(number: int) -> Mapping[str, Value]:
        threads[number] = threading.get_ident()
        return {"loss": float(number)}

    def late() -> Mapping[str, Value]:
        assert reduced.wait(30)
        return {"loss": 0.0}

    recorder = Recorder(journal, inline=True)
    number = 0
    while threading.get_ident() not in threads.values():
        number += 1
        recorder.record(step(number)._replace(ready=partial(ready, number)))
        time.sleep(0.01)
        assert number < 3000
    wait_for(journal, number)  # the newest are written without another step
    recorder.record(step(number + 1)._replace(ready=late))
    time.sleep(0.2)  # the thread waits for it now
    for later in range(number + 2, number + 20):
        recorder.record(step(later)._replace(ready=partial(ready, later)))
    assert len(lines(journal)) == number, "nothing overtakes"
    reduced.set()
    recorder.close()
    assert [line["step"] for line in lines(journal)] == list(range(1, number + 20))


def test_inline_the_thread_may_write_all_between_the_loop_s_look_and_its_turn(journal: Journal) -> None:
    recorder = Recorder(journal, inline=True)
    recorder._closing.set()
    recorder._thread.join()  # from here on this test does what the thread does, at the worst moment
    lock = recorder._writing

    class Overtaken:
        """The lock, which the loop gets after the thread has had it."""

        def acquire(self, blocking: bool) -> bool:
            recorder._writing = lock
            recorder._drain()
            recorder._writing = cast(Any, self)
            return lock.acquire(blocking)

        def release(self) -> None:
            lock.release()

    recorder._writing = cast(Any, Overtaken())
    for number in range(1, 4):
        recorder._last_look = 0.0
        recorder.record(step(number))
    assert [line["step"] for line in lines(journal)] == [1, 2, 3]
    recorder._writing = lock
    recorder.close()


def test_inline_an_error_of_the_writing_comes_at_once_or_at_the_next_call(journal: Journal) -> None:
    recorder = Recorder(journal, inline=True)

    def broken() -> Mapping[str, Value]:
        raise OSError("no reduction")

    with pytest.raises(OSError, match="no reduction"):
        for number in range(1, 3000):
            recorder.record(step(number)._replace(ready=broken))
            time.sleep(0.005)


def test_ready_is_called_on_another_thread_than_the_loop_s(journal: Journal) -> None:
    recorder = Recorder(journal)
    recorder.record(step(1)._replace(ready=lambda: {"loss": threading.get_ident()}))
    found = wait_for(journal, 1)
    recorder.close()
    assert found[0]["loss"] != threading.get_ident()


def test_flush_writes_everything_before_it_returns(journal: Journal, tmp_path: Path) -> None:
    recorder = Recorder(journal, tensorboard=tmp_path / "tb")
    for last in (500, 501, 502):
        for number in range(last - 1 if last > 500 else 0, last):
            recorder.record(step(number + 1))
        recorder.flush()
        assert [line["step"] for line in lines(journal)][-1] == last
        reader = EventAccumulator(str(tmp_path / "tb"), size_guidance={"scalars": 0}).Reload()
        assert reader.Scalars("train/loss")[-1].step == last
    recorder.close()


def test_errors_surface_at_the_next_call(journal: Journal) -> None:
    def fail() -> Mapping[str, Value]:
        raise ConnectionError("peer lost")

    recorder = Recorder(journal)
    recorder.record(step(1))
    recorder.record(step(2)._replace(ready=fail))
    with pytest.raises(ConnectionError, match="peer lost"):
        recorder.flush()
    with pytest.raises(ConnectionError, match="peer lost"):
        recorder.record(step(3))
    with pytest.raises(ConnectionError, match="peer lost"):
        recorder.write("end")
    with pytest.raises(ConnectionError, match="peer lost"):
        recorder.close()
    assert [line["step"] for line in lines(journal)] == [1]


def test_an_error_of_the_thread_reaches_the_loop(journal: Journal) -> None:
    def fail() -> Mapping[str, Value]:
        raise KeyError("missing")

    recorder = Recorder(journal)
    recorder.record(step(1)._replace(ready=fail))
    deadline = time.monotonic() + 30
    with pytest.raises(KeyError, match="missing"):
        while time.monotonic() < deadline:
            recorder.write("decision")
            time.sleep(0.005)


def test_a_journal_that_cannot_be_written_is_told_by_flush_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warned = list[str]()
    patient = Journal(tmp_path / "patient.jsonl", warn=warned.append)
    recorder = Recorder(patient)
    refuse, write = threading.Event(), os.write

    def refusing(descriptor: int, content: bytes) -> int:
        if refuse.is_set():
            raise OSError(28, "No space left on device")
        return write(descriptor, content)

    monkeypatch.setattr(os, "write", refusing)
    refuse.set()
    recorder.record(step(1))
    with pytest.raises(RunError, match="No space left on device"):
        recorder.flush()
    recorder.record(step(2))
    refuse.clear()
    recorder.flush()
    assert [line["event"] for line in lines(patient)] == ["step", "step", "verdict"]
    refuse.set()
    recorder.record(step(3))
    recorder.close()
    patient.close()
    assert len(warned) == 2 and "the last 1 lines" in warned[1]


def test_an_unwritable_board_is_not_silent(journal: Journal, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    recorder = Recorder(journal, tensorboard=tmp_path / "file" / "tb")
    recorder.record(step(1))
    with pytest.raises(RunError, match="cannot be written: Not a directory"):
        recorder.close()
    assert [line["step"] for line in lines(journal)] == [1]


def test_tags(journal: Journal, tmp_path: Path) -> None:
    recorder = Recorder(journal, tensorboard=tmp_path / "tb", memory=lambda: 1024)
    recorder.record(step(1, {**VALUES, "tokens": 640.0}))
    recorder.record(step(2, {**VALUES, "loss": math.nan, "grad_norm": None}))
    recorder.write("evaluation", step=2, samples=64, metrics={"loss": 1.5, "accuracy": 0.75})
    recorder.close()
    recorder.close()
    reader = EventAccumulator(str(tmp_path / "tb")).Reload()
    found = {tag: [(e.step, e.value) for e in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}
    losses = found.pop("train/loss")
    assert losses[0] == (1, 2.0)
    assert math.isnan(losses[1][1])
    assert found == {
        "train/lr": [(1, pytest.approx(0.1)), (2, pytest.approx(0.1))],
        "train/grad_norm": [(1, 0.5)],
        "train/samples_per_second": [(1, 64.0), (2, 64.0)],
        "train/tokens_per_second": [(1, 1280.0)],
        "train/memory_bytes": [(1, 1024.0)],
        "train/accuracy": [(1, 0.25), (2, 0.25)],
        "validation/loss": [(2, 1.5)],
        "validation/accuracy": [(2, 0.75)],
    }


def test_a_resumed_attempt_replaces_its_steps(journal: Journal, tmp_path: Path) -> None:
    for purge_from, numbers in ((None, (1, 2, 3, 4)), (3, (3, 4, 5))):
        recorder = Recorder(journal, tensorboard=tmp_path / "tb", purge_from=purge_from)
        for number in numbers:
            recorder.record(step(number, {"loss": float(purge_from or 0)}))
        recorder.close()
    reader = EventAccumulator(str(tmp_path / "tb")).Reload()
    assert [(e.step, e.value) for e in reader.Scalars("train/loss")] == [(1, 0), (2, 0), (3, 3), (4, 3), (5, 3)]


def test_nothing_is_written_for_tensorboard_where_nobody_asked(journal: Journal, tmp_path: Path) -> None:
    recorder = Recorder(journal)
    recorder.record(step(1))
    recorder.close()
    assert [path.name for path in tmp_path.iterdir()] == ["j.jsonl"]
