"""What several hosts have of a checkpoint, brought to the disk: by nobody's lead, whole or not at all."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from allranks.checkpointing import joining
from allranks.checkpointing.checkpoint import Checkpoint, list_checkpoints, verify_files
from allranks.checkpointing.commit import check_attempt, publish
from allranks.checkpointing.joining import KEPT, HostPart, bring_part, is_wanted, list_parts, take_away
from allranks.errors import CheckpointError
from tests.checkpointing.worlds import header, parts, save_alone, whole_tensors
from tests.distributed.pool import Pools


def part_of(root: Path, name: str, *files: str, kept: tuple[str, ...] = ()) -> HostPart:
    """A host that has these files of the checkpoint of three ranks in root/whole."""
    whole, here = root / "whole" / "step-00000200", root / name / "step-00000200"
    here.mkdir(parents=True)
    for file in ("manifest.json", "COMMITTED", *files):
        (here / file).write_bytes((whole / file).read_bytes())
    for file in kept:
        (here / f"{KEPT}{file}").write_bytes((whole / file).read_bytes())
    (found,) = list_parts(root / name, "run-a")
    return found


def save_again(pool: Pools, directory: Path, seed: int = 1) -> None:
    """What three ranks save of the tensors of that seed."""
    from tests.checkpointing.worlds import save_together

    def case() -> None:
        import torch.distributed as dist

        save_together(directory, pairs=parts(whole_tensors(seed), dist.get_rank(), 3))

    pool(3).run(case)


@pytest.fixture
def root(pool: Pools, tmp_path: Path) -> Path:
    """With a checkpoint of three ranks in `whole`, and a RUN in `run`."""
    save_again(pool, tmp_path / "whole", 0)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "run.json").write_text(json.dumps({"id": "run-a", "attempts": 2}))
    return tmp_path


FILES = tuple(f"rank-0000{rank}.safetensors" for rank in range(3))


@pytest.mark.distributed
def test_hosts_may_bring_at_the_same_time(root: Path) -> None:
    disk = root / "run" / "checkpoints"
    hosts = [part_of(root, str(number), FILES[number], kept=(FILES[number - 1],)) for number in range(3)]
    with ThreadPoolExecutor(3) as threads:
        for _ in range(5):
            assert list(threads.map(lambda part: bring_part(part, disk, 2), hosts)) == [[], [], []]
            (path,) = disk.iterdir()
            verify_files(Checkpoint.open(path, "run-a"))
            for file in path.iterdir():
                file.unlink()
            path.rmdir()


@pytest.mark.distributed
@pytest.mark.parametrize("late", ["begins", "has brought a file"])
def test_a_host_that_comes_late_makes_nobody_commit_what_it_has_begun(
    root: Path, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    """Of four hosts one has seen that all is there, another commits it, and a third begins where it was."""
    disk = root / "run" / "checkpoints"
    hosts = [part_of(root, str(number), FILES[number % 3], kept=(FILES[number - 1],)) for number in range(4)]
    (target,) = (disk / part.path.name for part in hosts[:1])
    assert bring_part(hosts[0], disk, 2) == []
    (common,) = disk.iterdir()

    def others_are_faster(*arguments: Any) -> None:
        check_attempt(*arguments)
        monkeypatch.setattr(joining, "check_attempt", check_attempt)
        assert bring_part(hosts[2], disk, 2) == [] and target.is_dir()
        common.mkdir()
        if late == "has brought a file":
            (common / FILES[0]).write_bytes(hosts[0].files()[FILES[0]].read_bytes())

    monkeypatch.setattr(joining, "check_attempt", others_are_faster)
    assert bring_part(hosts[1], disk, 2) == []
    verify_files(Checkpoint.open(target, "run-a"))
    assert list(disk.iterdir()) == [target]


@pytest.mark.distributed
def test_what_another_host_takes_away_while_one_looks_is_no_error(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has been committed then."""
    disk = root / "run" / "checkpoints"
    first, second, looks = part_of(root, "0", *FILES[:2]), part_of(root, "1", *FILES), Path.is_file

    def is_slow(path: Path, **options: Any) -> bool:
        found = looks(path, **options)
        if found and path.parent.parent == disk and ".tmp-" in path.parent.name:
            monkeypatch.setattr(Path, "is_file", looks)
            assert bring_part(second, disk, 2) == []
        return found

    assert bring_part(first, disk, 2) == []
    monkeypatch.setattr(Path, "is_file", is_slow)
    assert bring_part(first, disk, 2) == []
    bring_part(second, disk, 2)
    (path,) = disk.iterdir()
    verify_files(Checkpoint.open(path, "run-a"))


