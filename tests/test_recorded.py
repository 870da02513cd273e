"""What a worker writes down of its end, and what it notes before it has ended."""

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from allranks.errors import RunError
from allranks.failure import clear_failures, read_failures
from allranks.recorded import Noting, forget_error, note_device_error, note_error, record_failure, run_recorded


def test_the_traceback_starts_in_the_users_code(tmp_path: Path) -> None:
    def entry() -> None:
        raise ValueError("mine")

    assert run_recorded(entry, (), rank=1, folder=tmp_path) == 1
    (failure,) = read_failures(tmp_path)
    lines = failure.traceback.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert "test_recorded.py" in lines[1]
    assert lines[-1] == "ValueError: mine"


def test_who_leaves_in_the_middle_is_told_with_step_and_line(tmp_path: Path) -> None:
    assert run_recorded(_exit, (0,), rank=1, folder=tmp_path, step=lambda: 5) == 1
    (failure,) = read_failures(tmp_path)
    assert failure.message == "the user's code ended the process after step 5: sys.exit(0)"
    shown = failure.render()
    assert "in _exit" in shown and "in run_recorded" not in shown and shown.endswith(failure.message)


def test_run_recorded_gives_the_code_and_leaves_a_record(tmp_path: Path) -> None:
    assert run_recorded(lambda: None, (), rank=0, folder=tmp_path) == 0
    assert run_recorded(lambda code: code, (130,), rank=0, folder=tmp_path) == 130
    assert read_failures(tmp_path) == []
    assert run_recorded(_exit, (4,), rank=2, folder=tmp_path) == 1
    (failure,) = read_failures(tmp_path)
    assert failure.rank == 2
    assert failure.render() in (tmp_path / "rank-00002.log").read_text()
    clear_failures(tmp_path)
    assert read_failures(tmp_path) == []


def test_what_cannot_be_written_down_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A full disk may be what has ended the worker: its code and its words stay."""
    (tmp_path / "file").touch()
    error = RunError("the journal cannot be written: No space left on device")
    assert record_failure(error, rank=0, folder=tmp_path / "file") == 78
    assert "the journal cannot be written: No space left on device" in capsys.readouterr().err


def _exit(code: int) -> None:
    raise SystemExit(code)


def test_torchrun_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))

    def entry() -> None:
        raise ValueError("mine")

    assert run_recorded(entry, (), rank=0, folder=None) == 1
    told = json.loads((tmp_path / "error.json").read_text())
    assert told["message"]["message"] == "ValueError: mine"
    assert "in entry" in told["message"]["extraInfo"]["py_callstack"]
    assert int(told["message"]["extraInfo"]["timestamp"]) > 1e9
    assert capsys.readouterr().err.rstrip().endswith("ValueError: mine")


def test_a_consequence_is_shown_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def entry() -> None:
        raise RuntimeError("Connection closed by peer")

    assert run_recorded(entry, (), rank=4, folder=None) == 76
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("rank 4 on ")
    assert line.endswith(": RuntimeError: Connection closed by peer")


def test_what_leaves_is_noted_before_all_around_it_is_closed_and_written_again_at_the_end(tmp_path: Path) -> None:
    seen = []

    def entry() -> None:
        try:
            with Noting():
                raise ValueError("raw")
        except ValueError as error:
            seen.extend(read_failures(tmp_path))
            raise RunError("explained") from error

    assert run_recorded(entry, (), rank=1, folder=tmp_path) == 78
    (noted,), (final,) = seen, read_failures(tmp_path)
    assert noted.noted and noted.message == "ValueError: raw" and noted.render().endswith("ValueError: raw")
    assert noted.traceback.count("File ") == 1 and "and ended before all was closed" in noted.render()
    assert not final.noted and (final.message, final.exit_code) == ("explained", 78)


@pytest.mark.parametrize("forget", [forget_error, lambda: None])
def test_an_error_that_was_caught_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forget: Callable[[], None]
) -> None:
    """Neither where the worker says so, nor where it comes to its end."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))

    def entry() -> None:
        note_error(ValueError("borne"))
        assert len(list(tmp_path.iterdir())) == 2
        forget()
        assert not list(tmp_path.iterdir()) or forget is not forget_error

    assert run_recorded(entry, (), rank=1, folder=tmp_path) == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), MemoryError(), None])
def test_requests_and_want_of_memory_are_not_noted(tmp_path: Path, error: BaseException | None) -> None:
    run_recorded(lambda: note_error(error), (), rank=1, folder=tmp_path)

    def entry() -> None:
        note_error(error)
        assert not list(tmp_path.iterdir())

    assert run_recorded(entry, (), rank=1, folder=tmp_path) == 0


def test_where_others_survive_only_an_error_of_the_device_is_noted(tmp_path: Path) -> None:
    def entry() -> None:
        note_device_error(RuntimeError("shapes differ"))
        note_device_error(ValueError("CUDA error: no"))
        assert not read_failures(tmp_path)
        note_device_error(RuntimeError("CUDA error: an illegal memory access was encountered"))
        assert len(read_failures(tmp_path)) == 1

    assert run_recorded(entry, (), rank=1, folder=tmp_path) == 0


def test_who_is_no_worker_notes_nothing(tmp_path: Path) -> None:
    """Nor is a process that a worker has forked, whose record would stand for the worker's; nor another thread."""
    note_error(ValueError("of nobody"))

    def entry() -> None:
        thread = threading.Thread(target=note_error, args=(ValueError("of a thread"),))
        thread.start()
        thread.join()
        child = os.fork()
        if child == 0:
            note_error(ValueError("of the child"))
            os._exit(0)
        os.waitpid(child, 0)
        assert not list(tmp_path.iterdir())

    assert run_recorded(entry, (), rank=1, folder=tmp_path) == 0


def test_where_nothing_is_recorded_an_error_of_the_device_is_shown_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Once, however often it is noted: under srun nobody else would tell of it."""

    def entry() -> None:
        note_error(ValueError("mine"))
        forget_error()
        for _ in range(2):
            note_error(RuntimeError("CUDA error: device-side assert triggered"))

    assert run_recorded(entry, (), rank=0, folder=None) == 0
    shown = capsys.readouterr().err
    assert shown.rstrip().endswith("RuntimeError: CUDA error: device-side assert triggered")
    assert shown.count("CUDA error") == 1 and "mine" not in shown


def test_a_note_that_cannot_be_written_disturbs_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    def entry() -> None:
        with Noting():
            raise ValueError("mine")

    assert run_recorded(entry, (), rank=0, folder=tmp_path / "file") == 1


def test_an_error_with_a_path_that_is_no_utf8_is_recorded(tmp_path: Path) -> None:
    assert record_failure(RunError("caf\udce9: no Run"), rank=0, folder=tmp_path) == 78
    assert "caf\\udce9: no Run" in (tmp_path / "rank-00000.log").read_text()
    assert read_failures(tmp_path)[0].message == "caf\\udce9: no Run"
