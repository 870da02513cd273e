"""A table of numbers says the same as the index that one process reads."""

import itertools
import random
from pathlib import Path

import pytest

from allranks.checkpointing.index import read_index, read_parts
from allranks.checkpointing.index_table import IndexTable, encode_parts
from allranks.checkpointing.manifest import Manifest
from allranks.checkpointing.tensor_file import Part
from allranks.parameter_map import Box
from tests.checkpointing.test_index import manifest
from tests.checkpointing.worlds import save_alone, save_together
from tests.distributed.pool import Pools

SHAPE = (6, 9, 5)


@pytest.mark.distributed
def test_it_names_the_parts_that_the_files_headers_name(pool: Pools, tmp_path: Path) -> None:
    for checkpoint in (pool(4).run(lambda: save_together(tmp_path))[0], save_alone(tmp_path, 300)):
        index = read_index(checkpoint.path, checkpoint.manifest)
        parts = list(read_parts(checkpoint.path, checkpoint.manifest))
        random.Random(0).shuffle(parts)
        table = IndexTable(checkpoint.manifest, encode_parts(parts, checkpoint.manifest))
        assert dict(table) == index and len(table) == len(index)
        assert table["model.scale"][0].box == Box((), ())


def test_what_comes_of_several_ranks_is_one_table() -> None:
    known, parts = cut()
    rows = b"".join(encode_parts(some, known) for some in (parts[::2], [], parts[1::2]))
    assert len(rows) == 8 * (3 + 2 * 3) * len(parts)
    assert IndexTable(known, rows)["w"] == parts
    assert IndexTable(known, b"")["w"] == []


def test_the_parts_that_meet_a_box_are_found() -> None:
    known, parts = cut()
    table, draw = IndexTable(known, encode_parts(parts, known)), random.Random(1)
    for _ in range(200):
        offset = tuple(draw.randrange(extent) for extent in SHAPE)
        box = Box(offset, tuple(draw.randint(0, extent - at) for extent, at in zip(SHAPE, offset, strict=True)))
        assert table.meeting("w", box) == [part for part in parts if part.box.intersect(box) is not None]
    assert table.meeting("v", Box((), ())) == []
    assert table.meeting("w", Box.whole(SHAPE)) == parts


def cut() -> tuple[Manifest, list[Part]]:
    """A tensor in 12 boxes, with a start each that is no product of the others, and a scalar in none."""
    places = itertools.product((0, 2), (0, 4, 8), (0, 3))
    shapes = itertools.product((2, 4), (4, 4, 1), (3, 2))
    boxes = [Box(offset, shape) for offset, shape in zip(places, shapes, strict=True)]
    known = manifest({}, v=(), w=SHAPE)
    known = known.model_copy(update={"files": dict.fromkeys(("a.safetensors", "b.safetensors"))})
    return known, [
        Part("w", "float32", box, SHAPE, ("a.safetensors", "b.safetensors")[at // 6], 1 + 7 * at)
        for at, box in enumerate(boxes)
    ]
