"""Each invariant on a run of which nothing was lost, and on one that breaks it."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from allranks.checkpointing.checkpoint import Header, list_checkpoints
from allranks.checkpointing.host_memory import HostMemory, left_of
from allranks.checkpointing.save import save
from allranks.config import Config
from allranks.fault_points import Fault
from allranks.parameter_map import Box, Entry
from allranks.run import Run
from allranks.surviving.incidents import Incident
from allranks.surviving.invariants import (
    bounded_work,
    judge,
    nothing_left,
    one_cause_each,
    recovered,
    same_samples,
    same_state,
    sound_checkpoints,
)
from allranks.surviving.trial_commands import Command, Left

KILL = Fault(0, "forward", 1, 8, 1, "kill")
GOOD = Incident(KILL, "restarted", ("rank 1 on h was killed",), 5, 2, 0.5)


def make_run(
    path: Path, values: float = 1.0, steps: tuple[int, ...] = (1, 2, 3), state: Mapping[str, Any] | None = None
) -> Run:
    run = Run.create(path.parent, "points", Config(), {}, directory=path)
    lines = [{"t": 1.0, "event": "step", "step": n, "samples": 8 * n, "ledger": f"{n:016x}"} for n in steps]
    run.journal().write_text("".join(json.dumps(line) + "\n" for line in lines))
    entry = Entry("model.w", (4,), "float32", Box.whole((4,)), (0,))
    save(
        run.checkpoints,
        header=Header(run.id, 1, "single", 3, 24),
        parts=[(entry, torch.full((4,), values))],
        aliases={},
        state=state or {"stream": 24},
        group=None,
        rank=0,
        world_size=1,
        token="t",
    )
    return run


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Run, Run]:
    return make_run(tmp_path / "undisturbed"), make_run(tmp_path / "broken", steps=(1, 2, 2, 3))


def test_all_hold_where_nothing_was_lost(pair: tuple[Run, Run]) -> None:
    found = judge(*pair, [GOOD], [], Left(), {"planned": 1, "fired": 1})
    assert [(one.name, one.holds) for one in found] == [(f"I{n}", True) for n in range(1, 8)], found


def test_i1_sees_one_other_number(pair: tuple[Run, Run], tmp_path: Path) -> None:
    other = make_run(tmp_path / "other", values=1.0000001)
    assert same_state(pair[0], other).holds is False
    assert "model.w" in same_state(pair[0], other).what
    shutil.rmtree(pair[1].checkpoints)
    assert same_state(*pair).holds is False
    assert same_state(pair[1], pair[0]).holds is None


def test_i1_sees_other_facts_but_not_how_many_samples_there_was_time_for(tmp_path: Path) -> None:
    told = [
        {"stream": 24, "dataset": {"num_samples": n, "fingerprint": {"1": "a"} | m}}
        for n, m in ((9, {}), (9, {"2": "b"}), (8, {}))
    ]
    one, slower, other = (make_run(tmp_path / str(at), state=state) for at, state in enumerate(told))
    assert same_state(one, slower).holds
    assert same_state(one, other).holds is False and "state" in same_state(one, other).what


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text.replace('"ledger": "' + "0" * 15 + "2", '"ledger": "' + "0" * 15 + "9", 1), "other samples"),
        (lambda text: "".join(text.splitlines(keepends=True)[:-1]), "1 steps are missing: 3"),
        (lambda text: text.replace('"samples": 24', '"samples": 25'), "other samples"),
    ],
)
def test_i2_sees_other_samples(pair: tuple[Run, Run], change: Callable[[str], str], words: str) -> None:
    journal = pair[1].journal()
    journal.write_text(change(journal.read_text()))
    assert same_samples(*pair).holds is False and words in same_samples(*pair).what


def test_i2_knows_the_steps_that_both_runs_went_back_behind(tmp_path: Path) -> None:
    """Around a spike's samples step 3 is fed others, in the undisturbed run as in the one with faults."""
    runs = [make_run(tmp_path / name, steps=(1, 2, 3)) for name in ("undisturbed", "broken", "never")]
    again = {"t": 2.0, "event": "step", "step": 3, "samples": 48, "ledger": "f" * 16}
    for run in runs[:2]:
        with run.journal().open("a") as journal:
            journal.write(json.dumps({"t": 1.5, "event": "resume", "step": 2}) + "\n" + json.dumps(again) + "\n")
    undisturbed, broken, never = runs
    assert same_samples(undisturbed, broken).holds
    assert same_samples(undisturbed, never).holds is False, "it has not gone back"
    assert same_samples(never, broken).holds is False


