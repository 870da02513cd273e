"""The ranks of a group read a checkpoint together: each a part, all of it, and what one finds is everybody's."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from allranks.checkpointing import writing
from allranks.checkpointing.checkpoint import Checkpoint
from allranks.checkpointing.divided import read_index_divided, verify_files_divided
from allranks.checkpointing.index import read_index
from allranks.checkpointing.manifest import TensorRecord
from allranks.checkpointing.restore import restore
from allranks.errors import CheckpointError
from tests.checkpointing.worlds import blank, counted_reads, flip, parts, same_bits, save_alone, save_together
from tests.checkpointing.worlds import whole_tensors as whole
from tests.distributed.pool import Pools

CPU = torch.device("cpu")
Reads = tuple[list[Path], list[tuple[Path, int]], int]


def said(call: Callable[[], object]) -> str:
    """What was refused; "" where nothing was."""
    try:
        call()
    except CheckpointError as error:
        return str(error)
    return ""


def saved_by_four(pool: Pools, directory: Path) -> Path:
    """A checkpoint of four files, in chunks of 64 bytes."""

    def case() -> Path:
        with mock.patch.object(writing, "CHUNK_BYTES", 64):
            return save_together(directory).path

    return Path(pool(4).run(case)[0])


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_each_header_is_read_by_one_rank_and_known_to_all(pool: Pools, tmp_path: Path, world_size: int) -> None:
    path = saved_by_four(pool, tmp_path)

    def case() -> list[Path]:
        checkpoint, mine = Checkpoint.read(path), parts(whole(), dist.get_rank(), world_size)
        with counted_reads() as (opened, _):
            index = read_index_divided(checkpoint, dist.group.WORLD, CPU)
        assert dict(index) == read_index(path, checkpoint.manifest)
        filled = blank(mine)
        with mock.patch("allranks.checkpointing.restore.read_index", lambda *_: pytest.fail("read again")):
            restore(checkpoint, filled, index=index)
        assert all(same_bits(one, other) for (_, one), (_, other) in zip(filled, mine, strict=True))
        return opened

    assert Counter(file for opened in pool(world_size).run(case) for file in opened) == dict.fromkeys(files(path), 1)


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [2, 3])
def test_all_bytes_are_read_and_every_rank_reads_as_many(pool: Pools, tmp_path: Path, world_size: int) -> None:
    path = saved_by_four(pool, tmp_path)

    def case() -> Reads:
        seen = list[int]()
        with (
            counted_reads() as (opened, read),
            mock.patch("allranks.checkpointing.divided.read_index_divided", lambda *_: None),
        ):
            verify_files_divided(Checkpoint.read(path), dist.group.WORLD, CPU, lambda: seen.append(1))
        return opened, read, len(seen)

    ranks: list[Reads] = pool(world_size).run(case)
    records = Checkpoint.read(path).manifest.files
    chunks = {(path / name, at): chunk[1] for name, one in records.items() for at, chunk in enumerate(one.chunks)}
    assert Counter(chunk for _, read, _ in ranks for chunk in read) == dict.fromkeys(chunks, 1)
    taken = [sum(chunks[chunk] for chunk in read) for _, read, _ in ranks]
    assert max(taken) - min(taken) <= 2 * max(chunks.values()) < min(taken)
    assert [progress for *_, progress in ranks] == [len(read) for _, read, _ in ranks]
    assert sum(len(opened) for opened, *_ in ranks) <= 4 + world_size - 1


def files(path: Path) -> list[Path]:
    """Those with tensors."""
    return sorted(path.glob("*.safetensors"))


def lose_a_file(path: Path) -> None:
    files(path)[2].unlink()


def cut_a_file(path: Path) -> None:
    files(path)[3].write_bytes(files(path)[3].read_bytes()[:-1])


HARMS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a value": (lambda path: flip(files(path)[3], -1), "rank-00003.safetensors: bytes"),
    "a header": (lambda path: flip(files(path)[1], 100), "rank-00001.safetensors: bytes"),
    "a file": (lose_a_file, "rank-00002.safetensors: No such file"),
    "a length": (cut_a_file, "rank-00003.safetensors: "),
}


@pytest.mark.distributed
@pytest.mark.parametrize("harm", HARMS)
def test_damage_that_one_rank_finds_is_everybodys_error(pool: Pools, tmp_path: Path, harm: str) -> None:
    path = saved_by_four(pool, tmp_path)
    break_it, words = HARMS[harm]

    def case() -> str:
        return said(lambda: verify_files_divided(Checkpoint.read(path), dist.group.WORLD, CPU))

    assert pool(3).run(case) == [""] * 3
    break_it(path)
    found = pool(3).run(case)
    assert len(set(found)) == 1 and words in found[0]


@pytest.mark.distributed
@pytest.mark.parametrize("place", range(3))
def test_a_tensor_without_its_parts_is_found_by_whichever_rank_looks(pool: Pools, tmp_path: Path, place: int) -> None:
    path = saved_by_four(pool, tmp_path)

    def case() -> str:
        checkpoint = Checkpoint.read(path)
        listed = list(checkpoint.manifest.tensors.items())
        listed.insert(place, ("model.more", TensorRecord(dtype="float32", shape=(2,), digest="0" * 16)))
        more = Checkpoint(path, checkpoint.manifest.model_copy(update={"tensors": dict(listed)}))
        return said(lambda: read_index_divided(more, dist.group.WORLD, CPU))

    assert (
        pool(3).run(case)
        == [f"{path}: tensor 'model.more': 0 of its 2 elements in 0 boxes; some are missing or twice"] * 3
    )


def test_one_process_reads_all(tmp_path: Path) -> None:
    checkpoint, seen = save_alone(tmp_path), list[int]()
    assert read_index_divided(checkpoint, None, CPU) == read_index(checkpoint.path, checkpoint.manifest)
    verify_files_divided(checkpoint, None, CPU, lambda: seen.append(1))
    assert len(seen) == len(checkpoint.manifest.files["rank-00000.safetensors"].chunks)
    flip(files(checkpoint.path)[0], -1)
    assert "rank-00000.safetensors: bytes" in said(lambda: verify_files_divided(checkpoint, None, CPU))
