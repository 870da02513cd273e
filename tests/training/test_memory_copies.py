"""Copies in memory between checkpoints: the same run and bits, newest first, and never in the disk's way."""

import errno
import importlib
import shutil
from pathlib import Path
from typing import Any

import pytest

from allranks.checkpointing import adopting
from allranks.checkpointing.checkpoint import Checkpoint, list_checkpoints, verify_files
from allranks.checkpointing.host_memory import is_distrusted
from allranks.checkpointing.mirror import Mirror
from allranks.errors import ConfigError, GuardError
from allranks.run import Run
from allranks.training import memory_copies
from allranks.training.memory_copies import MemoryCopies, tell_tier
from allranks.training.saver import Saver
from allranks.training.sentinels import Sentinels
from allranks.training.skips import Skips
from allranks.verdict import Verdict
from tests.checkpointing.worlds import save_alone
from tests.distributed.pool import Pools
from tests.distributed.sessions import config_of
from tests.training.runs import QUICK, digests, events, flip_a_byte, same_run, saved, start, train, train_outside
from tests.training.snapshots import contents_of, saver_of
from tests.training.tasks import Curve

COPIES = ("checkpoint.every=4", "checkpoint.memory_every=1", "checkpoint.keep=9")

# Its names are replaced below, which a type checker would only allow for names that it exports.
portion: Any = importlib.import_module("allranks.checkpointing.portion")


def copies(memory: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in list_checkpoints(memory)]


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    """In place of what a supervisor leases."""
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "lease").touch()
    return tmp_path / "memory"


def told_of(run: Path) -> list[dict[str, Any]]:
    """What the journal says of copies."""
    return [event for event in events(run, "checkpoint") if event.get("tier") == "memory"]


