"""Whole runs that go back behind a spike: equal to runs that never saw these samples, whatever was killed meanwhile."""

import errno
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from allranks import fault_points
from allranks.checkpointing.checkpoint import list_checkpoints
from allranks.checkpointing.host_memory import is_distrusted
from allranks.config import Config
from allranks.data.cut import Cut
from allranks.data.stream import DataStream
from allranks.digest import ledger_sum
from allranks.errors import CheckpointError, ConfigError, RollbackError, RunError, SpikeError
from allranks.fault_points import Fault
from allranks.left_out import LeftOut
from allranks.run import Run
from allranks.training.rollbacks import add_range, ledger_between, told_at_start
from tests.commands import PROGRAMS, allranks, restart_seconds
from tests.distributed.pool import Pools
from tests.training.runs import QUICK, digests, events, losses, manifest, same_run, saved, start, train, train_outside

OUTLIERS = str(PROGRAMS / "outliers.py")
BATCH, POINTS = 10, 503  # one epoch is enough
SPIKED = (
    *("train.steps=20", "guard.spike_window=5", "checkpoint.every=5", "checkpoint.keep=9"),
    *("guard.spike=rollback", "schedule.name=linear", "train.ema=0.9"),
)
ORDER = DataStream(range(POINTS), cut=Cut(BATCH))


def bad(*steps: int, order: DataStream = ORDER) -> str:
    """`task.bad=` with the sample in the middle of each of these steps, if nothing is left out."""
    at = [int(order.samples_at(np.array([BATCH * (step - 1) + 4]))[0]) for step in steps]
    return f"task.bad={','.join(map(str, at))}"


def go_back(
    run: Path, *more: str, resume: bool = False, words: tuple[str, ...] = SPIKED, memory: Path | None = None
) -> str:
    with pytest.raises(RollbackError) as told:
        _ = train(None, *more, resume=run) if resume else start(OUTLIERS, run, *words, *more, memory=memory)
    return str(told.value)


def test_the_run_equals_one_that_never_saw_these_samples(tmp_path: Path) -> None:
    run, clean = tmp_path / "run", tmp_path / "clean"
    told = go_back(run, bad(13))
    assert (
        "the loss of step 13 is a spike" in told and "goes back to step 10, and leaves out positions 100 to 129" in told
    )
    assert Run.open(run).config().data.skip == "100:130"
    assert train(None, resume=run) == 0
    # Whatever these samples are: here they count otherwise.
    assert start(OUTLIERS, clean, *SPIKED, bad(13), "task.weight=-7.5", "data.skip=100:130") == 0
    same_run(run, clean, 20)
    for step in (15, 20):
        one, other = manifest(run, step), manifest(clean, step)
        assert all(one[key] == other[key] for key in ("samples", "state")), "optimizer, position, window, schedule"
    steps = Run.open(run).steps()
    assert [event["samples"] for event in steps][9:12] == [100, 140, 150] and len(steps) == 20


def test_a_checkpoint_that_comes_by_time_lies_before_the_spike_too(tmp_path: Path) -> None:
    words = (*(word for word in SPIKED if not word.startswith("checkpoint.every")), "checkpoint.seconds=1e-9")
    told = go_back(tmp_path / "run", bad(13), words=words)
    assert "the loss of step 13 is a spike" in told and "goes back to step 11, and leaves out" in told
    assert saved(tmp_path / "run") == [1, 3, 5, 7, 9, 11]


def test_a_damaged_range_in_the_journal_is_looked_up_again(tmp_path: Path) -> None:
    run = Run.create(tmp_path, "points", Config(), {})
    stream = DataStream(range(POINTS), cut=Cut(BATCH), left_out=LeftOut.parse("20:40"))
    told = {"first": 20, "past": 40, "ledger": ledger_between(stream, 20, 40)}
    damages: list[dict[str, Any]] = [{"first": None}, {"past": "40"}, {"ledger": 7}, {"ledger": "x"}, {"first": []}]
    for damage in damages:
        event: dict[str, Any] = {"event": "left_out", **told, **damage}
        run.journal().write_text(json.dumps(event) + '\n{"event": "left_out", "irst": 20}\n')
        assert told_at_start(run, stream) == [told]
    run.journal().write_text(json.dumps({"event": "left_out", **told, "ledger": "0" * 16}) + "\n")
    assert told_at_start(run, stream) == [{**told, "ledger": "0" * 16}], "taken from there"


