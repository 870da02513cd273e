"""A checkpoint that is written beside: the same as any other, on every rank or on none, whatever fails and who dies."""

import errno
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from allranks.checkpointing import commit
from allranks.checkpointing.background import BackgroundSave
from allranks.checkpointing.checkpoint import Checkpoint, list_checkpoints, newest_good, verify_files
from allranks.checkpointing.retention import prune
from allranks.checkpointing.stage import Stage
from allranks.checkpointing.writing import write_file
from allranks.errors import CheckpointError, RunError
from tests.checkpointing.worlds import begin, parts, save_alone, save_together, whole_tensors
from tests.distributed.pool import Pools

FULL_DISK = OSError(errno.ENOSPC, "No space left on device")


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("proves", [False, True])
def test_the_files_are_those_of_a_save_that_is_waited_for(tmp_path: Path, proves: bool) -> None:
    save = begin(tmp_path / "beside", proves=proves)
    wait_for(lambda: save.written)
    time.sleep(0.1)
    assert not save.committed and newest_good(tmp_path / "beside")[0] is None, "nobody has agreed yet"
    save.all_have_written()
    wait_for(lambda: save.committed)
    save.settle()
    beside, other = Checkpoint.open(save.place.target), save_alone(tmp_path / "other")
    verify_files(beside)
    assert names(beside.path) == names(other.path)
    assert (beside.path / "rank-00000.safetensors").read_bytes() == (other.path / "rank-00000.safetensors").read_bytes()
    assert beside.manifest.model_copy(update={"state": other.manifest.state}) == other.manifest
    assert beside.manifest.state == {"position": 1600, "best": 0.1}


@pytest.mark.distributed
def test_all_ranks_write_and_the_first_commits(pool: Pools, tmp_path: Path) -> None:
    def case() -> tuple[bool, bool]:
        save = begin(tmp_path / "beside", together=True, proves=True)
        wait_for(lambda: save.written)
        before = save.place.target.exists()
        dist.barrier()
        save.all_have_written()
        save.settle()
        return before, save_together(tmp_path / "other").manifest.tensors == Checkpoint.open(
            save.place.target
        ).manifest.tensors

    assert pool(3).run(case) == [(False, True)] * 3
    verify_files(Checkpoint.open(tmp_path / "beside" / "step-00000200"))
    assert names(tmp_path / "beside") == ["step-00000200"]
    assert not [name for name in names(tmp_path / "beside" / "step-00000200") if "share" in name]


@pytest.mark.distributed
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("how", ["settle", "fail"])
def test_what_fails_on_one_rank_is_raised_by_all(pool: Pools, tmp_path: Path, failing: int, how: str) -> None:
    pool(2).run(lambda: save_together(tmp_path, 100).step)

    def case() -> tuple[bool, str]:
        refuse = {"side_effect": FULL_DISK} if dist.get_rank() == failing else {"wraps": write_file}
        with mock.patch("allranks.checkpointing.portion.write_file", **refuse):
            save = begin(tmp_path, together=True)
            wait_for(lambda: save.written or save.failed)
            try:
                getattr(save, how)()
            except CheckpointError as error:
                return save.failed, str(error)
        return save.failed, "saved"

    found = pool(2).run(case)
    assert [failed for failed, _ in found] == [rank == failing for rank in (0, 1)]
    (message,) = {message for _, message in found}
    assert f"step-00000200 was not saved: rank {failing}: " in message and "No space left on device" in message
    assert message.endswith("; older checkpoints are untouched") and "\n" not in message
    assert names(tmp_path) == ["step-00000100"]


def refused(save: BackgroundSave) -> str:
    with pytest.raises(CheckpointError) as told:
        save.settle()
    return str(told.value)


def test_nothing_counts_that_reads_back_otherwise(tmp_path: Path) -> None:
    """The copy itself went wrong: digests of the live tensors tell."""
    real = Stage.copy

    def copy(self: Stage, *given: Any, **named: Any) -> Any:
        copied, ready = real(self, *given, **named)
        next(tensor for entry, tensor in copied.mine if entry.name == "model.norm.weight").add_(1)
        return copied, ready

    with mock.patch.object(Stage, "copy", copy):
        message = refused(begin(tmp_path, proves=True))
    assert "1 tensors differ from their digests: 'model.norm.weight'; older" in message and names(tmp_path) == []


def test_what_must_stand_before_the_commit_keeps_it_from_being_one(tmp_path: Path) -> None:
    def refuse() -> None:
        raise RunError("journal: Read-only file system")

    seen = list[Checkpoint]()
    message = refused(begin(tmp_path, before_commit=refuse, after_commit=seen.append))
    assert "was not saved: rank 0: journal: Read-only file system" in message and not seen and names(tmp_path) == []
    save = begin(tmp_path, after_commit=seen.append)
    save.settle()
    assert [one.path for one in seen] == [save.place.target]


@pytest.mark.parametrize("heard", [False, True])
def test_an_error_that_is_no_refusal_is_raised_as_it_is(tmp_path: Path, heard: bool) -> None:
    def fail() -> None:
        raise ValueError("a reduction failed")

    save = begin(tmp_path, before_commit=fail)
    if heard:
        wait_for(lambda: save.written)
        save.all_have_written()
        wait_for(lambda: save.failed)
    with pytest.raises(ValueError, match=r"^a reduction failed$"):
        save.fail() if heard else save.settle()
    assert not list_checkpoints(tmp_path)


