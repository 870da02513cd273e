"""Headers that tell the truth are indexed; any other is refused in one line, before anything is allocated."""

import hashlib
import itertools
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from allranks.checkpointing.index import check_cover, read_index
from allranks.checkpointing.manifest import FileRecord, Manifest, TensorRecord
from allranks.checkpointing.tensor_file import LENGTH
from allranks.errors import CheckpointError
from allranks.parameter_map import Box

Members = dict[str, Any]


def header(*boxes: tuple[str, list[int], list[int], list[int]]) -> tuple[Members, Members]:
    """A file's header and its parts: of each its key, offset, extent and whole shape, in float32."""
    slots: Members = {}
    parts: Members = {}
    end = 0
    for key, offset, extent, shape in boxes:
        size = 4
        for n in extent:
            size *= n
        slots[key] = {"dtype": "F32", "shape": extent, "data_offsets": [end, end + size]}
        parts[key] = {"offset": offset, "shape": shape}
        end += size
    return slots, parts


def write(directory: Path, name: str, slots: Members, parts: Any, data: int | None = None) -> FileRecord:
    """Write a file with that header, and record it truthfully."""
    text = json.dumps({"__metadata__": {"parts": parts if isinstance(parts, str) else json.dumps(parts)}} | slots)
    end = max((slot["data_offsets"][1] for slot in slots.values()), default=0) if data is None else data
    content = LENGTH.pack(len(text)) + text.encode() + b"\0" * end
    (directory / name).write_bytes(content)
    return FileRecord(bytes=len(content), chunks=((0, len(content), hashlib.sha256(content).hexdigest()),))


def manifest(files: dict[str, FileRecord], **shapes: tuple[int, ...]) -> Manifest:
    tensors = {name: TensorRecord(dtype="float32", shape=shape, digest="0" * 16) for name, shape in shapes.items()}
    return Manifest(
        run="r",
        generation=1,
        layout="ddp",
        torch="2",
        step=1,
        samples=1,
        files=files,
        tensors=tensors,
        aliases={},
        state={},
    )


def test_parts_of_two_files_make_a_tensor(tmp_path: Path) -> None:
    first = write(tmp_path, "a.safetensors", *header(("w", [0, 0], [2, 3], [5, 3]), ("v", [0], [4], [4])))
    second = write(tmp_path, "b.safetensors", *header(("w", [2, 0], [3, 3], [5, 3])))
    index = read_index(tmp_path, manifest({"a.safetensors": first, "b.safetensors": second}, w=(5, 3), v=(4,)))
    assert [(part.file, part.box, part.num_bytes) for part in index["w"]] == [
        ("a.safetensors", Box((0, 0), (2, 3)), 24),
        ("b.safetensors", Box((2, 0), (3, 3)), 36),
    ]
    assert index["v"][0].start == index["w"][0].start + 24


def test_several_boxes_of_one_tensor_in_one_file(tmp_path: Path) -> None:
    slots, parts = header(("w", [0], [2], [4]), ("w#1", [2], [2], [4]))
    parts["w#1"]["name"] = "w"
    index = read_index(tmp_path, manifest({"a.safetensors": write(tmp_path, "a.safetensors", slots, parts)}, w=(4,)))
    assert [part.box.offset for part in index["w"]] == [(0,), (2,)]


