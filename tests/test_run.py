"""A Run directory: made whole or not at all, opened with one clear line of refusal, read whatever a crash left."""

import json
import os
import re
from pathlib import Path

import pytest

from allranks.config import Config, resolve_config
from allranks.errors import RunError
from allranks.run import Run, safe_name

STEP = {"t": 1.0, "event": "step"}


@pytest.fixture
def config() -> Config:
    return resolve_config(task_defaults={}, toml=None, overrides=["train.steps=50"])


def make(root: Path, config: Config, name: str = "Digits") -> Run:
    return Run.create(root, name, config, {"task": "/tasks/digits.py:Digits", "argv": ["train"]})


def write_journal(run: Run, *lines: object) -> None:
    text = "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
    run.journal().write_text(text)


def test_create_writes_everything_before_it_returns(tmp_path: Path, config: Config) -> None:
    run = make(tmp_path / "runs", config)
    assert re.fullmatch(rf"\d{{8}}-\d{{6}}-Digits-{run.id[:4]}", run.path.name)
    assert sorted(os.listdir(run.path)) == [
        *("checkpoints", "config.toml", "journal", "logs", "run.json", "tensorboard", "traces")
    ]
    assert os.listdir(tmp_path / "runs") == [run.path.name]
    again = Run.open(run.path)
    assert again.identity == run.identity
    assert (again.task, again.name, again.attempts) == ("/tasks/digits.py:Digits", "Digits", 0)
    assert again.config() == config
    assert set(again.identity) >= {"id", "task", "name", "created", "attempts", "argv"}


def test_two_runs_of_one_second_differ(tmp_path: Path, config: Config) -> None:
    assert make(tmp_path, config).path != make(tmp_path, config).path


@pytest.mark.parametrize(
    ("name", "safe"),
    [
        ("../../etc/passwd", "etc-passwd"),
        ("a/b\\c d", "a-b-c-d"),
        ("...", "task"),
        ("", "task"),
        ("\n$(rm)", "rm"),
        ("x" * 99, "x" * 40),
        ("My_Task", "My_Task"),
        ("größe", "gr-e"),
    ],
)
def test_names_cannot_leave_the_root(name: str, safe: str) -> None:
    assert safe_name(name) == safe