def test_a_run_goes_on_from_the_newest_of_memory_and_disk(
    tmp_path: Path, memory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    # The user's own mistake in an evaluation ends it as a kill would: without a last checkpoint.
    broken = ("train.steps=12", "task.boom=metrics", "evaluate.every=6")
    with pytest.raises(ValueError, match="mistake in metrics"):
        start("Curve", run, *COPIES, *broken, memory=memory)
    assert saved(run) == [4] and copies(memory) == [6]
    assert [event["step"] for event in told_of(run)] == [1, 2, 3, 5, 6], "not where the disk has it"
    verify_files(Checkpoint.open(memory / "step-00000006", Run.open(run).id))
    (memory / "step-00000007.tmp-x_1").mkdir()
    assert train(None, "task.boom=fine", resume=run, change=["task.boom"], memory=memory) == 0
    resumed = events(run, "resume")[-1]
    assert (resumed["step"], resumed["tier"]) == (6, "memory")
    said = "".join(capsys.readouterr())
    assert "from step-00000006 in the memory of this host: the disk has step-00000004" in said
    assert start("Curve", whole, "train.steps=12", "evaluate.every=6") == 0
    same_run(whole, run, 12)
    assert saved(run) == [4, 8, 12] and copies(memory) == [11]


def test_copies_are_written_beside_the_steps_where_checkpoints_are(tmp_path: Path, memory: Path) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    beside = (*COPIES, "checkpoint.asynchronous=true")
    # Steps of nothing would be over before a first copy is written.
    assert start("Curve", run, *beside, "train.steps=9", "task.pause=0.05", memory=memory) == 0
    assert start("Curve", whole, *COPIES[::2], "train.steps=9") == 0
    same_run(whole, run, 9)
    assert saved(run) == [4, 8, 9] and digests(run, 4) == digests(whole, 4)
    told = told_of(run)
    assert told and all("background_seconds" in event for event in told)
    assert copies(memory) == [told[-1]["step"]]
    verify_files(Checkpoint.open(memory / f"step-{told[-1]['step']:08d}", Run.open(run).id))


def test_a_damaged_copy_falls_back_to_the_disk_loudly(
    tmp_path: Path, memory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    assert start("Curve", run, *COPIES, "train.steps=5", memory=memory) == 0
    shutil.rmtree(run / "checkpoints" / "step-00000005")
    assert copies(memory) == [5]
    flip_a_byte(memory / "step-00000005")
    assert train(None, "train.steps=8", resume=run, memory=memory) == 0
    said = "".join(capsys.readouterr())
    assert f"passed over a newer checkpoint: {memory / 'step-00000005'}" in said and "SHA-256" in said
    assert "from step-00000004 on the disk: the memory of this host has no newer good copy" in said
    assert (events(run, "resume")[-1]["step"], events(run, "resume")[-1]["tier"]) == (4, "disk")
    assert start("Curve", whole, "train.steps=8") == 0
    same_run(whole, run, 8)
    assert copies(memory) == [7], "the damaged one is gone"


def test_who_goes_on_from_memory_and_has_nothing_left_to_do_saves_it_on_the_disk(tmp_path: Path, memory: Path) -> None:
    run = tmp_path / "run"
    assert start("Curve", run, "checkpoint.memory_every=1", "train.steps=3", memory=memory) == 0
    last = digests(run, 3)
    shutil.rmtree(run / "checkpoints" / "step-00000003")
    assert train(None, resume=run, memory=memory) == 0
    assert events(run, "resume")[-1]["tier"] == "memory" and saved(run) == [3] and digests(run, 3) == last


def test_copies_that_fail_are_told_of_once_until_there_is_one_and_end_nothing(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = portion.write_file

    def write(path: Path, *rest: Any) -> Any:
        if path.parent.parent == memory and path.parent.name[:13] in [f"step-{step:08d}" for step in (2, 3, 6, 7)]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, *rest)

    monkeypatch.setattr(portion, "write_file", write)
    run = tmp_path / "run"
    assert start("Curve", run, *COPIES, "train.steps=9", memory=memory) == 0
    for verdict, step in zip(events(run, "verdict"), (2, 6), strict=True):
        assert verdict["what"].startswith(f"there is no copy of step {step} in the memory of this host: ")
        assert "No space left" in verdict["what"]
    assert [event["step"] for event in told_of(run)] == [1, 5, 9] and copies(memory) == [9] and saved(run) == [4, 8, 9]


def test_one_that_reads_back_otherwise_does_not_stay(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = portion.write_file

    def write(path: Path, tensors: Any, *rest: Any) -> Any:
        wrong = path.parent.parent == memory
        return real(path, [(part, tensor + wrong) for part, tensor in tensors], *rest)

    monkeypatch.setattr(portion, "write_file", write)
    assert start("Curve", tmp_path / "run", *COPIES, "train.steps=2", memory=memory) == 0
    assert copies(memory) == [] and "digests" in events(tmp_path / "run", "verdict")[0]["what"]


@pytest.mark.parametrize("beside", [False, True])
def test_too_little_memory_is_refused_after_the_first_step(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, beside: bool
) -> None:
    asked = ("checkpoint.memory_every=5", "train.steps=6", f"checkpoint.asynchronous={str(beside).lower()}")
    monkeypatch.setattr(Saver, "bytes_of_ranks", lambda saver: [400, 500])
    room = 3000 if beside else 2000
    monkeypatch.setattr(memory_copies, "free_bytes", lambda directory: room - 1)
    with pytest.raises(
        ConfigError, match=r"checkpoint\.memory_every: [23] copies of 900 B are .* free in .*--shm-size"
    ):
        start("Curve", tmp_path / "refused", *asked, memory=memory)
    assert Run.open(tmp_path / "refused").last_step == 1 and copies(memory) == []
    monkeypatch.setattr(memory_copies, "free_bytes", lambda directory: room)
    assert start("Curve", tmp_path / "fits", *asked, memory=memory) == 0


def test_a_later_attempt_goes_on_without_the_room_and_copies_again_when_there_is_some(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a kill for want of memory has left less room for does not end the run that it was to save."""
    run, left = tmp_path / "run", iter([999, 1000, 1000, 1000, 999, 1000])  # at 1, 2, 3, 5, 6, 7
    monkeypatch.setattr(Saver, "bytes_of_ranks", lambda saver: [400, 500])
    monkeypatch.setattr(memory_copies, "free_bytes", lambda directory: next(left))
    settings = (*COPIES, "checkpoint.asynchronous=false", "train.steps=7")
    assert start("Curve", run, *settings, memory=memory, first_attempt=0) == 0
    assert [event["step"] for event in told_of(run)] == [2, 3, 5, 7]
    assert [verdict["what"] for verdict in events(run, "verdict")] == [
        f"there is no copy of step {step} in the memory of this host: it takes 900 B, and 999 B are free"
        for step in (1, 6)
    ]


def test_a_directory_that_vanishes_ends_nothing_and_is_not_made_again_without_a_lease(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = MemoryCopies.obstacle

    def obstacle(own: MemoryCopies) -> str:
        if Run.open(tmp_path / "run").last_step >= 2 and memory.exists():
            shutil.rmtree(memory)
        return real(own)

    monkeypatch.setattr(MemoryCopies, "obstacle", obstacle)
    assert start("Curve", tmp_path / "run", *COPIES, "train.steps=9", memory=memory) == 0
    (verdict,) = events(tmp_path / "run", "verdict")
    assert f"{memory} has vanished" in verdict["what"] and "RemoveIPC" in verdict["what"]
    assert not memory.exists() and saved(tmp_path / "run") == [4, 8, 9]
    assert train(None, "train.steps=10", resume=tmp_path / "run", memory=memory) == 0


@pytest.mark.parametrize("name", ["replicas", "shards", "steps", "ranks_differ"])
def test_what_a_guard_may_have_found_too_late_does_not_stay(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Copies are younger than what is found in them, and as the newest on the disk they would hide the good one."""
    found = Verdict(name, "copies of a.weight differ between rank 0 and rank 1", (), "look at rank 1")
    if name == "ranks_differ":
        monkeypatch.setattr(Skips, "see", lambda skips, agreed, step: found if step == 6 else None)
    else:
        monkeypatch.setattr(Sentinels, "due", lambda sentinels, step: step == 7)
        monkeypatch.setattr(Sentinels, "compare", lambda own, step: own._findings.conclude(name, found, step))
    run = tmp_path / "run"
    with pytest.raises(GuardError, match=r"copies of a\.weight differ"):
        start("Curve", run, *COPIES, "train.steps=9", memory=memory)
    assert told_of(run)[-1]["step"] in (6, 7) and copies(memory) == [] and saved(run) == [4]
    assert is_distrusted(memory), "nor does what another rank commits now"


def test_a_guard_distrusts_copies_also_where_no_more_are_made(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, found = tmp_path / "run", Verdict("replicas", "copies of a.weight differ", (), "look at rank 1")
    assert start("Curve", run, *COPIES, "train.steps=6", memory=memory) == 0
    monkeypatch.setattr(Sentinels, "due", lambda sentinels, step: step == 7)
    monkeypatch.setattr(Sentinels, "compare", lambda own, step: own._findings.conclude("replicas", found, step))
    with pytest.raises(GuardError, match=r"copies of a\.weight differ"):
        train(None, "train.steps=9", "checkpoint.memory_every=none", resume=run, memory=memory)
    assert copies(memory) == [] and is_distrusted(memory)


def test_what_a_guard_finds_and_the_user_goes_on_with_stays(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Verdict("replicas", "copies of a.weight differ", (), "look at rank 1")
    monkeypatch.setattr(Sentinels, "due", lambda sentinels, step: step == 7)
    monkeypatch.setattr(Sentinels, "compare", lambda own, step: own._findings.conclude("replicas", found, step))
    assert start("Curve", tmp_path / "run", *COPIES, "train.steps=9", "guard.on_finding=warn", memory=memory) == 0
    assert copies(memory) == [9]
    assert not is_distrusted(memory)


def test_only_what_the_run_goes_on_from_stays_and_its_room_is_counted(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, contents = contents_of(Curve(), config_of("single"), 1)
    saver = saver_of(session, contents, tmp_path / "disk", memory_every=2)
    older, newer = save_alone(tmp_path / "disk", 5), save_alone(memory, 6)
    save_alone(memory, 4)
    (memory / "step-00000007.tmp-run_1").mkdir()
    (memory / "lease").touch()
    copies = MemoryCopies(saver, session.processes, memory, newer, refuses=True)
    assert sorted(path.name for path in memory.iterdir()) == ["lease", "step-00000006"]
    monkeypatch.setattr(Saver, "bytes_of_ranks", lambda saver: [400, 500])
    monkeypatch.setattr(memory_copies, "free_bytes", lambda directory: 2000 - newer.num_bytes)
    assert [copies.due(step) for step in (1, 2, 3)] == [False, True, False], "a copy takes the place of another"
    copies = MemoryCopies(saver, session.processes, memory, older, refuses=True)  # it is on the disk
    assert [path.name for path in memory.iterdir()] == ["lease"]
    with pytest.raises(ConfigError, match="2 copies of 900 B"):
        copies.due(1)


def test_without_a_supervisor_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.memory_every: .*allranks train --nproc N"):
        start("Curve", tmp_path / "run", *COPIES)


def test_a_mirror_that_has_nothing_newer_is_left_alone(tmp_path: Path, memory: Path) -> None:
    run, url = tmp_path / "run", str(tmp_path / "mirror")
    settings = (*COPIES, "train.steps=4", f"checkpoint.mirror={url}")
    assert start("Curve", run, *settings, memory=memory) == 0
    (only,) = list_checkpoints(run / "checkpoints")
    adopting.copy(Checkpoint.open(only), memory)
    shutil.rmtree(only)
    assert Mirror(url, Run.open(run).id).list_newest()[0].step == 4
    assert train(None, "train.steps=5", resume=run, memory=memory) == 0
    assert events(run, "resume")[-1]["tier"] == "memory" and saved(run) == [5]


@pytest.mark.distributed
def test_all_ranks_copy_and_any_layout_goes_on(pool: Pools, tmp_path: Path, memory: Path) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    settings = (*QUICK, "checkpoint.memory_every=2", "train.steps=7")
    assert train_outside(pool, 2, "Curve", *settings, run=run, layout="fsdp", memory=memory) == [0, 0]
    (path,) = list_checkpoints(memory)
    assert path.name == "step-00000006" and len(Checkpoint.open(path).manifest.files) == 2
    shutil.rmtree(run / "checkpoints" / "step-00000007")
    assert train(None, "train.steps=7", "layout=single", resume=run, memory=memory) == 0
    assert events(run, "resume")[-1]["step"] == 6 and events(run, "resume")[-1]["tier"] == "memory"
    assert start("Curve", whole, "train.steps=7") == 0
    ours, theirs = Run.open(run).steps(), Run.open(whole).steps()
    assert [event["ledger"] for event in ours] == [event["ledger"] for event in theirs]


def test_where_it_lies_in_words(tmp_path: Path) -> None:
    disk, memory = tmp_path / "disk", tmp_path / "memory"
    copy = save_alone(memory, 300)
    assert tell_tier(None, copy, disk) == ""
    assert tell_tier(memory, copy, disk) == " in the memory of this host: the disk has none yet"
    saved_one = save_alone(disk, 200)
    assert tell_tier(memory, copy, disk) == " in the memory of this host: the disk has step-00000200"
    assert tell_tier(memory, saved_one, disk) == " on the disk: the memory of this host has no newer good copy"
