"""A second place: what was brought comes back whole, and nothing half-brought or altered ever does."""

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from allranks.checkpointing.checkpoint import Checkpoint, list_checkpoints, verify_files
from allranks.checkpointing.mirror import Mirror
from allranks.errors import CheckpointError, ConfigError
from tests.checkpointing.worlds import header, save_alone

RUN = "run-a"


@pytest.fixture(params=["memory", "file"])
def mirror(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Mirror]:
    """An object store in memory, and a folder."""
    yield Mirror("memory://bucket/mine" if request.param == "memory" else str(tmp_path / "mirror"), RUN)
    memory = fsspec.filesystem("memory")
    if memory.exists("/bucket"):
        memory.rm("/bucket", recursive=True)


def files_of(checkpoint: Checkpoint) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in checkpoint.path.iterdir()}


def test_what_was_brought_comes_back_bit_by_bit(mirror: Mirror, tmp_path: Path) -> None:
    assert mirror.list_newest() == []
    sent = [save_alone(tmp_path / "a", step) for step in (100, 200)]
    advanced = list[int]()
    for checkpoint in sent:
        mirror.bring(checkpoint, lambda: advanced.append(1))
    assert len(advanced) >= 2 * 3
    found = mirror.list_newest()
    assert [one.step for one in found] == [200, 100]
    fetched = mirror.fetch(found[0], tmp_path / "b", RUN)
    assert fetched.path == tmp_path / "b" / "step-00000200" and files_of(fetched) == files_of(sent[1])
    verify_files(fetched)
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["step-00000200"]