def _lies() -> dict[str, Callable[[Members, Members], Any]]:
    huge = 1 << 47
    return {
        "offset outside": lambda s, p: p["w"].update(offset=[1, 0]),
        "offset negative": lambda s, p: p["w"].update(offset=[-1, 0]),
        "offset huge": lambda s, p: p["w"].update(offset=[huge, 0]),
        "offset too long": lambda s, p: p["w"].update(offset=[0, 0, 0]),
        "offset too short": lambda s, p: p["w"].update(offset=[0]),
        "offset a float": lambda s, p: p["w"].update(offset=[0.0, 0]),
        "whole shape differs": lambda s, p: p["w"].update(shape=[2, 6]),
        "extent huge": lambda s, p: s["w"].update(shape=[huge, huge]),
        "extent too long": lambda s, p: s["w"].update(shape=[4, 3, 1]),
        "extent too short": lambda s, p: s["w"].update(shape=[12]),
        "extent transposed": lambda s, p: s["w"].update(shape=[3, 4]),
        "other dtype": lambda s, p: s["w"].update(dtype="I32"),
        "unknown dtype": lambda s, p: s["w"].update(dtype="F1"),
        "bytes too few": lambda s, p: s["w"].update(data_offsets=[0, 44]),
        "bytes backwards": lambda s, p: s["w"].update(data_offsets=[48, 0]),
        "bytes outside": lambda s, p: s["w"].update(data_offsets=[48, 96]),
        "bytes huge": lambda s, p: s["w"].update(data_offsets=[0, 1 << 63]),
        "part not listed": lambda s, p: p.clear(),
        "part too much": lambda s, p: p.update(v=p["w"]),
        "unknown tensor": lambda s, p: p["w"].update(name="v"),
        "unknown member": lambda s, p: p["w"].update(more=1),
        "no slots": lambda s, p: (s.clear(), p.clear()),
    }


@pytest.mark.parametrize("lie", _lies())
def test_a_header_that_lies_is_refused_in_one_line(tmp_path: Path, lie: str) -> None:
    slots, parts = header(("w", [0, 0], [4, 3], [4, 3]))
    _lies()[lie](slots, parts)
    record = write(tmp_path, "a.safetensors", slots, parts, data=48)
    with pytest.raises(CheckpointError) as caught:
        read_index(tmp_path, manifest({"a.safetensors": record}, w=(4, 3)))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ([("w", [0], [2], [4])], "2 of its 4 elements"),
        ([("w", [0], [3], [4]), ("x", [2], [2], [4])], "5 of its 4 elements"),
        ([("w", [0], [2], [4]), ("x", [1], [2], [4])], "two boxes overlap at (1,)"),
        ([("w", [0], [4], [4]), ("x", [0], [4], [4])], "8 of its 4 elements"),
    ],
)
def test_holes_and_overlaps_are_refused(tmp_path: Path, boxes: list[Any], message: str) -> None:
    slots, parts = header(*boxes)
    if "x" in parts:
        parts["x"]["name"] = "w"
    record = write(tmp_path, "a.safetensors", slots, parts)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        read_index(tmp_path, manifest({"a.safetensors": record}, w=(4,)))


def test_gaps_between_tensors_and_bytes_after_them_are_refused(tmp_path: Path) -> None:
    slots, parts = header(("w", [0], [2], [2]), ("v", [0], [2], [2]))
    record = write(tmp_path, "a.safetensors", slots, parts, data=20)
    with pytest.raises(CheckpointError, match="its tensors end at byte"):
        read_index(tmp_path, manifest({"a.safetensors": record}, w=(2,), v=(2,)))
    slots["v"]["data_offsets"] = [12, 20]
    record = write(tmp_path, "a.safetensors", slots, parts)
    with pytest.raises(CheckpointError, match="'v' begins at byte"):
        read_index(tmp_path, manifest({"a.safetensors": record}, w=(2,), v=(2,)))


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 7, LENGTH.pack(1 << 62), LENGTH.pack(20) + b"{}", LENGTH.pack(2) + b"[]"]
)
def test_a_file_without_a_header_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.safetensors").write_bytes(content)
    chunks = ((0, len(content), hashlib.sha256(content).hexdigest()),) if content else ()
    with pytest.raises(CheckpointError, match=r"a\.safetensors"):
        read_index(tmp_path, manifest({"a.safetensors": FileRecord(bytes=len(content), chunks=chunks)}, w=(2,)))


