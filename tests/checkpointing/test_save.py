"""Saving by several ranks: whole or absent, on every rank alike, whatever fails and whoever dies."""

import errno
import math
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from allranks.checkpointing import commit
from allranks.checkpointing.checking import check_digests, check_files
from allranks.checkpointing.checkpoint import Checkpoint, list_checkpoints, newest_good, verify_files
from allranks.checkpointing.restore import restore
from allranks.checkpointing.retention import prune
from allranks.checkpointing.save import write_own
from allranks.errors import CheckpointError, RunError
from allranks.failure import read_failures
from allranks.recorded import run_recorded
from tests.checkpointing.worlds import begin, blank, header, parts, save_alone, save_together, whole_tensors
from tests.distributed.pool import Pools

FULL_DISK = OSError(errno.ENOSPC, "No space left on device")


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.distributed
def test_every_rank_returns_the_committed_checkpoint(pool: Pools, tmp_path: Path) -> None:
    def case() -> tuple[str, bool]:
        checkpoint = save_together(tmp_path)
        return str(checkpoint.path), checkpoint == Checkpoint.open(checkpoint.path)

    assert pool(3).run(case) == [(str(tmp_path / "step-00000200"), True)] * 3
    assert names(tmp_path) == ["step-00000200"]
    manifest = Checkpoint.open(tmp_path / "step-00000200", run_id="run-a").manifest
    assert (manifest.run, manifest.generation, manifest.step, manifest.samples) == ("run-a", 1, 200, 1600)
    assert manifest.torch == torch.__version__ and manifest.layout == "ddp"
    assert manifest.state == {"position": 1600, "best": 0.1, "worst": -math.inf}
    assert manifest.tensors.keys() == whole_tensors().keys()
    assert manifest.tensors["model.layers.0.weight"].dtype == "bfloat16"


@pytest.mark.distributed
def test_the_digests_are_the_same_for_every_world(pool: Pools, tmp_path: Path) -> None:
    found = []
    for world_size in (1, 2, 3, 4):
        pool(world_size).run(lambda place=tmp_path / str(world_size): save_together(place).step)
        found.append(
            {
                n: t.digest
                for n, t in Checkpoint.open(tmp_path / str(world_size) / "step-00000200").manifest.tensors.items()
            }
        )
    assert found[0] == found[1] == found[2] == found[3]
    assert len(set(found[0].values())) == len(found[0])


@pytest.mark.distributed
@pytest.mark.parametrize("beside", [False, True])
def test_only_who_commits_looks_for_the_name_before_it_is_given(pool: Pools, tmp_path: Path, beside: bool) -> None:
    """On NFS the others' hosts would remember for half a minute that it is not there."""
    name = str(tmp_path / "step-00000200")

    def case() -> bool:
        seen, real = list[str](), (os.path.lexists, os.stat, os.lstat)

        def telling(call: Any) -> Any:
            def do(path: Any, *args: Any, **named: Any) -> Any:
                seen.append(str(path))
                return call(path, *args, **named)

            return do

        with pytest.MonkeyPatch.context() as patch:
            for place, call in zip(("os.path.lexists", "os.stat", "os.lstat"), real, strict=True):
                patch.setattr(place, telling(call))
            if beside:
                begin(tmp_path, together=True).settle()
            else:
                save_together(tmp_path)
        return any(path == name or path.startswith(f"{name}/") for path in seen)

    assert pool(3).run(case) == [True, False, False]


@pytest.mark.distributed
@pytest.mark.parametrize("beside", [False, True])
def test_a_failed_save_may_be_tried_again_at_once(pool: Pools, tmp_path: Path, beside: bool) -> None:
    """While a rank is slow to delete what it had written, no other writes to the same place."""

    def case() -> list[str]:
        def remove(*args: Any, **named: Any) -> None:
            if dist.get_rank() == 1:
                time.sleep(0.5)
            real(*args, **named)

        told, real, first = list[str](), shutil.rmtree, dist.get_rank() == 0
        for number in range(2):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("shutil.rmtree", remove)
                if number == 0 and first:
                    patch.setattr("allranks.checkpointing.commit.write_synced", mock.Mock(side_effect=FULL_DISK))
                try:
                    if beside:
                        begin(tmp_path, together=True).settle()
                    else:
                        save_together(tmp_path)
                    told.append("saved")
                except CheckpointError as error:
                    told.append(str(error))
        return told

    for failed, again in pool(3).run(case):
        assert "was not saved" in failed and "No space left on device" in failed and again == "saved"
    verify_files(Checkpoint.open(tmp_path / "step-00000200"))