@pytest.mark.distributed
def test_where_two_hosts_name_it_both_have(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = root / "run" / "checkpoints"
    first, second = (part_of(root, str(number), *FILES) for number in range(2))

    def other_is_faster(*arguments: Any) -> None:
        monkeypatch.setattr(joining, "publish", publish)
        assert bring_part(second, disk, 2) == []
        raise OSError(39, "Directory not empty")

    monkeypatch.setattr(joining, "publish", other_is_faster)
    assert bring_part(first, disk, 2) == []
    (path,) = disk.iterdir()
    verify_files(Checkpoint.open(path, "run-a"))


@pytest.mark.distributed
def test_a_host_that_cannot_commit_leaves_it_to_the_others(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = root / "run" / "checkpoints"
    first, second = part_of(root, "0", *FILES), part_of(root, "1", FILES[0])
    with monkeypatch.context() as patch:
        patch.setattr(joining, "publish", mock.Mock(side_effect=OSError(5, "Input/output error")))
        with pytest.raises(OSError, match="Input/output"):
            bring_part(first, disk, 2)
    assert bring_part(second, disk, 2) == []
    (path,) = disk.iterdir()
    verify_files(Checkpoint.open(path, "run-a"))


@pytest.mark.distributed
def test_what_a_host_cannot_commit_is_put_to_what_one_that_came_late_has_brought(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has brought it may have nothing of it any more."""
    disk = root / "run" / "checkpoints"
    first, late = part_of(root, "0", *FILES[:2]), part_of(root, "1", FILES[2])

    def fails(taken: Path, *_: Any) -> None:
        common.mkdir()
        (common / FILES[2]).write_bytes((taken / FILES[2]).read_bytes())
        raise OSError(5, "Input/output error")

    assert bring_part(late, disk, 2) == []
    (common,) = disk.iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(joining, "publish", fails)
        with pytest.raises(OSError, match="Input/output"):
            bring_part(first, disk, 2)
    shutil.rmtree(first.path)
    assert bring_part(late, disk, 2) == []
    (path,) = disk.iterdir()
    verify_files(Checkpoint.open(path, "run-a"))


@pytest.mark.distributed
def test_what_nobody_wants_any_more_is_taken_away(root: Path) -> None:
    disk = root / "run" / "checkpoints"
    part = part_of(root, "0", FILES[0])
    take_away(part, disk, 2)
    assert bring_part(part, disk, 2) == [] and len(list(disk.iterdir())) == 1
    take_away(part, disk, 2)
    assert list(disk.iterdir()) == []


@pytest.mark.distributed
def test_what_an_earlier_try_has_brought_is_not_mixed_with_another_one_of_the_step(pool: Pools, root: Path) -> None:
    """As long in bytes, and of the same attempt: which went on from an older one, and has come to that step again."""
    disk = root / "run" / "checkpoints"
    assert bring_part(part_of(root, "early", FILES[0]), disk, 2) == []
    shutil.move(root / "whole", root / "before")
    save_again(pool, root / "whole")
    again = part_of(root, "again", *FILES)
    assert again.files()[FILES[0]].stat().st_size == (root / "before" / again.path.name / FILES[0]).stat().st_size
    assert bring_part(again, disk, 2) == []
    verify_files(Checkpoint.open(disk / again.path.name, "run-a"))


@pytest.mark.distributed
def test_what_is_not_whole_gets_no_name_and_a_later_attempt_none_either(root: Path) -> None:
    disk = root / "run" / "checkpoints"
    first, rest = part_of(root, "0", FILES[0]), part_of(root, "1", FILES[1], kept=(FILES[2],))
    assert bring_part(first, disk, 2) == [] and list_checkpoints(disk) == []
    (root / "run" / "run.json").write_text(json.dumps({"id": "run-a", "attempts": 3}))
    with pytest.raises(CheckpointError, match="attempt 3 of this run has begun, this is attempt 2"):
        bring_part(rest, disk, 2)
    assert list_checkpoints(disk) == []


def test_only_what_is_newer_than_the_disk_is_wanted(tmp_path: Path) -> None:
    assert is_wanted((1, 10), tmp_path, "run-a")
    save_alone(tmp_path, header=header(200, generation=3))
    assert [is_wanted(newness, tmp_path, "run-a") for newness in ((3, 200), (3, 201), (4, 50), (2, 900))] == [
        False,
        True,
        True,
        False,
    ]


def test_what_cannot_be_read_is_no_part(tmp_path: Path) -> None:
    assert list_parts(tmp_path / "missing", "run-a") == []
    path = save_alone(tmp_path).path
    assert list_parts(tmp_path, "run-b") == []
    (path / "manifest.json").write_text("{}")
    assert list_parts(tmp_path, "run-a") == []


def test_the_newest_part_is_first_and_a_later_attempts_is_newer(tmp_path: Path) -> None:
    for step, generation in ((100, 1), (300, 1), (200, 2)):
        save_alone(tmp_path, step, header=header(step, generation=generation))
    assert [part.newness for part in list_parts(tmp_path, "run-a")] == [(2, 200), (1, 300), (1, 100)]