def test_it_is_not_told_of_before_what_follows_the_commit_is_done(tmp_path: Path) -> None:
    """Retention deletes temporary directories: the next save must not have begun."""
    go_on = threading.Event()
    save = begin(tmp_path, after_commit=lambda checkpoint: go_on.wait(30))
    wait_for(lambda: save.written)
    save.all_have_written()
    wait_for(save.place.target.exists)
    time.sleep(0.02)
    assert not save.committed
    go_on.set()
    save.settle()
    assert save.committed


def test_what_fails_after_the_commit_does_not_say_that_nothing_was_saved(tmp_path: Path) -> None:
    def refuse(checkpoint: Checkpoint) -> None:
        raise RuntimeError("odd")

    assert refused(begin(tmp_path, after_commit=refuse)) == "rank 0: RuntimeError: odd"
    assert newest_good(tmp_path)[0] is not None


def test_a_share_that_is_damaged_or_not_to_be_seen_is_named(tmp_path: Path) -> None:
    for content, words in ((None, "not to be seen here"), (b"{", "the share is damaged"), (b"[]", "is damaged")):
        save = begin(tmp_path)
        wait_for(partial(getattr, save, "written"))
        share = save.place.temporary / "rank-00000.share.json"
        share.unlink() if content is None else share.write_bytes(content)
        assert words in refused(save) and names(tmp_path) == []


@pytest.mark.distributed
@pytest.mark.parametrize("whole", [True, False])
def test_what_gives_way_is_committed_where_all_have_written_and_else_gone(
    pool: Pools, tmp_path: Path, whole: bool
) -> None:
    def case() -> tuple[bool, bool]:
        still = threading.Event()
        slow = not whole and dist.get_rank() == 1
        if slow:
            with mock.patch.object(Stage, "copy", lambda self, portion, proves: (portion, still.wait)):
                save = begin(tmp_path / "beside", together=True)
        else:
            save = begin(tmp_path / "beside", together=True)
            wait_for(lambda: save.written)
        threading.Timer(0.2, still.set).start()
        return save.give_way(), save.failed

    assert pool(2).run(case) == [(whole, False)] * 2
    assert names(tmp_path / "beside") == (["step-00000200"] if whole else [])


def test_what_is_abandoned_is_no_checkpoint_and_no_error(tmp_path: Path) -> None:
    go_on = threading.Event()
    save = begin(tmp_path, pairs=parts(whole_tensors(), 0, 1))
    save.settle()
    with mock.patch.object(Stage, "copy", lambda self, portion, proves: (portion, go_on.wait)):
        later = begin(tmp_path, 300)
    threading.Timer(0.05, go_on.set).start()
    later.abandon()
    assert not later.written and not later.failed
    assert names(tmp_path) == ["step-00000200", "step-00000300.tmp-t1"]
    prune(tmp_path, 2)
    assert names(tmp_path) == ["step-00000200"]


def _begin_and_die(directory: Path, kill_at: int) -> int:
    """In a child: a save beside, killed by SIGKILL at the n-th call that changes what the disk holds."""
    left = [kill_at]
    lock = threading.Lock()

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def count(*arguments: Any, **named: Any) -> Any:
            with lock:
                left[0] -= 1
                if not left[0]:
                    os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **named)

        return count

    if not (pid := os.fork()):
        with (
            mock.patch("os.fsync", counted(os.fsync)),
            mock.patch("os.rename", counted(os.rename)),
            mock.patch("os.unlink", counted(os.unlink)),
            mock.patch("shutil.rmtree", counted(shutil.rmtree)),
            mock.patch.object(commit, "_exchange", counted(commit._exchange)),
        ):
            begin(directory, 200, generation=2, token="new").settle()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.distributed
@pytest.mark.parametrize("replaces", [False, True])
def test_killed_at_any_point_there_is_the_old_one_or_the_new_one(pool: Pools, tmp_path: Path, replaces: bool) -> None:
    def case() -> list[tuple[int, int, int]]:
        found = []
        for kill_at in range(1, 25):
            directory = tmp_path / str(kill_at)
            save_alone(directory, 100)
            if replaces:
                save_alone(directory, 200)
            code = _begin_and_die(directory, kill_at)
            good, skipped = newest_good(directory)
            assert good is not None and not skipped
            prune(directory, 2)
            assert len(names(directory)) == 1 + (good.step == 200), "what a dead writer left is collected"
            found.append((code, good.step, good.manifest.generation))
            if code == 0:
                break
        return found

    *killed, finished = pool(1).run_alone(case)[0]
    assert finished == (0, 200, 2)
    assert {code for code, *_ in killed} == {-signal.SIGKILL} and len(killed) >= 9
    generations = [generation for *_, generation in killed]
    assert generations == sorted(generations) and set(generations) == {1, 2}, "old until the commit, then new"


@pytest.mark.parametrize("beside", [False, True])
def test_a_checkpoint_that_could_not_be_read_again_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside: bool
) -> None:
    directory = tmp_path / "checkpoints"
    save_alone(directory, 100)
    monkeypatch.setattr("allranks.checkpointing.manifest._VALUES_CAP", 20)
    with pytest.raises(CheckpointError, match=r"step-00000200 was not saved: .*are read: .*untouched"):
        if beside:
            begin(directory, 200).settle()
        else:
            save_alone(directory, 200)
    assert names(directory) == ["step-00000100"]