def test_copies_outlive_a_spike_that_ends_the_run(tmp_path: Path) -> None:
    """None of them was made before the loss of its step was judged."""
    run, memory = tmp_path / "run", tmp_path / "memory"
    memory.mkdir()
    (memory / "lease").touch()
    with pytest.raises(SpikeError, match=r"0 ranges are left out already .* the run ends"):
        start(OUTLIERS, run, *SPIKED, bad(13), "guard.spike_times=0", "checkpoint.memory_every=1", memory=memory)
    assert [path.name for path in list_checkpoints(memory)] == ["step-00000012"] and not is_distrusted(memory)


@pytest.mark.parametrize("beside", ["false", "true"])
def test_it_goes_back_to_a_copy_in_memory(tmp_path: Path, beside: str) -> None:
    run, clean, memory = tmp_path / "run", tmp_path / "clean", tmp_path / "memory"
    memory.mkdir()
    (memory / "lease").touch()
    copied = ("checkpoint.memory_every=1", f"checkpoint.asynchronous={beside}")
    told = go_back(run, bad(13), *copied, memory=memory)
    kept = max((int(path.name.removeprefix("step-")) for path in list_checkpoints(memory)), default=0)
    skip = Run.open(run).config().data.skip
    # One that is written beside the steps may come too late; none is of the spike.
    assert saved(run) == [5, 10] and (kept == 12 if beside == "false" else kept <= 12)
    back = max(10, kept)
    assert f"goes back to step {back}, and leaves out" in told and skip == f"{BATCH * back}:130"
    assert train(None, resume=run, memory=memory) == 0
    assert events(run, "resume")[-1]["step"] == back
    assert start(OUTLIERS, clean, *SPIKED, bad(13), "task.weight=-7.5", f"data.skip={skip}") == 0
    same_run(run, clean, 20)


def test_a_run_of_epochs_has_the_rates_of_one_that_never_saw_them(tmp_path: Path) -> None:
    """Its schedule ends where it would if nothing were left out, and its epochs at their positions, as the other's."""
    run, clean = tmp_path / "run", tmp_path / "clean"
    short = DataStream(range(203), cut=Cut(BATCH))
    words = (*(one for one in SPIKED if one != "train.steps=20"), "train.epochs=1", "task.num_points=203")
    go_back(run, bad(13, order=short), words=words)
    assert train(None, resume=run) == 0
    assert start(OUTLIERS, clean, *words, "task.weight=-7.5", "data.skip=100:130") == 0
    rates, others = ([event["lr"] for event in Run.open(one).steps()] for one in (run, clean))
    assert rates == others and len(set(rates)) == 18 and rates[-1] > 0
    same_run(run, clean, 18)


def test_the_rate_is_a_function_of_the_samples_that_were_fed(tmp_path: Path) -> None:
    whole, part = tmp_path / "whole", tmp_path / "part"
    quiet = (*SPIKED, "checkpoint.every=20")
    assert start(OUTLIERS, whole, *quiet) == 0 and start(OUTLIERS, part, *quiet, "data.skip=100:130") == 0
    one, other = ([event["lr"] for event in Run.open(run).steps()] for run in (whole, part))
    assert one == other and len(set(one)) == 20
    assert not events(part, "verdict"), "no sentinel takes the rate for another's"


def test_every_sample_is_accounted_for(tmp_path: Path) -> None:
    run = tmp_path / "run"
    go_back(run, bad(13))
    assert train(None, resume=run) == 0
    fed = sum(int(event["ledger"], 16) for event in Run.open(run).steps())
    (named,) = events(run, "left_out")
    assert (named["first"], named["past"]) == (100, 130)
    every = np.arange(BATCH * 20 + 30)
    expected = ledger_sum(every, ORDER.samples_at(every))  # type: ignore[arg-type]
    assert (fed + int(named["ledger"], 16)) % (1 << 64) == expected % (1 << 64)
    assert fed % (1 << 64) != expected % (1 << 64)


