"""What several hosts have of a checkpoint, brought to the disk: by nobody's lead, whole or not at all."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from allranks.checkpointing.checkpoint import Checkpoint, list_checkpoints, verify_files
from allranks.checkpointing.joining import KEPT, HostPart, bring_part, is_wanted, newest_part
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
    found = newest_part(root / name, "run-a")
    assert found is not None
    return found


@pytest.fixture
def root(pool: Pools, tmp_path: Path) -> Path:
    """With a checkpoint of three ranks in `whole`, and a RUN in `run`."""
    from tests.checkpointing.worlds import save_together

    def case() -> None:
        import torch.distributed as dist

        save_together(tmp_path / "whole", pairs=parts(whole_tensors(), dist.get_rank(), 3))

    pool(3).run(case)
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
    assert newest_part(tmp_path / "missing", "run-a") is None
    path = save_alone(tmp_path).path
    assert newest_part(tmp_path, "run-b") is None
    (path / "manifest.json").write_text("{}")
    assert newest_part(tmp_path, "run-a") is None
