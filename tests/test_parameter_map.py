"""Boxes, who writes what, and which tensors a checkpoint stores."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from allranks.parameter_map import Box, Entry, ParameterMap, one_of_each

EXTENTS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=2, max_size=2)


def box(offsets_and_shape: list[tuple[int, int]]) -> Box:
    return Box(tuple(o for o, _ in offsets_and_shape), tuple(n for _, n in offsets_and_shape))


def cells(part: Box | None) -> set[tuple[int, int]]:
    if part is None:
        return set()
    (row, column), (height, width) = part.offset, part.shape
    return {(i, j) for i in range(row, row + height) for j in range(column, column + width)}


@given(EXTENTS, EXTENTS)
def test_intersection_is_the_set_of_common_cells(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> None:
    a, b = box(first), box(second)
    common = a.intersect(b)
    assert cells(common) == cells(a) & cells(b)
    assert common is None or common.num_elements == len(cells(common)) > 0


def test_a_scalar_has_one_element_and_meets_itself() -> None:
    scalar = Box.whole(())
    assert scalar.num_elements == 1
    assert scalar.intersect(scalar) == scalar


def entry(name: str, **changes: object) -> Entry:
    values: dict[str, object] = {"shape": (4, 2), "dtype": "float32", "box": Box.whole((4, 2)), "holders": (0, 1, 2, 3)}
    return Entry(name, **{**values, **changes})  # type: ignore[arg-type]


def test_writers_are_holders_and_are_spread_over_them() -> None:
    writers = Counter(entry(f"layers.{n}.weight", holders=(3, 5, 6)).writer for n in range(300))
    assert set(writers) == {3, 5, 6}
    assert min(writers.values()) > 60


def test_the_writer_does_not_depend_on_the_process() -> None:
    """`hash` of a string differs between processes; the writer is agreed without communication, so it must not."""
    assert [entry(name).writer for name in ("embedding.weight", "layers.0.weight", "head.bias")] == [2, 1, 2]


def test_sharded_says_whether_a_rank_holds_less_than_the_whole() -> None:
    assert entry("w", box=Box((2, 0), (2, 2))).sharded
    assert not entry("w").sharded


def test_a_map_stores_each_tied_tensor_once_and_nothing_that_is_not_persistent() -> None:
    entries = [entry("embedding"), entry("mask", kind="buffer", persistent=False), entry("head", alias_of="embedding")]
    tensors = ParameterMap({part.name: part for part in entries})
    assert list(tensors) == ["embedding", "mask", "head"]
    assert tensors.aliases == {"head": "embedding"}
    assert list(tensors.stored) == ["embedding"]
    assert tensors["mask"].kind == "buffer"
    assert repr(tensors) == "<ParameterMap 3 tensors, 1 aliases>"


def test_what_each_keeps_is_a_row() -> None:
    entry = Entry("w", (4, 3), "float32", Box((2, 0), (2, 3)), (0, 1))
    own = one_of_each(entry, 1, 5, (1,))
    assert (own.name, own.shape, own.box, own.holders) == ("w@each", (5, 4, 3), Box((1, 2, 0), (1, 2, 3)), (1,))


@given(st.integers(1, 3), st.integers(1, 4), st.integers(0, 12), st.integers(0, 12))
def test_a_packed_box_is_some_rows_of_each_matrix(packed: int, rows: int, start: int, extent: int) -> None:
    """However it is cut: its pieces hold what it indexes, each where it lies, and nothing twice."""
    whole = [[10 * row + column for column in range(2)] for row in range(packed * rows)]
    start = min(start, packed * rows)
    part = Box((start, 0), (min(extent, packed * rows - start), 2), packed)
    index, columns = part.place((packed * rows, 2))
    assert columns == slice(0, 2)
    # Row r of matrix m counts as row packed * r + m.
    counted = [whole[m * rows + r] for r in range(rows) for m in range(packed)][start : start + part.shape[0]]
    held = [whole[row] for row in index] if isinstance(index, list) else whole[index]
    assert held == counted
    pieces = part.pieces((packed * rows, 2))
    assert pieces and all(piece.packed == 1 for piece, _ in pieces)
    found = [counted[rows_at] for _, (rows_at, _) in pieces]
    assert found == [whole[piece.offset[0] : piece.offset[0] + piece.shape[0]] for piece, _ in pieces]
    assert sorted(row for rows_of_one in found for row in rows_of_one) == sorted(counted)


def test_one_of_each_keeps_what_is_packed() -> None:
    shared = entry("w", shape=(6, 3), box=Box((3, 0), (3, 3), packed=3))
    own = one_of_each(shared, 1, 5, (1,))
    assert own.box.place(own.shape) == (slice(1, 2), [1, 3, 5], slice(0, 3))
    assert [piece.offset for piece, _ in own.box.pieces(own.shape)] == [(1, 1, 0), (1, 3, 0), (1, 5, 0)]
