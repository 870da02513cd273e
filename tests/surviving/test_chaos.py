"""Trials with the real command and real kills."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from allranks.errors import ConfigError
from allranks.fault_points import Fault, read_schedule
from allranks.run import Run
from allranks.surviving import chaos
from allranks.surviving.chaos import HOLDS, Answer, Trial, break_on_purpose
from allranks.surviving.trial_commands import Command, Left
from tests.commands import POINTS, allranks

LIMIT_SECONDS = 900  # a trial starts a command for every fault that ends one, and a busy machine is slow
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(LIMIT_SECONDS)]
TRAIN = ("train.global_batch=8", "evaluate.every=10", "track.tensorboard=false", "task.num_points=64")
EVERY_POINT = 15
PART_OF_A_THOUSAND = 25
Record = Callable[[str, object], None]
WAYS = (
    (),
    ("checkpoint.asynchronous=true",),
    ("--layout", "fsdp"),
    ("checkpoint.memory_every=1",),
    ("--layout", "tp=2"),
    ("--layout", "pp=2"),
)
WRITING = ("checkpoint.write", "checkpoint.sync", "checkpoint.manifest", "checkpoint.rename", "checkpoint.renamed")


def trial(folder: Path, *words: str, kills: int, check: int = 0) -> dict[str, object]:
    """What `allranks chaos --json` says; everything holds, or what does not is in the message."""
    wanted = ("--kills", str(kills), "--nproc", "2", "--layout", "ddp", "--json", "--run", "trial")
    ran = allranks("chaos", POINTS, *TRAIN, *wanted, *words, folder=folder, check=None, limit=LIMIT_SECONDS)
    assert ran.stdout, f"ended with {ran.returncode}\n{ran.stderr}"
    document: dict[str, object] = json.loads(ran.stdout)
    told = "\n".join(json.dumps(one) for key in ("invariants", "incidents") for one in document.get(key, ()))  # type: ignore[attr-defined]
    assert ran.returncode == check == document["exit_code"], f"{document.get('verdict')}\n{told}\n{ran.stderr}"
    return document


def record(record_property: Record, document: Any) -> None:
    """Tell how long it took from a fault to the next finished step, at most: of all, and by the point of the fault."""
    at = dict[str, float]()
    for incident in document["incidents"]:
        if incident["seconds"] is not None:
            at[incident["point"]] = max(at.get(incident["point"], 0.0), incident["seconds"])
    record_property("restart_seconds", max(at.values()))
    record_property("seconds_at", at)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full), pytest.param(2, marks=pytest.mark.full)])
def test_killed_sixty_times_nothing_is_lost(tmp_path: Path, record_property: Record, seed: int) -> None:
    document = trial(tmp_path, "train.steps=182", "--seed", str(seed), kills=60)
    record(record_property, document)
    assert [document[key] for key in ("planned", "happened", "recovered", "restarts")] == [60] * 4
    schedule = read_schedule(tmp_path / "trial" / "faults")
    assert len({fault.point for fault in schedule}) >= EVERY_POINT and {fault.rank for fault in schedule} == {0, 1}
    assert [one["holds"] for one in document["invariants"]] == [True] * 7  # type: ignore[attr-defined]


@pytest.mark.full
@pytest.mark.parametrize("part", range(40))
def test_a_thousand_kills(tmp_path: Path, record_property: Record, part: int) -> None:
    """In parts, so that a full run that was ended goes on behind those that passed; the layouts and saves in turn."""
    words = ("train.steps=150", *WAYS[part % len(WAYS)], "--seed", str(part))
    document = trial(tmp_path, *words, kills=PART_OF_A_THOUSAND)
    assert (document["happened"], document["recovered"]) == (PART_OF_A_THOUSAND, PART_OF_A_THOUSAND)
    record(record_property, document)


@pytest.mark.full
def test_connections_that_are_cut_at_every_point_cost_a_restart_each(tmp_path: Path) -> None:
    document = trial(tmp_path, "train.steps=90", "--points", "*:disconnect", kills=EVERY_POINT)
    assert document["recovered"] == EVERY_POINT and document["restarts"] >= EVERY_POINT - 1  # type: ignore[operator]


@pytest.mark.full
@pytest.mark.parametrize("kind", ["kill", "stop", "segfault", "exit", "raise", "enospc", "eio"])
def test_every_point_and_kind(tmp_path: Path, record_property: Record, kind: str) -> None:
    goes_on = kind in ("enospc", "eio")  # the save fails, and the steps do not wait for another
    kills = 8 if goes_on else EVERY_POINT
    words = ("--points", f"*:{kind}", "train.steps=90", "guard.stopped_seconds=1")
    document = trial(tmp_path, *words, kills=kills)
    assert document["recovered"] == kills
    if goes_on:
        assert {one["recovery"] for one in document["incidents"]} == {"went on"}  # type: ignore[attr-defined]
    else:
        record(record_property, document)


@pytest.mark.full
def test_a_process_that_loads_data_is_killed_and_costs_a_restart(tmp_path: Path) -> None:
    words = ("data.workers=2", "train.steps=24", "--points", "data.worker", "--kills", "4", "--nproc", "2")
    layout = ("--layout", "ddp", "--json", "--run", "trial")
    ran = allranks("chaos", POINTS, *TRAIN, *words, *layout, folder=tmp_path, check=None, limit=LIMIT_SECONDS)
    document: dict[str, Any] = json.loads(ran.stdout)
    assert [document[key] for key in ("happened", "recovered", "restarts")] == [4] * 3, ran.stdout
    broken = {one["name"]: one["what"] for one in document["invariants"] if not one["holds"]}
    # What was killed may leave its temporary folder; nothing else.
    assert set(broken) <= {"I7"} and "process" not in broken.get("I7", ""), broken
    for incident in document["incidents"]:
        assert "a process that loads data died" in incident["causes"][0], incident


@pytest.mark.full
def test_killed_in_the_backward_of_a_pipeline(tmp_path: Path) -> None:
    words = ("--layout", "pp=2", "train.micro_steps=2", "train.steps=24", "--points", "backward", "--seed", "3")
    assert trial(tmp_path, *words, kills=6)["recovered"] == 6
    assert {fault.rank for fault in read_schedule(tmp_path / "trial" / "faults")} == {0, 1}


@pytest.mark.full
def test_killed_in_the_last_deletion_nothing_is_left(tmp_path: Path) -> None:
    document = trial(tmp_path, "train.steps=15", "--points", "checkpoint.remove", kills=1)
    assert document["incidents"][0]["step"] == 15  # type: ignore[index]


@pytest.mark.full
@pytest.mark.parametrize("layout", ["fsdp", "pp=2", "tp=2"])
def test_other_layouts(tmp_path: Path, layout: str) -> None:
    assert trial(tmp_path, "train.steps=40", "--layout", layout, kills=8)["recovered"] == 8


@pytest.mark.full
@pytest.mark.parametrize("kind", ["kill", "stop", "raise"])
def test_killed_beside_the_training(tmp_path: Path, record_property: Record, kind: str) -> None:
    """While a checkpoint is copied, written and committed beside the steps."""
    names = ("background.copy", "background.written", "background.commit", *WRITING)
    points = ",".join(f"{name}:{kind}" for name in names)
    words = ("checkpoint.asynchronous=true", "train.steps=90", "--points", points, "guard.stopped_seconds=1")
    document = trial(tmp_path, *words, kills=EVERY_POINT)
    assert document["recovered"] == EVERY_POINT
    schedule = read_schedule(tmp_path / "trial" / "faults")
    assert {fault.point for fault in schedule} == set(names)
    record(record_property, document)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["kill", "raise", "enospc"])
def test_killed_while_copies_are_made_in_memory(tmp_path: Path, kind: str) -> None:
    """Whatever breaks a copy, the run goes on from a good one, and `/dev/shm` has nothing left (I7)."""
    points = ",".join(f"{name}:{kind}" for name in ("checkpoint.stage", *WRITING))
    document = trial(tmp_path, "checkpoint.memory_every=1", "train.steps=60", "--points", points, kills=8)
    assert document["recovered"] == 8
    resumed = [event for event in Run.open(tmp_path / "trial" / "broken").events() if event["event"] == "resume"]
    assert kind != "kill" or "memory" in {event["tier"] for event in resumed}


@pytest.mark.full
def test_a_point_that_never_happens_is_refused(tmp_path: Path) -> None:
    refused = trial(tmp_path, "train.steps=4", "evaluate.every=0", "--points", "evaluate", kills=1, check=2)
    assert str(refused["error"]).startswith("evaluate never happens in this program: it passes start, resume, data")


@pytest.mark.full
def test_a_training_that_fails_by_itself_is_undetermined(tmp_path: Path) -> None:
    document = trial(tmp_path, "train.steps=30", "task.boom_rank=1", kills=2, check=3)
    assert str(document["verdict"]).startswith("undetermined: the undisturbed run itself ended with 1: ValueError: the")


def ask(folder: Path, *arguments: str, kills: int = 1, points: str | None = None) -> None:
    break_on_purpose(Trial(arguments, ("--nproc", "1"), kills, 0, points, folder), lambda line: None)


def test_what_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--kills 0: a trial without a fault proves nothing"):
        ask(tmp_path / "new", kills=0)
    with pytest.raises(ConfigError, match="no such point 'forwad'; did you mean 'forward'"):
        ask(tmp_path / "new", points="forwad")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ConfigError, match="is not empty: name another directory"):
        ask(tmp_path / "full")
    assert not (tmp_path / "new").exists()


def first_words(
    folder: Path, monkeypatch: pytest.MonkeyPatch, num_faults: int, *words: str
) -> tuple[list[str], list[str], list[str]]:
    """What the two runs of a trial are started with, but for their directories, and what was chosen for the user."""
    started = list[list[str]]()

    def run_until_done(first: Any, again: Any, points: Path, logs: Path, name: str) -> tuple[list[Command], Left]:
        started.append(list(first[1:-2]))
        return [Command(0.0, 1.0, 0, logs / name)], Left()

    def nothing(*_: object) -> list[Any]:
        return []

    faults = [Fault(number, "forward", 0, 3 * number, 1, "kill") for number in range(num_faults)]
    monkeypatch.setattr(chaos, "run_until_done", run_until_done)
    monkeypatch.setattr(chaos, "draw", lambda *_: faults)
    for name in ("read_passed", "write_schedule", "read_fired", "read_incidents", "judge"):
        monkeypatch.setattr(chaos, name, nothing)
    monkeypatch.setattr(chaos, "Run", SimpleNamespace(open=lambda path: SimpleNamespace(events=list)))
    answer = break_on_purpose(Trial(words, ("--nproc", "1"), 1, 0, None, folder), lambda line: None)
    return started[0], started[1], [one.what for one in answer.decisions]


def test_a_trial_cannot_exhaust_the_budget_of_restarts_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the run without faults stays: it may fail by itself."""
    (tmp_path / "own.toml").write_text("[guard]\nrestarts = 1\n")
    (tmp_path / "other.toml").write_text('[guard]\nhang = "warn"\n')
    every, own, other = "checkpoint.every=9", str(tmp_path / "own.toml"), str(tmp_path / "other.toml")
    for number, (faults, words, more) in enumerate(
        (
            (4, (every,), ["guard.restarts=4"]),
            (25, (every, other), ["guard.restarts=25"]),
            (3, (every,), []),
            (25, (every, "guard.restarts=2"), []),
            (25, (every, own), []),
        )
    ):
        undisturbed, broken, decided = first_words(tmp_path / str(number), monkeypatch, faults, *words)
        assert undisturbed == [*words, "--nproc", "1"]
        assert broken == [*words, *more, "--nproc", "1"] and decided == more