def test_a_range_is_looked_up_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, looked = tmp_path / "run", list[int]()

    def counted(*given: Any) -> str:
        looked.append(1)
        return f"{len(looked):016x}"

    monkeypatch.setattr("allranks.training.rollbacks.ledger_between", counted)
    words = (*SPIKED, "data.skip=10:20,40:50")
    assert start(OUTLIERS, run, *words, "train.steps=2") == 0 and train(None, "train.steps=3", resume=run) == 0
    told = [(event["first"], event["past"], int(event["ledger"], 16)) for event in events(run, "left_out")]
    assert told == [(10, 20, 1), (40, 50, 2)] * 2 and len(looked) == 2


def test_it_is_told_before_another_rank_may_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, seen = tmp_path / "run", list[list[str]]()
    monkeypatch.setattr(
        "allranks.stepping.world.Processes.barrier",
        lambda _: seen.append([event["kind"] for event in events(run, "verdict")]),
    )
    go_back(run, bad(13))
    assert seen[-1] == ["rollback"] and Run.open(run).config().data.skip == "100:130"


def test_before_the_range_is_written_nothing_has_happened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for whoever is killed there: the spike is met again, and left out once."""
    run = tmp_path / "run"

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("allranks.training.worker.add_range", killed)
        with pytest.raises(KeyboardInterrupt):
            start(OUTLIERS, run, *SPIKED, bad(13))
    assert Run.open(run).config().data.skip == ""
    assert "positions 100 to 129" in go_back(run, resume=True)
    assert train(None, resume=run) == 0
    assert Run.open(run).config().data.skip == "100:130" and len(losses(run)) == 20


def test_a_journal_that_takes_no_lines_keeps_no_rank_from_going_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The range is written already: started again, the run goes around it."""
    run, full, write = tmp_path / "run", threading.Event(), os.write

    def add_and_fill(*given: Any) -> None:
        add_range(*given)
        full.set()

    def refuse(descriptor: int, content: bytes) -> int:
        if full.is_set() and os.readlink(f"/proc/self/fd/{descriptor}").endswith("rank-00000.jsonl"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, content)

    with monkeypatch.context() as patched:
        patched.setattr("allranks.training.worker.add_range", add_and_fill)
        patched.setattr(os, "write", refuse)
        assert "leaves out positions 100 to 129" in go_back(run, bad(13))
    assert full.is_set() and not events(run, "verdict") and Run.open(run).config().data.skip == "100:130"
    assert train(None, resume=run) == 0 and len(losses(run)) == 20


def test_a_window_that_was_killed_and_resumed_knows_the_spike(tmp_path: Path) -> None:
    """Two steps after a resume it could not have losses enough of its own."""
    run = tmp_path / "run"
    assert start(OUTLIERS, run, *SPIKED, bad(12), "train.steps=10") == 0
    assert "leaves out positions 100 to 119" in go_back(run, "train.steps=20", resume=True)


def test_one_spike_after_another_until_it_is_enough(tmp_path: Path) -> None:
    run = tmp_path / "run"
    go_back(run, bad(12, 13, 18), "guard.spike_times=2")
    # From step 10 on the sample of step 13 comes first.
    assert "goes back to step 10, and leaves out positions 120 to 129" in go_back(run, resume=True)
    assert Run.open(run).config().data.skip == "100:120,120:130"
    with pytest.raises(SpikeError, match=r"2 ranges are left out already .* the run ends \(guard.spike_after=stop\)"):
        train(None, resume=run)
    assert max(losses(run)) == 15 and saved(run) == [5, 10], "the sample of step 18 comes three steps earlier"
    assert train(None, "guard.spike_after=log", resume=run) == 0
    assert "the step was applied all the same" in events(run, "verdict")[-1]["what"] and max(losses(run)) == 20