@pytest.mark.distributed
def test_each_box_is_written_by_its_writer_only_and_idle_ranks_write_no_file(pool: Pools, tmp_path: Path) -> None:
    def case() -> None:
        mine = parts(whole_tensors(), 0, 1)  # rank 0 holds everything, the others nothing
        save_together(tmp_path, pairs=mine if dist.get_rank() == 0 else [])

    pool(3).run(case)
    assert names(tmp_path / "step-00000200") == ["COMMITTED", "manifest.json", "rank-00000.safetensors"]


def _outcomes(pool: Pools, world_size: int, case: Any) -> list[str]:
    """What `save` raised on every rank."""

    def guarded() -> str:
        try:
            case()
        except CheckpointError as error:
            return str(error)
        return "saved"

    return [str(outcome) for outcome in pool(world_size).run(guarded, timeout=60)]


@pytest.mark.distributed
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_full_disk_on_one_rank_fails_every_rank_and_leaves_the_older_one(
    pool: Pools, tmp_path: Path, failing: int
) -> None:
    pool(3).run(lambda: save_together(tmp_path, 100).step)
    before = (tmp_path / "step-00000100" / "manifest.json").read_bytes()

    def case() -> None:
        broken = mock.patch("allranks.checkpointing.portion.write_file", side_effect=FULL_DISK)
        if dist.get_rank() == failing:
            with broken:
                save_together(tmp_path)
        else:
            save_together(tmp_path)

    found = _outcomes(pool, 3, case)
    assert len(set(found)) == 1 and "\n" not in found[0]
    temporary = tmp_path / "step-00000200.tmp-t1"
    assert f"was not saved: rank {failing}: {temporary}: No space left on device (this rank needs " in found[0]
    assert found[0].endswith("; older checkpoints are untouched")
    assert names(tmp_path) == ["step-00000100"]
    assert (tmp_path / "step-00000100" / "manifest.json").read_bytes() == before
    verify_files(Checkpoint.open(tmp_path / "step-00000100"))


@pytest.mark.distributed
@pytest.mark.parametrize("what", ["rename", "fsync"])
def test_a_failing_commit_fails_every_rank(pool: Pools, tmp_path: Path, what: str) -> None:
    def case() -> None:
        if dist.get_rank() == 0 and what == "rename":
            with mock.patch("os.rename", side_effect=OSError(errno.EROFS, "Read-only file system")):
                save_together(tmp_path)
        elif dist.get_rank() == 0:
            with mock.patch("allranks.checkpointing.commit.sync", side_effect=OSError(errno.EIO, "Input/output error")):
                save_together(tmp_path)
        else:
            save_together(tmp_path)

    found = _outcomes(pool, 2, case)
    reason = "Read-only file system" if what == "rename" else "Input/output error"
    assert len(set(found)) == 1 and "rank 0: " in found[0] and reason in found[0]
    assert names(tmp_path) == []


@pytest.mark.distributed
def test_an_error_of_any_kind_reaches_every_rank(pool: Pools, tmp_path: Path) -> None:
    def case() -> None:
        state = {"model": {"a": torch.zeros(1)}} if dist.get_rank() == 0 else {}
        pairs = parts(whole_tensors(), dist.get_rank(), 2)
        if dist.get_rank() == 1:
            pairs[0] = (pairs[0][0], pairs[0][1].double())
        save_together(tmp_path, pairs=pairs, state=state)

    found = _outcomes(pool, 2, case)
    assert len(set(found)) == 1 and found[0].count("rank 0: state.model.a: a torch.Tensor cannot be kept as JSON") == 1
    assert "(and 1 more)" in found[0]