@pytest.mark.full
def test_faults_in_a_row_without_a_further_step_are_all_recovered_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that strikes beside the steps, late, and those of the recovery and of the next step."""
    first = Fault(0, "forward", 0, 8, 1, "kill")
    others = [Fault(number, "resume", 0, 8, 1, "kill", after=number - 1) for number in range(1, 5)]
    monkeypatch.setattr(chaos, "draw", lambda *_: [first, *others])
    words = (POINTS, *TRAIN, "train.steps=12", "checkpoint.every=5")
    answer: Answer = break_on_purpose(Trial(words, ("--nproc", "1"), 5, 0, None, tmp_path / "trial"), print)
    assert (answer.exit_code, answer.restarts) == (HOLDS, 5), answer
    assert [one.recovery for one in answer.incidents] == ["restarted"] * 5


@pytest.mark.full
def test_what_train_refuses_is_refused_in_its_words_and_leaves_the_name_free(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"unknown key 'train\.stepss'"):
            ask(tmp_path / "new", POINTS, "train.stepss=3")
    for text in ("checkpoint = 5", "checkpoint = [", "[[" * 5000):
        (tmp_path / "wrong.toml").write_text(text)
        with pytest.raises(ConfigError, match=r"wrong\.toml"):
            ask(tmp_path / "new", POINTS, str(tmp_path / "wrong.toml"))