def test_without_a_checkpoint_it_begins_anew(tmp_path: Path) -> None:
    run = tmp_path / "run"
    told = go_back(run, bad(8), "checkpoint.every=50")
    assert "goes back to its beginning, as there is no checkpoint, and leaves out positions 0 to 79" in told
    assert train(None, resume=run) == 0 and Run.open(run).steps()[0]["samples"] == 90


def test_a_step_is_judged_before_it_is_saved_and_at_the_end(tmp_path: Path) -> None:
    for step, before in ((15, 10), (20, 15), (18, 15)):
        run = tmp_path / str(step)
        assert f"goes back to step {before}" in go_back(run, bad(step), f"train.steps={max(step, 18)}")
        assert saved(run)[-1] == before


def test_checkpoints_that_are_written_beside_the_steps_are_waited_for(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert "goes back to step 10" in go_back(run, bad(11), "checkpoint.asynchronous=true")
    assert digests(run, 10) and train(None, resume=run) == 0


def test_what_is_left_out_stays_so_and_is_not_changed_in_passing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    go_back(run, bad(13))
    assert start(OUTLIERS, run, *SPIKED, bad(13)) == 0, "the words of the first start go on, too"
    assert Run.open(run).config().data.skip == "100:130"
    with pytest.raises(RunError, match=r"data.skip '?100:130'? -> "):
        train(None, "data.skip=0:10", "train.steps=25", resume=run)
    with pytest.raises(CheckpointError, match=r"before position 230, .* 30 samples were left out and the others fed"):
        train(None, "data.skip=0:10", "train.steps=25", resume=run, change=["data.skip"])


def test_data_that_shards_itself_has_no_positions(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"guard.spike=rollback leaves out positions, and Counted declares order="):
        start("Streamed", tmp_path / "run", "task.order=sharded", "guard.spike=rollback")


@pytest.mark.distributed
def test_ranks_go_back_together_and_under_another_layout(pool: Pools, tmp_path: Path) -> None:
    run = tmp_path / "run"
    told = train_outside(pool, 2, OUTLIERS, *QUICK, *SPIKED, bad(13), run=run, layout="fsdp")
    assert all("RollbackError: the loss of step 13" in str(one) for one in told) and len(told) == 2
    assert Run.open(run).config().data.skip == "100:130"
    assert train(None, resume=run) == 0, "on one process"
    assert [event["samples"] for event in Run.open(run).steps()][9:12] == [100, 140, 150]


@pytest.mark.full
@pytest.mark.distributed
def test_the_command_goes_back_by_itself_and_kills_change_nothing(
    pool: Pools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    """Killed in the very step of the spike, before it is known, and again on the way around it."""
    folder = tmp_path / "faults"
    folder.mkdir()
    kills = [Fault(0, "agreement", 1, 13, 1, "kill"), Fault(1, "backward", 0, 14, 1, "kill")]
    fault_points.write_schedule(folder, kills)
    monkeypatch.setenv(fault_points.VARIABLE, str(folder))
    words = (*QUICK, *SPIKED, bad(13), "--layout", "ddp", "--nproc", "2")
    allranks("train", OUTLIERS, *words, "--run", "run", folder=tmp_path)
    monkeypatch.delenv(fault_points.VARIABLE)
    assert len(fault_points.read_fired(folder)) == 2
    run, clean = tmp_path / "run", tmp_path / "clean"
    assert len([one for one in events(run, "verdict") if one["kind"] == "rollback"]) == 1
    record_property("restart_seconds", restart_seconds(run))
    assert len(events(run, "start")) == 4 and Run.open(run).config().data.skip == "100:130"
    skip = (*QUICK, *SPIKED, "data.skip=100:130")
    assert train_outside(pool, 2, OUTLIERS, *skip, run=clean, layout="ddp") == [0, 0]
    same_run(run, clean, 20)


@pytest.mark.distributed
@pytest.mark.full
def test_nothing_is_lost_whatever_is_killed(tmp_path: Path) -> None:
    words = (*QUICK, *SPIKED, bad(13), "train.steps=30", "--layout", "ddp", "--nproc", "2")
    ran = allranks("chaos", OUTLIERS, *words, "--kills", "8", folder=tmp_path)
    assert "nothing was lost: 8 faults" in ran.stderr + ran.stdout
