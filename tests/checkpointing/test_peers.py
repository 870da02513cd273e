"""Checkpoints in the memory of several hosts: on each what its ranks hold and what the host before it does."""

import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from allranks.checkpointing.checkpoint import Checkpoint, list_checkpoints, read_manifest, verify_files
from allranks.checkpointing.joining import bring_part, list_parts
from allranks.checkpointing.peers import Hosts, first_word, save_on_hosts
from allranks.errors import CheckpointError, RunError
from tests.checkpointing.worlds import flip, header, parts, save_alone, save_together, whole_tensors
from tests.distributed.pool import Pools

TWO_HOSTS = ((0, 1), (2, 3))


def save_here(root: Path, hosts: tuple[tuple[int, ...], ...], step: int = 200, **options: Any) -> Checkpoint:
    """Save in the pool's world; each host has a directory of its own below `root`."""
    rank, size = dist.get_rank(), dist.get_world_size()
    number = next(number for number, ranks in enumerate(hosts) if rank in ranks)
    arguments: dict[str, Any] = {
        "directory": root / str(number),
        "header": header(step),
        "parts": parts(whole_tensors(), rank, size),
        "aliases": {"model.head.weight": "model.embedding.weight"},
        "state": {"position": 1600},
        "group": dist.group.WORLD,
        "rank": rank,
        "world_size": size,
        "token": "t_1",
        "device": torch.device("cpu"),
        "tells": rank == 0,
        "before_commit": lambda: None,
        "hosts": Hosts(rank, hosts),
    }
    return save_on_hosts(**(arguments | options))


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def bring(root: Path, *numbers: int) -> list[str]:
    """Bring together what these hosts have; what was wrong."""
    wrong = []
    for number in numbers:
        (part,) = list_parts(root / str(number), "run-a")
        wrong += bring_part(part, root / "disk", 2)
    return wrong


def check_whole(root: Path, step: int = 200) -> None:
    """What is on the disk is what the same world saves there."""
    checkpoint = Checkpoint.open(root / "disk" / f"step-{step:08d}", "run-a")
    verify_files(checkpoint)
    alone = save_alone(root / "alone")
    assert {name: one.digest for name, one in checkpoint.manifest.tensors.items()} == {
        name: one.digest for name, one in alone.manifest.tensors.items()
    }
    assert names(root / "disk") == [checkpoint.path.name], "nothing half-written stays"


@pytest.mark.distributed
@pytest.mark.parametrize("lost", [None, 0, 1])
def test_any_host_may_go(pool: Pools, tmp_path: Path, lost: int | None) -> None:
    def case() -> str:
        save_here(tmp_path, TWO_HOSTS, 100)
        return save_here(tmp_path, TWO_HOSTS).path.parent.name

    assert pool(4).run(case) == ["0", "0", "1", "1"]
    for number, (own, kept) in enumerate(((("0", "1"), ("2", "3")), (("2", "3"), ("0", "1")))):
        (copy,) = list_checkpoints(tmp_path / str(number))
        files = [f"rank-0000{rank}.safetensors" for rank in own]
        assert names(copy) == [
            "COMMITTED",
            *(f"kept-rank-0000{rank}.safetensors" for rank in kept),
            "manifest.json",
            *files,
        ]
    if lost is not None:
        shutil.rmtree(tmp_path / str(lost))
    assert bring(tmp_path, *(number for number in (0, 1) if number != lost)) == []
    check_whole(tmp_path)


@pytest.mark.distributed
def test_of_three_hosts_one_may_go_and_no_two(pool: Pools, tmp_path: Path) -> None:
    hosts = ((0,), (1, 2), (3,))
    pool(4).run(lambda: save_here(tmp_path, hosts).step)
    bring(tmp_path, 1)
    assert list_checkpoints(tmp_path / "disk") == [], "the files of the last host are on the first one"
    bring(tmp_path, 0)
    check_whole(tmp_path)


@pytest.mark.distributed
def test_a_damaged_file_is_told_and_taken_from_its_keeper(pool: Pools, tmp_path: Path) -> None:
    pool(4).run(lambda: save_here(tmp_path, TWO_HOSTS).step)
    flip(tmp_path / "0" / "step-00000200" / "rank-00000.safetensors", 4000)
    (line,) = bring(tmp_path, 0, 1)
    assert "rank-00000.safetensors" in line and "SHA-256" in line
    check_whole(tmp_path)


