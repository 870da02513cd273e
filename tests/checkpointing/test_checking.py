"""Memory and files against the manifest's digests, by all ranks together."""

from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from allranks.checkpointing import checking
from allranks.checkpointing.checking import check_digests, check_files
from allranks.checkpointing.checkpoint import Checkpoint
from allranks.checkpointing.restore import restore
from allranks.errors import CheckpointError
from tests.checkpointing.worlds import blank, counted_reads, flip, parts, save_alone, save_together, whole_tensors
from tests.distributed.pool import Pools


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_what_was_restored_in_another_world_has_the_digests(pool: Pools, tmp_path: Path, world_size: int) -> None:
    save_alone(tmp_path)

    def case() -> None:
        checkpoint = Checkpoint.open(tmp_path / "step-00000200")
        mine = blank(parts(whole_tensors(), dist.get_rank(), world_size))
        restore(checkpoint, mine)
        check_digests(checkpoint, mine, dist.group.WORLD)
        check_files(checkpoint, dist.group.WORLD)

    pool(world_size).run(case)


@pytest.mark.distributed
@pytest.mark.parametrize("how", ["changed", "swapped", "repeated", "forgotten"])
def test_a_tensor_that_differs_on_one_rank_is_named_on_all(pool: Pools, tmp_path: Path, how: str) -> None:
    name = "model.embedding.weight"

    def case() -> str:
        rank = dist.get_rank()
        checkpoint = save_together(tmp_path)
        mine = parts(whole_tensors(), rank, 3)
        at = next(i for i, (entry, _) in enumerate(mine) if entry.name == name)
        entry, tensor = mine[at]
        if entry.writer == rank and tensor.numel() and (rank == 1 or len(entry.holders) == 3):
            if how == "changed":
                tensor.view(-1)[3] += 1
            elif how == "swapped":
                tensor.copy_(tensor.flip(0))
            elif how == "repeated":
                mine.append(mine[at])
            else:
                del mine[at]
        try:
            check_digests(checkpoint, mine, dist.group.WORLD)
        except CheckpointError as error:
            return str(error)
        return "equal"

    found = pool(3).run(case)
    assert set(found) == {f"{tmp_path / 'step-00000200'}: 1 tensors differ from their digests: {name!r}"}


def test_only_ten_tensors_are_named(tmp_path: Path) -> None:
    pairs = parts({f"w{i:02d}": torch.zeros(3) for i in range(12)}, 0, 1)
    checkpoint = save_alone(tmp_path, pairs=pairs, aliases={})
    with pytest.raises(CheckpointError, match=r"12 tensors differ .*'w09' and 2 more$"):
        check_digests(checkpoint, [(entry, tensor + 1) for entry, tensor in pairs], None)
    with pytest.raises(CheckpointError, match="1 tensors differ from their digests: 'w99'"):
        check_digests(checkpoint, [*pairs, *parts({"w99": torch.zeros(1)}, 0, 1)], None)


@pytest.mark.distributed
def test_an_error_on_one_rank_is_everybodys(pool: Pools, tmp_path: Path) -> None:
    checkpoint = pool(2).run(lambda: save_together(tmp_path).path)[0]
    flip(checkpoint / "rank-00001.safetensors", -1)

    def case() -> str:
        try:
            check_files(Checkpoint.open(checkpoint), dist.group.WORLD)
        except CheckpointError as error:
            return str(error)
        return "equal"

    found = pool(2).run(case)
    assert len(set(found)) == 1 and "rank-00001.safetensors: bytes" in found[0]


@pytest.mark.distributed
def test_each_file_is_opened_by_one_rank_alone(pool: Pools, tmp_path: Path) -> None:
    path = pool(4).run(lambda: save_together(tmp_path).path)[0]

    def case() -> list[str]:
        with counted_reads() as (opened, _):
            check_files(Checkpoint.read(path), dist.group.WORLD)
        return sorted({file.name for file in opened})

    assert pool(2).run(case) == [
        ["rank-00000.safetensors", "rank-00002.safetensors"],
        ["rank-00001.safetensors", "rank-00003.safetensors"],
    ]


def test_what_one_process_checks_has_all_its_boxes(tmp_path: Path) -> None:
    checkpoint = save_alone(tmp_path)
    tensors = checkpoint.manifest.tensors | {"model.more": checkpoint.manifest.tensors["model.scale"]}
    more = Checkpoint(checkpoint.path, checkpoint.manifest.model_copy(update={"tensors": tensors}))
    with pytest.raises(CheckpointError, match=r"'model\.more': 0 of its 1 elements in 0 boxes"):
        check_files(more)


def test_files_whose_digests_lie_are_found_though_their_sha256_is_true(tmp_path: Path) -> None:
    checkpoint = save_alone(tmp_path)
    record = checkpoint.manifest.tensors["model.scale"]
    tensors = checkpoint.manifest.tensors | {"model.scale": record.model_copy(update={"digest": "0" * 16})}
    lying = Checkpoint(checkpoint.path, checkpoint.manifest.model_copy(update={"tensors": tensors}))
    check_files(checkpoint)
    with pytest.raises(CheckpointError, match=r"differ from their digests: 'model\.scale'$"):
        check_files(lying)


def test_files_are_read_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = save_alone(tmp_path)
    for batch_bytes in (1, 100, 300):
        monkeypatch.setattr(checking, "_BATCH_BYTES", batch_bytes)
        check_files(checkpoint)


@pytest.mark.distributed
def test_a_checkpoint_that_this_host_does_not_see_yet_is_waited_for(pool: Pools, tmp_path: Path) -> None:
    """As over NFS: rank 1 sees its name only where it has been asked for."""

    def case() -> list[str]:
        checkpoint, awaited = save_together(tmp_path), list[str]()
        with mock.patch.object(checking, "await_name", lambda path: awaited.append(path.name)):
            check_files(checkpoint, dist.group.WORLD)
        return awaited

    assert pool(2).run(case) == [[], ["step-00000200"]]