@pytest.mark.parametrize("parts", ["", "[]", "{", '{"w": 1}', '{"w": {}, "w": {}}', "[" * 100_000])
def test_a_list_of_parts_that_is_none_is_refused(tmp_path: Path, parts: str) -> None:
    slots, _ = header(("w", [0], [2], [2]))
    record = write(tmp_path, "a.safetensors", slots, parts)
    with pytest.raises(CheckpointError, match=r"a\.safetensors"):
        read_index(tmp_path, manifest({"a.safetensors": record}, w=(2,)))


def test_a_header_in_many_chunks_is_read(tmp_path: Path) -> None:
    write(tmp_path, "a.safetensors", *header(("w", [0, 0], [4, 3], [4, 3])))
    content = (tmp_path / "a.safetensors").read_bytes()
    pieces = [(i, content[i : i + 3]) for i in range(0, len(content), 3)]
    record = FileRecord(bytes=len(content), chunks=tuple((i, len(p), hashlib.sha256(p).hexdigest()) for i, p in pieces))
    assert read_index(tmp_path, manifest({"a.safetensors": record}, w=(4, 3)))["w"][0].num_bytes == 48


def test_overlaps_are_found_among_many_boxes_in_any_order() -> None:
    draw = random.Random(0)
    grid = [Box((3 * i, 2 * j), (3, 2)) for i in range(12) for j in range(15)]
    draw.shuffle(grid)
    check_cover("w", (36, 30), grid, "here")
    for _ in range(50):
        moved = list(grid)
        at = draw.randrange(len(moved))
        offset = moved[at].offset
        moved[at] = Box((offset[0], (offset[1] + 1) % 28), (3, 2)) if draw.random() < 0.5 else moved[at - 1]
        with pytest.raises(CheckpointError, match="overlap"):
            check_cover("w", (36, 30), moved, "here")


def test_scalars_and_empty_tensors_are_covered() -> None:
    check_cover("w", (), [Box((), ())], "here")
    check_cover("w", (0, 3), [], "here")
    check_cover("w", (0, 3), [Box((0, 0), (0, 3)), Box((0, 0), (0, 3))], "here")
    check_cover("w", (2,), [Box((0,), (2,)), Box((2,), (0,))], "here")
    with pytest.raises(CheckpointError):
        check_cover("w", (), [], "here")
    with pytest.raises(CheckpointError):
        check_cover("w", (), [Box((), ()), Box((), ())], "here")


def test_boxes_between_which_no_plane_goes_are_compared_with_each_other() -> None:
    pinwheel = [Box((0, 0), (1, 2)), Box((0, 2), (2, 1)), Box((2, 1), (1, 2)), Box((1, 0), (2, 1)), Box((1, 1), (1, 1))]
    check_cover("w", (3, 3), pinwheel, "here")
    overlapping = [*pinwheel[:-1], Box((0, 1), (1, 1))]
    with pytest.raises(CheckpointError, match="overlap"):
        check_cover("w", (3, 3), overlapping, "here")


def test_boxes_that_someone_made_to_be_compared_for_ever_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """65,536 boxes that no dim separates into more than two groups; and those that only a long search would."""
    monkeypatch.setattr(Box, "intersect", None)
    corners = [Box(offset, (1,) * 12) for offset in itertools.product((0, 1), repeat=12)]
    check_cover("w", (2,) * 12, corners, "here")
    monkeypatch.setattr("allranks.checkpointing.index._SORTED_CAP", 1000)
    with pytest.raises(CheckpointError, match=r"here: tensor 'w' is cut in a way that takes too long to check"):
        check_cover("w", (2,) * 12, corners, "here")
    pinwheel = [Box((0, 0), (1, 2)), Box((0, 2), (2, 1)), Box((2, 1), (1, 2)), Box((1, 0), (2, 1)), Box((1, 1), (1, 1))]
    monkeypatch.setattr("allranks.checkpointing.index._SORTED_CAP", 20)
    with pytest.raises(CheckpointError, match="takes too long"):
        check_cover("w", (3, 3), pinwheel, "here")