@pytest.mark.parametrize("said", ["CUDA error: device-side assert triggered", "shapes differ"])
def test_an_error_of_the_device_is_noted_before_the_other_ranks_hear_of_it(tmp_path: Path, said: str) -> None:
    """They hear of it by a collective, and NCCL's watchdog may end this process meanwhile."""
    noted = []

    def work() -> None:
        with mock.patch("allranks.checkpointing.save.portion_of", side_effect=RuntimeError(said)):
            _, share = write_own(mock.Mock(temporary=tmp_path), [], 0, {}, {}, tells=True)
        assert said in share.error
        noted.extend(read_failures(tmp_path))

    assert run_recorded(work, (), rank=0, folder=tmp_path) == 0
    assert [failure.message for failure in noted] == [f"RuntimeError: {said}"] * said.startswith("CUDA")


@pytest.mark.distributed
def test_what_has_to_stand_before_it_counts_and_does_not_is_told_on_every_rank(pool: Pools, tmp_path: Path) -> None:
    def refuse() -> None:
        assert dist.get_rank() == 0
        raise RunError("rank 0: lines are missing")

    found = _outcomes(pool, 2, lambda: save_together(tmp_path, before_commit=refuse))
    assert len(set(found)) == 1 and "was not saved: rank 0: lines are missing; " in found[0] and names(tmp_path) == []


def test_an_error_that_is_no_refusal_ends_the_first_rank_and_is_no_failed_save(tmp_path: Path) -> None:
    """Who bears failed saves would look for it at the disk, and the next save would meet it too."""

    def fail() -> None:
        raise ValueError("a reduction failed")

    with pytest.raises(ValueError, match=r"^a reduction failed$"):
        save_alone(tmp_path, before_commit=fail)
    assert list_checkpoints(tmp_path) == []


@pytest.mark.distributed
@pytest.mark.parametrize("without", ["the file of a rank", "a replicated tensor"])
def test_a_tensor_that_nobody_writes_is_refused(pool: Pools, tmp_path: Path, without: str) -> None:
    def case() -> None:
        pairs = parts(whole_tensors(), dist.get_rank(), 2)
        if without == "the file of a rank":
            pairs = [] if dist.get_rank() == 1 else pairs
        else:  # the one that writes it does not hand it over; the first rank holds it too
            (lost,) = {entry.name for entry, _ in pairs if entry.holders == (0, 1) and entry.writer == 1} & {
                "model.scale"
            }
            pairs = [pair for pair in pairs if dist.get_rank() == 0 or pair[0].name != lost]
        save_together(tmp_path, pairs=pairs)

    found = _outcomes(pool, 2, case)
    assert len(set(found)) == 1 and "elements in" in found[0] and names(tmp_path) == []


def test_a_token_that_is_no_word_and_a_wrong_world_are_refused(tmp_path: Path) -> None:
    for token in ("", "../x", "a b", "a/b", "x" * 65):
        with pytest.raises(CheckpointError, match="token"):
            save_alone(tmp_path / "c", token=token)
    with pytest.raises(CheckpointError, match="1 ranks save, 2 should"):
        save_alone(tmp_path / "c", world_size=2)
    assert names(tmp_path) in ([], ["c"]) and list_checkpoints(tmp_path / "c") == []


def test_a_disk_of_one_megabyte_is_really_full(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("may not mount a tmpfs here")
    try:
        checkpoint = save_alone(small, 100)
        tensor = torch.zeros(1_000_000)
        pairs = parts({"model.big": tensor}, 0, 1)
        with pytest.raises(
            CheckpointError, match=r"rank 0: .*No space left on device \(this rank needs 4\.0 MB, .* are free\)"
        ):
            save_alone(small, 200, pairs, aliases={})
        assert names(small) == ["step-00000100"]
        check_files(checkpoint)
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_a_directory_that_may_not_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"rank 0: .*file.*: (Not a directory|File exists)"):
        save_alone(tmp_path / "file")