def test_i3_sees_a_damaged_checkpoint(pair: tuple[Run, Run], tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("warning: passed over a newer checkpoint: step-3 is torn\n")
    assert sound_checkpoints(pair[1], []).holds
    assert sound_checkpoints(pair[1], [Command(0.0, 1.0, 0, log)]).holds is False
    file = next(list_checkpoints(pair[1].checkpoints)[0].glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert sound_checkpoints(pair[1], []).holds is False


def test_i4_counts_what_was_done_again() -> None:
    assert bounded_work([GOOD, replace(GOOD, redone=5)], 5, 100).holds
    assert bounded_work([replace(GOOD, redone=6)], 5, 100).holds is False
    assert bounded_work([replace(GOOD, redone=6)], None, 100).holds
    assert bounded_work([replace(GOOD, redone=10)], 5, 100, beside=True).holds
    assert bounded_work([replace(GOOD, redone=11)], 5, 100, beside=True).holds is False


def test_i4_allows_for_saves_that_faults_have_kept_from_counting() -> None:
    unsaved = replace(GOOD, recovery="went on", causes=("step-5 was not saved",), redone=0)
    assert bounded_work([unsaved, replace(GOOD, redone=10)], 5, 100, failures=2).holds
    assert bounded_work([unsaved, replace(GOOD, redone=11)], 5, 100, failures=2).holds is False
    assert bounded_work([*[unsaved] * 9, replace(GOOD, redone=15)], 5, 100, failures=2).holds
    assert bounded_work([*[unsaved] * 9, replace(GOOD, redone=16)], 5, 100, failures=2).holds is False
    assert bounded_work([unsaved, replace(GOOD, redone=6)], 5, 100).holds is False
    undone = replace(unsaved, causes=())
    assert bounded_work([undone, replace(GOOD, redone=6)], 5, 100, failures=2).holds is False, "it was saved"


def test_i4_wants_copies_in_memory_to_be_gone_on_from() -> None:
    two, three, six = (replace(GOOD, redone=number) for number in (2, 3, 6))
    assert bounded_work([two], 5, 100, memory_every=1).holds and bounded_work([two], None, 100, memory_every=1).holds
    assert bounded_work([three], 5, 100, memory_every=1).holds is False
    assert bounded_work([six], 5, 100, memory_every=4).holds is False
    assert bounded_work([three], 5, 100, memory_every=1, beside=True).holds


def test_i5_wants_every_fault_to_have_happened_and_to_be_over() -> None:
    assert recovered([GOOD], 1, 1).holds and "median 0.50 s" in recovered([GOOD], 1, 1).what
    assert recovered([replace(GOOD, recovery="none")], 1, 1).holds is False
    assert recovered([replace(GOOD, recovery="resumed")], 1, 1).holds is False
    assert recovered([GOOD], 1, 2).holds is None


def test_i5_wants_every_recovery_in_time() -> None:
    """By seconds, and by what the program itself needs to start."""
    slow, stopped = replace(GOOD, seconds=20.1), replace(GOOD, fault=replace(KILL, kind="stop"), seconds=29.9)
    assert recovered([slow], 1, 1).what == "number 0 took 20.1 s to the next finished step; 20.0 s are allowed"
    assert recovered([GOOD, slow], 2, 2).holds is False
    assert recovered([slow], 1, 1, start_seconds=0.2).holds and recovered([replace(slow, seconds=19.9)], 1, 1).holds
    assert recovered([stopped], 1, 1).holds is False and recovered([stopped], 1, 1, stopped_seconds=10.0).holds
    assert recovered([slow], 1, 1, stopped_seconds=10.0).holds is False, "it was killed"
    resumed = replace(slow, recovery="resumed", fault=replace(KILL, kind="raise"))
    assert recovered([resumed], 1, 1).holds, "which waited for its user"


def test_i5_takes_its_limits_from_the_two_runs(pair: tuple[Run, Run]) -> None:
    begun = [{"t": t, "event": "start"} for t in (-4.0, 1.5)]  # the first step is at 1.0
    journal = pair[0].journal()
    journal.write_text(json.dumps(begun[0]) + "\n" + journal.read_text() + json.dumps(begun[1]) + "\n")
    numbers = {"planned": 1, "fired": 1}
    held = [judge(*pair, [replace(GOOD, seconds=25.0 + more)], [], Left(), numbers)[4].holds for more in (0.0, 0.1)]
    assert held == [True, False]
    stopped = replace(GOOD, fault=replace(KILL, kind="stop"), seconds=35.0)
    assert judge(*pair, [stopped], [], Left(), numbers)[4].holds, "guard.stopped_seconds is 10"


def test_i6_wants_one_cause() -> None:
    assert one_cause_each([GOOD]).holds
    assert one_cause_each([GOOD, replace(GOOD, causes=())]).holds is False
    assert one_cause_each([replace(GOOD, recovery="went on", causes=())]).holds


def test_i7_sees_what_was_left(pair: tuple[Run, Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert nothing_left(pair[1], Left()).holds
    assert nothing_left(pair[1], Left(("12 python",))).holds is False
    assert nothing_left(pair[1], Left((), ("pymp-1",))).holds is False
    for name in ("step-00000004.tmp-a_1", ".trash-step-00000001-ab"):
        (pair[1].checkpoints / name).mkdir()
        assert name in nothing_left(pair[1], Left()).what
        (pair[1].checkpoints / name).rmdir()
    with monkeypatch.context() as patch:
        patch.setattr("allranks.surviving.invariants.left_of", lambda run_id: left_of(run_id, tmp_path))
        memory = HostMemory(pair[1].id, tmp_path)
        assert nothing_left(pair[1], Left()).holds
        memory.open()
        assert str(memory.directory) in nothing_left(pair[1], Left()).what
        memory.close()
        (tmp_path / f"{memory.directory.name}.gone-0123abcd").mkdir()
        assert ".gone-0123abcd" in nothing_left(pair[1], Left()).what
    pair[1].acquire()
    assert "the lease" in nothing_left(pair[1], Left()).what
    pair[1].release()