@pytest.mark.distributed
@pytest.mark.parametrize("failing", ["write", "read", "keep", "name"])
def test_what_fails_on_one_rank_is_raised_on_all_and_the_older_one_stays(
    pool: Pools, tmp_path: Path, failing: str
) -> None:
    place = {
        "write": "allranks.checkpointing.portion.write_file",
        "read": "allranks.checkpointing.peers.OpenFile",
        "keep": "allranks.checkpointing.peers.hashlib.sha256",
        "name": "allranks.checkpointing.peers.write_synced",
    }[failing]

    def case() -> str:
        save_here(tmp_path, TWO_HOSTS, 100)
        broken = mock.patch(place, side_effect=OSError(28, "No space left on device"))
        with broken if dist.get_rank() == 2 else mock.patch("os.getpid"), pytest.raises(CheckpointError) as raised:
            save_here(tmp_path, TWO_HOSTS)
        return str(raised.value)

    told = pool(4).run(case)
    assert len(set(told)) == 1 and "rank 2: " in told[0] and "No space left on device" in told[0]
    assert [names(tmp_path / number) for number in "01"] == [["step-00000100"]] * 2
    assert bring(tmp_path, 0, 1) == []
    check_whole(tmp_path, 100)


@pytest.mark.distributed
def test_what_has_to_stand_before_a_copy_counts_and_does_not_is_told_on_every_rank(pool: Pools, tmp_path: Path) -> None:
    def refuse() -> None:
        raise RunError("rank 0: lines are missing")

    def case() -> str:
        with pytest.raises(CheckpointError) as raised:
            save_here(tmp_path, TWO_HOSTS, before_commit=refuse)
        return str(raised.value)

    told = pool(4).run(case)
    assert len(set(told)) == 1 and ": rank 0: lines are missing; " in told[0]
    assert not [name for number in "01" for name in names(tmp_path / number) if name.startswith("step-")]


@pytest.mark.distributed
def test_an_error_that_is_no_refusal_ends_the_first_rank_and_the_others_meet_its_loss(
    pool: Pools, tmp_path: Path
) -> None:
    def fail() -> None:
        raise ValueError("a reduction failed")

    with pytest.raises(ValueError, match="a reduction failed"):
        pool(2).run(lambda: save_here(tmp_path, ((0,), (1,)), before_commit=fail))


@pytest.mark.distributed
def test_the_first_word_is_everyones(pool: Pools) -> None:
    def case() -> list[str]:
        rank, group, cpu = dist.get_rank(), dist.group.WORLD, torch.device("cpu")
        return [first_word(word, group, cpu) for word in ("", "one" if rank == 1 else "", str(rank))]

    assert pool(2).run(case) == [["", "one", "0"]] * 2
    assert first_word("alone", None, torch.device("cpu")) == "alone"


def test_who_keeps_whose_file() -> None:
    uneven = ((0, 1, 2), (3,), (4, 5))
    assert [Hosts(0, uneven).keeper(rank) for rank in range(6)] == [3, 3, 3, 4, 0, 1]
    assert Hosts(3, uneven).kept_by(3) == [0, 1, 2] and Hosts(0, uneven).kept_by(2) == []
    assert [Hosts(rank, uneven).first for rank in range(6)] == [True, False, False, True, True, False]
    assert [Hosts(rank, uneven).bytes_beside([1, 2, 4, 8, 16, 32]) for rank in (1, 3, 4)] == [55, 15, 56]
    assert Hosts(0, ((0, 1),)).keeper(1) is None and Hosts(0, ((0, 1),)).kept_by(0) == []


@pytest.mark.distributed
def test_the_manifest_is_that_of_a_checkpoint_on_the_disk(pool: Pools, tmp_path: Path) -> None:
    def case() -> bool:
        told: Any = save_together(tmp_path / "plain", state={"position": 1600}, token="t_1").manifest
        return bool(save_here(tmp_path, ((0,), (1,))).manifest == told)

    assert all(pool(2).run(case))
    assert read_manifest(tmp_path / "0" / "step-00000200") == read_manifest(tmp_path / "1" / "step-00000200")