def _save_and_die(directory: Path, kill_at: int) -> int:
    """Save in a forked process that kills itself at that call which reaches the disk; its exit code."""
    calls = 0

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **options)

        return count

    if not (pid := os.fork()):
        with (
            mock.patch("os.fsync", counted(os.fsync)),
            mock.patch("os.rename", counted(os.rename)),
            mock.patch("shutil.rmtree", counted(shutil.rmtree)),
            mock.patch.object(commit, "_exchange", counted(commit._exchange)),
        ):
            save_alone(directory, 200, state={"new": True}, token="new", header=header(generation=2))
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.distributed
@pytest.mark.parametrize("replaces", [False, True])
def test_killed_at_any_point_there_is_the_old_one_or_the_new_one(pool: Pools, tmp_path: Path, replaces: bool) -> None:
    def case() -> list[tuple[int, int, bool, int]]:
        found = []
        for kill_at in range(1, 20):
            directory = tmp_path / str(kill_at)
            save_alone(directory, 100, state={"new": False})
            if replaces:
                save_alone(directory, 200, state={"new": False})
            code = _save_and_die(directory, kill_at)
            good, skipped = newest_good(directory)
            assert good is not None and not skipped
            prune(directory, 2)
            expected = ["step-00000100", "step-00000200"] if good.step == 200 else ["step-00000100"]
            assert names(directory) == expected, "what a dead writer left is collected"
            found.append((code, good.step, good.manifest.state["new"], kill_at))
            if code == 0:
                break
        return found

    *killed, finished = pool(1).run_alone(case)[0]
    assert finished[:3] == (0, 200, True)
    assert {code for code, *_ in killed} == {-signal.SIGKILL} and len(killed) >= 7
    news = [new for _, _, new, _ in killed]
    assert news == sorted(news) and set(news) == {False, True}, "old until the commit, new from then on"
    assert {step for _, step, new, _ in killed if not new} == ({200} if replaces else {100})


@pytest.mark.distributed
def test_a_rank_killed_while_it_writes_leaves_the_older_one_newest(pool: Pools, tmp_path: Path) -> None:
    pool(2).run(lambda: save_together(tmp_path, 100).step)

    def case() -> None:
        if dist.get_rank() == 1:
            with mock.patch("os.fsync", side_effect=lambda _: os.kill(os.getpid(), 9)):
                save_together(tmp_path)
        save_together(tmp_path)

    with pytest.raises(Exception):  # noqa: B017 -- rank 0's ProcessError or the pool's ChildProcessError, whichever is first
        pool(2).run(case)
    good, skipped = newest_good(tmp_path)
    assert good is not None and good.step == 100 and not skipped


class Bomb:
    """Unpickling it runs code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("code ran",)


@pytest.mark.distributed
def test_nothing_is_ever_unpickled(pool: Pools, tmp_path: Path) -> None:
    bomb = pickle.dumps(Bomb())

    def case() -> list[str]:
        seen: list[str] = []
        watched = ("pickle.find_class", "marshal.loads", "exec")
        checkpoint = save_alone(tmp_path)
        check_files(checkpoint)  # whatever is imported late is imported now
        sys.addaudithook(lambda event, args: seen.append(event) if event in watched else None)
        pickle.loads(pickle.dumps(len))
        assert seen.pop() == "pickle.find_class", "the hook sees"
        checkpoint = save_alone(tmp_path, token="t2")
        pairs = blank(parts(whole_tensors(), 0, 1))
        restore(Checkpoint.open(checkpoint.path), pairs)
        check_digests(checkpoint, pairs, None)
        check_files(checkpoint)
        for path in sorted(checkpoint.path.iterdir()):
            content = path.read_bytes()
            for hostile in (bomb, content[:8] + bomb, content + bomb):
                path.write_bytes(hostile)
                good, skipped = newest_good(tmp_path)
                assert good is None and len(skipped) == 1
            path.write_bytes(content)
        verify_files(Checkpoint.open(checkpoint.path))
        return seen

    assert pool(1).run_alone(case) == [[]]


@pytest.mark.distributed
@pytest.mark.parametrize("tells", [True, False])
def test_one_rank_of_each_part_of_the_model_vouches_for_it(pool: Pools, tmp_path: Path, tells: bool) -> None:
    """The second rank alone holds a tensor (it runs another stage), and nobody writes it."""

    def case() -> None:
        rank = dist.get_rank()
        pairs = [pair for pair in parts(whole_tensors(), rank, 2) if rank == 1 or pair[0].name != "model.scale"]
        pairs = [(replace(entry, holders=(0,)) if entry.name == "model.scale" else entry, t) for entry, t in pairs]
        save_together(tmp_path, pairs=pairs, tells=rank == 0 or tells)

    if tells:
        assert "'model.scale': 0 of its" in _outcomes(pool, 2, case)[0] and names(tmp_path) == []
    else:
        pool(2).run(case)
        assert "model.scale" not in Checkpoint.open(tmp_path / "step-00000200").manifest.tensors