def test_a_large_file_tells_of_its_blocks(mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allranks.checkpointing.mirror._BLOCK_BYTES", 100)
    monkeypatch.setattr("fsspec.AbstractFileSystem.blocksize", 100, raising=False)
    sent, advanced = save_alone(tmp_path / "a"), list[int]()
    mirror.bring(sent, lambda: advanced.append(1))
    (found,) = mirror.list_newest()
    blocks = sum(path.stat().st_size // 100 for path in sent.path.iterdir())
    assert len(advanced) >= blocks > 20
    advanced.clear()
    assert files_of(mirror.fetch(found, tmp_path / "b", RUN, lambda: advanced.append(1))) == files_of(sent)
    assert len(advanced) >= blocks, "on the way back, too"


@pytest.mark.parametrize("done", ["listed", "written", "read", "tidied"])
def test_a_place_where_nothing_comes_further_is_left_alone(mirror: Mirror, tmp_path: Path, done: str) -> None:
    """A share whose server is gone answers no system call, and no error comes either."""
    sent = save_alone(tmp_path / "a", 100)
    mirror.bring(sent)
    (found,) = mirror.list_newest()
    again, go_on = Mirror(mirror.url, RUN, patience=0.5), threading.Event()

    def stand(*_: Any, **__: Any) -> Any:
        go_on.wait(60)
        raise ConnectionError("only now")

    calls: dict[str, Callable[[], object]] = {
        "listed": again.list_newest,
        "written": lambda: again.bring(save_alone(tmp_path / "a", 200)),
        "read": lambda: again.fetch(found, tmp_path / "b", RUN),
        "tidied": lambda: again.prune(1),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name in ("ls", "info", "size", "get_file"):
            patch.setattr(again._files, name, stand)
        with pytest.raises(CheckpointError, match=rf"cannot be {done}: TimeoutError: nothing has come further there"):
            calls[done]()
        go_on.set()
    assert not (tmp_path / "b").exists() or list_checkpoints(tmp_path / "b") == []


def test_what_is_there_already_is_not_brought_again_and_nothing_is_written_over(mirror: Mirror, tmp_path: Path) -> None:
    first = save_alone(tmp_path / "a", 100)
    mirror.bring(first)
    advanced = list[int]()
    mirror.bring(first, lambda: advanced.append(1))
    assert not advanced
    mirror.bring(save_alone(tmp_path / "b", 100, header=header(100, generation=2), token="t2"))
    assert [one.step for one in mirror.list_newest()] == [100, 100]


def test_what_a_later_attempt_has_written_is_newer_whatever_its_step(mirror: Mirror, tmp_path: Path) -> None:
    """The run has gone back: from 1,000 to before 200."""
    for step in (900, 1000):
        mirror.bring(save_alone(tmp_path / "a", step))
    for step, there in ((200, [200, 1000]), (300, [300, 200])):
        mirror.bring(save_alone(tmp_path / "b", step, header=header(step, generation=2)))
        mirror.prune(2)
        assert [one.step for one in mirror.list_newest()] == there
        assert [one.step for one in Mirror(mirror.url, RUN).list_newest()] == there, "by another process"


def test_some_stay_for_ever(mirror: Mirror, tmp_path: Path) -> None:
    for step in (100, 200, 300, 400):
        mirror.bring(save_alone(tmp_path / "a", step))
    mirror.prune(1, keep_every=200)
    assert [one.step for one in mirror.list_newest()] == [400, 200]


def test_one_whose_manifest_is_damaged_is_the_oldest(mirror: Mirror, tmp_path: Path) -> None:
    for step in (100, 200):
        mirror.bring(save_alone(tmp_path / "a", step))
    again = Mirror(mirror.url, RUN)
    again._files.pipe_file(f"{mirror._root}/{mirror.list_newest()[0].name}/manifest.json", b"{")
    assert [one.step for one in again.list_newest()] == [100, 200]


@pytest.mark.parametrize("question", ["info", "size", "cat_file"])
def test_what_is_not_answered_once_is_neither_gone_nor_old(mirror: Mirror, tmp_path: Path, question: str) -> None:
    for step in (100, 200, 300):
        mirror.bring(save_alone(tmp_path / "a", step))
    again = Mirror(mirror.url, RUN)
    real, failed = getattr(again._files, question), list[str]()

    def answer(path: str, *rest: Any, **more: Any) -> Any:
        if "00000300" in path and not failed:
            failed.append(path)
            raise ConnectionError("the line is dead")
        return real(path, *rest, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(again._files, question, answer)
        with pytest.raises(CheckpointError, match="cannot be tidied: ConnectionError: the line is dead"):
            again.prune(2)
        assert failed
        again.prune(2)
    assert [one.step for one in again.list_newest()] == [300, 200]


def test_what_could_not_be_seen_stays_while_this_process_brings_its_own(mirror: Mirror, tmp_path: Path) -> None:
    for step in (900, 1000):
        Mirror(mirror.url, RUN).bring(save_alone(tmp_path / "a", step))
    mirror.spares = True
    mirror.prune(1)
    assert [one.step for one in mirror.list_newest()] == [1000, 900], "nor before it has any"
    for step in (10, 20, 30):
        mirror.bring(save_alone(tmp_path / "b", step, header=header(step, generation=2)))
        mirror.prune(2)
    assert [one.step for one in mirror.list_newest()] == [30, 20, 1000, 900]
    Mirror(mirror.url, RUN).prune(2)
    assert [one.step for one in mirror.list_newest()] == [30, 20]


def broken_after(mirror: Mirror, count: int) -> Callable[[], None]:
    """Let the `count`-th file be the last that is brought."""
    left = [count]

    def advanced() -> None:
        left[0] -= 1
        if not left[0]:
            raise ConnectionError("the line is dead")

    return advanced


@pytest.mark.parametrize("count", [1, 2])
def test_what_was_half_brought_is_none_and_goes_with_the_next(mirror: Mirror, tmp_path: Path, count: int) -> None:
    old, new = (save_alone(tmp_path / "a", step) for step in (100, 200))
    mirror.bring(old)
    with pytest.raises(CheckpointError, match="cannot be written: ConnectionError: the line is dead"):
        mirror.bring(new, broken_after(mirror, count))
    assert [one.step for one in mirror.list_newest()] == [100]
    mirror.prune(1)
    assert len(mirror._files.ls(mirror._root)) == 1
    mirror.bring(new)
    mirror.prune(1)
    assert [one.step for one in mirror.list_newest()] == [200] and len(mirror._files.ls(mirror._root)) == 1


def test_what_fails_in_a_folder_leaves_no_part_of_itself_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mirror = Mirror(str(tmp_path / "mirror"), RUN)
    mirror.bring(save_alone(tmp_path / "a", 100))

    def fill(source: Path, target: Path, advanced: Callable[[], None]) -> None:
        target.write_bytes(source.read_bytes()[:10])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))

    monkeypatch.setattr("allranks.checkpointing.mirror._copy", fill)
    with pytest.raises(CheckpointError, match=r"cannot be written: OSError: .*No space left"):
        mirror.bring(save_alone(tmp_path / "a", 200))
    assert [path.name for path in Path(mirror._root).iterdir()] == [mirror.list_newest()[0].name]


def test_what_comes_to_life_again_takes_nothing_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may be bringing the same one meanwhile."""
    mirror, go_on, ended = Mirror(str(tmp_path / "mirror"), RUN, patience=0.5), threading.Event(), threading.Event()

    def stand(source: Path, target: Path, advanced: Callable[[], None]) -> None:
        go_on.wait(60)
        target.write_bytes(b"late")
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(target))

    def take_back(*given: Any) -> None:
        try:
            real(*given)
        finally:
            ended.set()

    real = Mirror._take_back
    monkeypatch.setattr("allranks.checkpointing.mirror._copy", stand)
    monkeypatch.setattr(Mirror, "_take_back", take_back)
    with pytest.raises(CheckpointError, match="nothing has come further there"):
        mirror.bring(save_alone(tmp_path / "a", 100))
    go_on.set()
    assert ended.wait(60)
    assert [path.name for path in Path(mirror._root).glob("*/*")] == ["rank-00000.safetensors"]


def test_one_whose_seal_was_cut_off_does_not_count_and_is_brought_again(mirror: Mirror, tmp_path: Path) -> None:
    """COMMITTED is there from the moment it is opened, and a full disk or a kill may leave it empty."""
    old, new = (save_alone(tmp_path / "a", step) for step in (100, 200))
    for checkpoint in (old, new):
        mirror.bring(checkpoint)
    mirror._files.pipe_file(f"{mirror._root}/{mirror.list_newest()[0].name}/COMMITTED", b"")
    assert [one.step for one in mirror.list_newest()] == [100]
    mirror.bring(new)
    assert [one.step for one in mirror.list_newest()] == [200, 100]
    assert files_of(mirror.fetch(mirror.list_newest()[0], tmp_path / "b", RUN)) == files_of(new)
    mirror._files.pipe_file(f"{mirror._root}/{mirror.list_newest()[0].name}/COMMITTED", b"")
    mirror.prune(1)
    assert [one.step for one in mirror.list_newest()] == [100], "the good one is no more than keep"


@pytest.mark.parametrize("file", ["rank-00000.safetensors", "manifest.json", "COMMITTED"])
def test_what_was_altered_there_does_not_come_back(mirror: Mirror, tmp_path: Path, file: str) -> None:
    mirror.bring(save_alone(tmp_path / "a", 100))
    (found,) = mirror.list_newest()
    path = f"{mirror._root}/{found.name}/{file}"
    content = bytearray(mirror._files.cat_file(path))
    content[-2] ^= 1
    mirror._files.pipe_file(path, bytes(content))
    with pytest.raises(CheckpointError):
        mirror.fetch(found, tmp_path / "b", RUN)
    assert list((tmp_path / "b").iterdir()) == []


def watched(get_file: Any, fetched: list[str]) -> Any:
    def get(files: Any, source: str, *rest: Any, **named: Any) -> Any:
        fetched.append(source)
        return get_file(files, source, *rest, **named)

    return get


def test_a_file_that_is_gone_or_too_long_is_one_line(mirror: Mirror, tmp_path: Path, monkeypatch: Any) -> None:
    mirror.bring(save_alone(tmp_path / "a", 100))
    (found,) = mirror.list_newest()
    with monkeypatch.context() as patch:
        patch.setattr("allranks.checkpointing.mirror.MANIFEST_BYTES_CAP", 10)
        with pytest.raises(CheckpointError, match=r"has \d+ bytes, at most 10 are read"):
            mirror.fetch(found, tmp_path / "b", RUN)
    path = f"{mirror._root}/{found.name}/rank-00000.safetensors"
    content = mirror._files.cat_file(path)
    mirror._files.pipe_file(path, content + b"x")
    fetched: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(Mirror, "_get", watched(Mirror._get, fetched))
        with pytest.raises(CheckpointError, match=rf"has {len(content) + 1} bytes, and {len(content)} in its manifest"):
            mirror.fetch(found, tmp_path / "b", RUN)
    assert len(fetched) == 2 and not any("rank-00000" in one for one in fetched), "the disk is not filled first"
    mirror._files.rm_file(path)
    with pytest.raises(CheckpointError, match="cannot be read: FileNotFoundError") as told:
        mirror.fetch(found, tmp_path / "b", RUN)
    assert "\n" not in str(told.value) and list_checkpoints(tmp_path / "b") == []


def test_another_runs_and_another_steps_are_refused(mirror: Mirror, tmp_path: Path) -> None:
    mirror.bring(save_alone(tmp_path / "a", 100))
    (found,) = mirror.list_newest()
    with pytest.raises(CheckpointError, match="belongs to run 'run-a'"):
        mirror.fetch(found, tmp_path / "b", "another")
    renamed = found.name.replace("step-00000100", "step-00000300")
    mirror._files.mv(f"{mirror._root}/{found.name}", f"{mirror._root}/{renamed}", recursive=True)
    (found,) = mirror.list_newest()
    with pytest.raises(CheckpointError, match=r"step-00000300\..* is of step 100"):
        mirror.fetch(found, tmp_path / "b", RUN)


def test_what_is_damaged_here_is_replaced(mirror: Mirror, tmp_path: Path) -> None:
    checkpoint = save_alone(tmp_path / "a", 100)
    before = files_of(checkpoint)
    mirror.bring(checkpoint)
    (checkpoint.path / "rank-00000.safetensors").write_bytes(b"")
    fetched = mirror.fetch(mirror.list_newest()[0], tmp_path / "a", RUN)
    assert files_of(fetched) == before and [path.name for path in (tmp_path / "a").iterdir()] == ["step-00000100"]


def test_each_run_has_its_own_folder(mirror: Mirror, tmp_path: Path) -> None:
    mirror.bring(save_alone(tmp_path / "a", 100))
    assert Mirror(mirror.url, "another").list_newest() == []


def test_a_place_of_no_known_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.mirror=floppy://a: Protocol not known: floppy"):
        Mirror("floppy://a", RUN)


def test_a_folder_that_was_there_is_not_made_anew_where_its_file_system_was(tmp_path: Path) -> None:
    mirror, place = Mirror(str(tmp_path / "mirror"), RUN), tmp_path / "mirror"
    first, second = (save_alone(tmp_path / "a", step) for step in (100, 200))
    assert not mirror.is_there()
    mirror.bring(first)
    assert mirror.is_there()
    place.rename(tmp_path / "away")
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"mirror/run-a was there and is not any more; mount") as raised:
            mirror.bring(second)
        assert "\n" not in str(raised.value) and not place.exists()
    (tmp_path / "away").rename(place)
    mirror.bring(second)
    assert [one.step for one in mirror.list_newest()] == [200, 100]


def test_a_bucket_that_was_emptied_is_filled_again(mirror: Mirror, tmp_path: Path) -> None:
    """In a folder its user makes it again; in an object store there are no folders, and nothing to mount."""
    mirror.bring(save_alone(tmp_path / "a", 100))
    mirror._files.rm(mirror._root, recursive=True)
    assert not mirror.is_there()
    if not mirror.url.startswith("memory"):
        Path(mirror.url, RUN).mkdir()
    mirror.bring(save_alone(tmp_path / "a", 200))
    assert [one.step for one in mirror.list_newest()] == [200]
