"""The file that a rank writes: any safetensors reader reads it, and the record is true."""

import errno
import hashlib
import os
from pathlib import Path
from unittest import mock

import pytest
import safetensors
import torch

from allranks.checkpointing import writing
from allranks.checkpointing.tensor_file import Part
from allranks.checkpointing.writing import write_file
from allranks.parameter_map import Box
from tests.checkpointing.worlds import same_bits, whole_tensors

Tensors = list[tuple[Part, torch.Tensor]]


def example() -> Tensors:
    tensors = whole_tensors()
    return [
        (Part(n, str(t.dtype).removeprefix("torch."), Box.whole(tuple(t.shape)), tuple(t.shape)), t)
        for n, t in tensors.items()
    ]


def large(num_bytes: int) -> Tensors:
    tensor = torch.arange(num_bytes // 4, dtype=torch.float32)
    return [(Part("w", "float32", Box.whole(tuple(tensor.shape)), tuple(tensor.shape)), tensor)]


def test_the_writing_can_be_given_up_between_pieces(tmp_path: Path) -> None:
    asked = list[int]()

    def check() -> None:
        asked.append(1)
        if len(asked) == 3:
            raise RuntimeError("not wanted")

    with pytest.raises(RuntimeError, match="not wanted"):
        write_file(tmp_path / "a.safetensors", example(), check)
    assert len(asked) == 3 and list(tmp_path.iterdir()) == [], "its room is free"


def test_the_safetensors_library_reads_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    pair = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex128)
    write_file(path, [*example(), (Part("pair", "complex128", Box((0,), (2,)), (2,)), pair)])
    with safetensors.safe_open(str(path), framework="pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 -- safe_open is no mapping
    assert found.keys() == whole_tensors().keys() | {"pair"}
    assert all(same_bits(found[name], tensor) for name, tensor in whole_tensors().items())
    assert found["pair"].tolist() == [[1, 2], [3, -4]]


@pytest.mark.parametrize("chunk_bytes", [1, 7, 64, 1 << 24])
def test_the_record_covers_every_byte_and_a_chunk_ends_with_the_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    monkeypatch.setattr(writing, "CHUNK_BYTES", chunk_bytes)
    record = write_file(tmp_path / "a.safetensors", example())
    data = (tmp_path / "a.safetensors").read_bytes()
    assert record.bytes == len(data)
    for offset, length, sha256 in record.chunks:
        assert length <= chunk_bytes and hashlib.sha256(data[offset : offset + length]).hexdigest() == sha256
    header_end = 8 + int.from_bytes(data[:8], "little")
    assert header_end in {offset + length for offset, length, _ in record.chunks}
    assert len(record.chunks) == -(-header_end // chunk_bytes) + -(-(len(data) - header_end) // chunk_bytes)


def test_large_pieces_are_hashed_in_order_beside_the_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "CHUNK_BYTES", 1 << 19)
    tensors = [torch.randn(n) for n in (10, 500_000, 3, 200_000)]
    named = [(Part(f"w{i}", "float32", Box((0,), (len(t),)), (len(t),)), t) for i, t in enumerate(tensors)]
    record = write_file(tmp_path / "a.safetensors", named)
    data = (tmp_path / "a.safetensors").read_bytes()
    assert [hashlib.sha256(data[o : o + n]).hexdigest() for o, n, _ in record.chunks] == [
        s for _, _, s in record.chunks
    ]
    assert data.endswith(b"".join(t.numpy().tobytes() for t in tensors))


def test_the_file_is_synced_after_its_last_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: sizes.append(os.fstat(descriptor).st_size))
    record = write_file(tmp_path / "a.safetensors", example())
    assert sizes == [record.bytes]


def test_the_disk_takes_the_file_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "CHUNK_BYTES", 1 << 19)
    monkeypatch.setattr(writing, "_SYNC_BYTES", 1 << 20)
    told, sync = list[int](), os.fdatasync

    def note(descriptor: int) -> None:
        told.append(os.fstat(descriptor).st_size)
        sync(descriptor)

    monkeypatch.setattr(os, "fdatasync", note)
    record = write_file(tmp_path / "a.safetensors", large(4 << 20), meanwhile=lambda: told.append(-1))
    assert 0 < told[0] < record.bytes, "before the last byte is written"
    assert sorted(told[-2:]) == [-1, record.bytes], "and while the rest is under way"


def test_what_the_disk_says_of_earlier_bytes_ends_the_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "_SYNC_BYTES", 1 << 20)
    monkeypatch.setattr(os, "fdatasync", mock.Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    with pytest.raises(OSError, match="Input/output error"):
        write_file(tmp_path / "a.safetensors", large(64))
    with pytest.raises(OSError, match="Input/output error"):
        write_file(tmp_path / "b.safetensors", large(64 << 20))


def test_a_file_that_is_already_there_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_text("x")
    with pytest.raises(FileExistsError):
        write_file(tmp_path / "a.safetensors", example())
    assert (tmp_path / "a.safetensors").read_text() == "x"
