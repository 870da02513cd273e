"""A rank's file: its header, and chunks that are checked before anybody sees them."""

import hashlib
import os
from contextlib import closing
from pathlib import Path

import pytest

from allranks.checkpointing.manifest import FileRecord
from allranks.checkpointing.tensor_file import DTYPES, LENGTH, OpenFile, Part, open_regular, render_header
from allranks.errors import CheckpointError
from allranks.parameter_map import Box


def record(data: bytes, length: int) -> FileRecord:
    starts = range(0, len(data), length)
    chunks = tuple((s, len(data[s : s + length]), hashlib.sha256(data[s : s + length]).hexdigest()) for s in starts)
    return FileRecord(bytes=len(data), chunks=chunks)


@pytest.fixture
def data(tmp_path: Path) -> bytes:
    content = bytes(range(256)) * 10
    (tmp_path / "f.safetensors").write_bytes(content)
    return content


def test_chunks_come_in_order_with_their_offsets(tmp_path: Path, data: bytes) -> None:
    for num_threads in (1, 3):
        with closing(OpenFile(tmp_path, "f.safetensors", record(data, 100))) as file:
            found = [(offset, bytes(view)) for offset, view in file.chunks(num_threads=num_threads)]
            assert [offset for offset, _ in found] == list(range(0, 2560, 100))
            assert b"".join(part for _, part in found) == data
            assert [(o, bytes(v)) for o, v in file.chunks([3, 25])] == [(300, data[300:400]), (2500, data[2500:])]
            assert list(file.chunks([])) == []


def test_the_chunks_that_cover_spans(tmp_path: Path, data: bytes) -> None:
    with closing(OpenFile(tmp_path, "f.safetensors", record(data, 100))) as file:
        assert file.covering([(0, 1)]) == [0]
        assert file.covering([(100, 200)]) == [1]
        assert file.covering([(99, 101), (550, 551), (560, 760)]) == [0, 1, 5, 6, 7]
        assert file.covering([(0, 1000), (10, 20), (1500, 1600)]) == [*range(10), 15]
        assert file.covering([(50, 50), (2559, 2560)]) == [25]
        assert file.covering([]) == []


def test_a_changed_byte_is_named_with_its_chunk_before_it_is_seen(tmp_path: Path, data: bytes) -> None:
    good = record(data, 100)
    (tmp_path / "f.safetensors").write_bytes(data[:150] + b"!" + data[151:])
    seen = []
    with closing(OpenFile(tmp_path, "f.safetensors", good)) as file:
        with pytest.raises(CheckpointError, match=r"f\.safetensors: bytes 100 to 200 have SHA-256"):
            seen += [offset for offset, _ in file.chunks()]
        assert [offset for offset, _ in file.chunks([0, 2])] == [0, 200]


def test_a_file_that_shrinks_while_it_is_open_is_refused(tmp_path: Path, data: bytes) -> None:
    with closing(OpenFile(tmp_path, "f.safetensors", record(data, 100))) as file:
        os.truncate(tmp_path / "f.safetensors", 250)
        with pytest.raises(CheckpointError, match="ends at byte 250 of 2560"):
            list(file.chunks())


@pytest.mark.parametrize("kind", ["missing", "short", "long", "link", "pipe", "directory", "dangling"])
def test_what_is_no_ordinary_file_of_that_length_is_refused_without_waiting(
    tmp_path: Path, data: bytes, kind: str
) -> None:
    path, other = tmp_path / "f.safetensors", tmp_path / "other"
    good = record(data, 100)
    path.unlink()
    other.write_bytes(data)
    match kind:
        case "short":
            path.write_bytes(data[:-1])
        case "long":
            path.write_bytes(data + b"x")
        case "link":
            path.symlink_to(other)
        case "dangling":
            path.symlink_to(tmp_path / "nowhere")
        case "pipe":
            os.mkfifo(path)
        case "directory":
            path.mkdir()
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CheckpointError, match=r"f\.safetensors: "):
        OpenFile(tmp_path, "f.safetensors", good)
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_link_is_called_a_link(tmp_path: Path) -> None:
    (tmp_path / "l").symlink_to("x")
    with pytest.raises(CheckpointError, match="l: a symbolic link"):
        open_regular(tmp_path / "l")


def test_the_data_begins_at_a_multiple_of_eight_and_names_stay_apart() -> None:
    for name in ("a", "ab", "abc" * 7, "ü"):
        parts = [Part(name, "float32", Box((i, 0), (1, 2)), (9, 2)) for i in range(3)]
        header = render_header(parts)
        assert len(header) % 8 == 0 and LENGTH.unpack_from(header)[0] == len(header) - 8
        assert header.count(b"data_offsets") == 3


def test_every_dtype_of_the_table_is_torchs_and_has_its_size() -> None:
    import torch

    for name, (_, size, trailing) in DTYPES.items():
        assert getattr(torch, name).itemsize == size
        assert trailing == ((2,) if name == "complex128" else ())