def test_create_leaves_nothing_when_it_fails_half_way(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("allranks.run.write_config", fail)
    with pytest.raises(RunError, match="cannot be written: No space left on device"):
        make(tmp_path, config)
    assert os.listdir(tmp_path) == []


def test_create_at_a_named_directory(tmp_path: Path, config: Config) -> None:
    directory = tmp_path / "mine"
    directory.mkdir()
    run = Run.create(tmp_path, "Digits", config, {}, directory=directory)
    assert run.path == directory
    assert Run.open(directory).id == run.id
    with pytest.raises(RunError, match="mine is not empty"):
        Run.create(tmp_path, "Digits", config, {}, directory=directory)
    assert Run.open(directory).id == run.id


def test_create_refuses_what_cannot_be_written(config: Config) -> None:
    with pytest.raises(RunError, match=r"^/proc/1 cannot be written"):
        Run.create(Path("/proc/1"), "Digits", config, {})


def test_open_refuses_in_one_line(tmp_path: Path, config: Config) -> None:
    run = make(tmp_path, config)
    (tmp_path / "empty").mkdir()
    refusals = {tmp_path / "missing": "no such directory", tmp_path / "empty": "is not a run: it has no run.json"}
    for path, reason in refusals.items():
        with pytest.raises(RunError, match=reason) as caught:
            Run.open(path)
        assert "\n" not in str(caught.value)
    record = run.path / "run.json"
    said = '{"id": "a", "task": "b", "name": "c", "created": "d", "attempts": '
    for text, reason in (
        ("{torn", "run.json cannot be read"),
        ("[" * 100_000, "run.json cannot be read"),
        ("[]", "lacks id"),
        ('{"id": "a"}', "lacks task, name"),
        (said.replace('"a"', '"../../home"') + "1}", r"run.json is damaged: id is '../../home', no run's; restore it"),
        (said.replace('"a"', '""') + "1}", "id is '', no run's"),
        (said + '"x"}', "run.json is damaged: attempts is 'x', no int; restore it"),
        (said + "null}", "attempts is None, no int"),
    ):
        record.write_text(text)
        with pytest.raises(RunError, match=reason) as caught:
            Run.open(run.path)
        assert "\n" not in str(caught.value)
        with pytest.raises(RunError, match=reason):
            run.acquire()
        run.release()
    assert RunError.exit_code == 78


def test_attempts_are_counted_on_disk(tmp_path: Path, config: Config) -> None:
    run = make(tmp_path, config)
    other = Run.open(run.path)
    assert run.attempt == ""
    assert run.begin_attempt() == 1
    assert other.begin_attempt() == 2
    assert Run.open(run.path).attempts == 2
    assert other.attempt != run.attempt and Run.open(run.path).attempt == other.attempt
    assert other.begin_attempt("told") == 3 and Run.open(run.path).attempt == "told"
    assert Run.open(run.path).identity["argv"] == ["train"]


def test_another_run_may_take_the_path(tmp_path: Path, config: Config) -> None:
    run = make(tmp_path, config)
    run.begin_attempt()
    before = run.id
    run.replace_identity("Letters", {"task": "/tasks/letters.py"})
    again = Run.open(run.path)
    assert again.identity == run.identity and again.id != before
    assert (again.name, again.task, again.attempts) == ("Letters", "/tasks/letters.py", 0)


def test_write_config_replaces_it(tmp_path: Path, config: Config) -> None:
    run = make(tmp_path, config)
    longer = resolve_config(task_defaults={}, toml=None, overrides=["train.steps=99"])
    run.write_config(longer)
    assert run.config() == longer


def test_the_lease_is_the_directory_s(tmp_path: Path, config: Config) -> None:
    run = make(tmp_path, config)
    run.acquire()
    with pytest.raises(RunError, match=re.escape(str(run.path))):
        Run.open(run.path).acquire()
    holder = Run.open(run.path).holder()
    assert holder is not None
    assert holder.pid == os.getpid()
    run.release()
    assert run.holder() is None


def test_who_trains_again_finds_the_rooms_that_somebody_removed(tmp_path: Path, config: Config) -> None:
    run = make(tmp_path, config)
    run.log().parent.rmdir()
    run.traces.rmdir()
    run.acquire()
    assert run.log().parent.is_dir() and run.traces.is_dir()
    run.release()
    run.log().parent.rmdir()
    run.log().parent.touch()
    with pytest.raises(RunError, match=r"/logs is no directory, which a run keeps there; move it away$"):
        Run.open(run.path).acquire()


def test_a_run_does_not_take_the_place_of_the_directory_it_is_started_in(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    for named in (Path("."), here, Path("../here")):
        with pytest.raises(RunError, match=r"here is the directory that this command runs in; name another"):
            Run.create(tmp_path, "Digits", config, {}, directory=named)
    assert here.samefile(".") and os.listdir(tmp_path) == ["here"]


def test_a_read_only_directory_refuses_the_lease(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make(tmp_path, config)

    def refuse(*_: object) -> int:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(RunError, match="cannot be written: Read-only file system"):
        run.acquire()


def test_the_config_is_the_newest_attempts_to_change(tmp_path: Path, config: Config) -> None:
    frozen = make(tmp_path, config)
    newer = Run.open(frozen.path)
    newer.begin_attempt()
    changed = config.model_copy(update={"train": config.train.model_copy(update={"seed": 7})})
    with pytest.raises(RunError, match=r"attempt 1 of .* has begun, this is attempt 0: a later one has taken over"):
        frozen.write_config(changed)
    assert newer.config() == config and os.listdir(frozen.path) == os.listdir(newer.path)
    newer.write_config(changed)
    frozen.acquire()  # a new start of its own
    assert frozen.attempts == 1 and frozen.config() == changed
    frozen.write_config(config)
    frozen.release()


def test_events_leave_out_what_a_crash_tore(tmp_path: Path, config: Config) -> None:
    run = make(tmp_path, config)
    assert run.events() == []
    write_journal(run, {"t": 1.0, "event": "start"}, '{"t": 2.0, "ev\n', STEP | {"step": 1}, '{"t": 3.0, "event": "st')
    assert [event["event"] for event in run.events()] == ["start", "step"]
    run.journal().write_bytes(run.journal().read_bytes() + b"\xff\xfe")
    assert len(run.events()) == 2


def test_a_redone_step_stands_once_and_what_was_not_redone_is_gone(tmp_path: Path, config: Config) -> None:
    run = make(tmp_path, config)
    steps = [STEP | {"step": n, "loss": n * 1.0} for n in (1, 2, 3, 4, 5)]
    write_journal(run, *steps, {"t": 2.0, "event": "resume", "step": 3}, STEP | {"step": 4, "loss": 40.0})
    assert [(step["step"], step["loss"]) for step in run.steps()] == [(1, 1), (2, 2), (3, 3), (4, 40)]
    write_journal(run, *steps, {"t": 2.0, "event": "resume", "step": 3})
    assert [step["step"] for step in run.steps()] == [1, 2, 3]
    write_journal(run, *steps, STEP | {"step": 3, "loss": 30.0})
    assert [step["loss"] for step in run.steps()] == [1, 2, 30]


def test_repr_says_how_far_it_is(tmp_path: Path, config: Config) -> None:
    run = make(tmp_path, config)
    assert repr(run) == f"<Run {run.id[:4]} step 0/50>"
    write_journal(run, *(STEP | {"step": n, "pad": "x" * 300} for n in range(1, 400)), '{"torn')
    assert repr(run) == f"<Run {run.id[:4]} step 399/50>"
    run.config_path.write_text("broken")
    assert repr(run) == f"<Run {run.id[:4]} step 399/?>"


def test_ranks_are_those_with_a_journal(tmp_path: Path, config: Config) -> None:
    run = make(tmp_path, config)
    for rank in (10, 2, 0):
        run.journal(rank).touch()
    assert run.ranks() == [0, 2, 10]
    assert run.log(3) == run.path / "logs" / "rank-00003.log"
