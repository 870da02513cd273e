"""Two checkpoints beside each other: what is missing, extra, reshaped, retyped, altered, tied otherwise."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from allranks.checkpointing import comparing
from allranks.checkpointing.checkpoint import Checkpoint
from allranks.checkpointing.comparing import TensorDifference, compare
from tests.checkpointing.worlds import counted_reads, parts, save_alone, save_together, whole_tensors
from tests.distributed.pool import Pools


def saved(directory: Path, changes: dict[str, torch.Tensor | None] | None = None, **options: Any) -> Checkpoint:
    """One whose tensors are changed, added (a new name) or left out (None)."""
    tensors = whole_tensors() | (changes or {})
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    return save_alone(directory, pairs=parts(kept, 0, 1), **options)


def only(first: Checkpoint, second: Checkpoint) -> TensorDifference:
    found = compare(first, second)
    assert (len(found.tensors), found.num_equal, found.equal) == (1, 6, False)
    return found.tensors[0]


@pytest.fixture
def first(tmp_path: Path) -> Checkpoint:
    return saved(tmp_path / "first")


def test_equal_ones_are_equal_without_reading_a_value(
    first: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = saved(tmp_path / "second")
    monkeypatch.setattr(comparing, "read_whole", lambda *_, **how: pytest.fail("read"))
    with counted_reads() as (opened, _):
        found = compare(first, second)
    assert not opened
    assert (found.equal, found.num_equal, found.tensors) == (True, 7, ())


def test_headers_are_read_once_however_many_tensors_differ(first: Checkpoint, tmp_path: Path) -> None:
    names = ("model.embedding.weight", "model.layers.0.weight", "model.norm.weight", "model.scale")
    second = saved(tmp_path / "second", {name: whole_tensors()[name] + 1 for name in names})
    with counted_reads() as (opened, read):
        found = compare(first, second)
    assert [one.name for one in found.tensors] == list(names)
    for checkpoint in (first, second):
        file = checkpoint.path / "rank-00000.safetensors"
        assert opened.count(file) == 1 + len(names), "for the headers, and for each tensor's values"
        assert read.count((file, 0)) == 1, "the header"


def test_one_element_is_found_with_its_place_and_sizes(first: Checkpoint, tmp_path: Path) -> None:
    changed = whole_tensors()["model.embedding.weight"].clone()
    changed[4, 2] += 0.5
    largest = float(whole_tensors()["model.embedding.weight"].abs().max())
    found = only(first, saved(tmp_path / "second", {"model.embedding.weight": changed}))
    assert (found.what, found.elements, found.index) == ("altered", 1, (4, 2))
    assert found.absolute == pytest.approx(0.5, rel=1e-5)
    assert found.relative == pytest.approx(0.5 / largest, rel=1e-5)


def test_other_types_shapes_and_names(first: Checkpoint, tmp_path: Path) -> None:
    values = whole_tensors()
    retyped = only(first, saved(tmp_path / "a", {"model.scale": values["model.scale"].float()}))
    assert (retyped.what, retyped.first, retyped.second) == ("retyped", "float64 scalar", "float32 scalar")
    assert (retyped.elements, retyped.absolute) == (0, 0.0)
    reshaped = only(first, saved(tmp_path / "b", {"model.norm.weight": values["model.norm.weight"].reshape(7, 1)}))
    assert (reshaped.what, reshaped.second, reshaped.elements) == ("reshaped", "int64 7x1", 0)
    missing = only(first, saved(tmp_path / "c", {"model.nothing": None}))
    assert (missing.what, missing.second) == ("missing", "")
    extra = compare(first, saved(tmp_path / "d", {"model.more": torch.ones(2)})).tensors
    assert [(one.name, one.what) for one in extra] == [("model.more", "extra")]


LARGE = 2**60  # float64 has every 256th number there


@pytest.mark.parametrize(
    ("dtype", "before", "after", "absolute"),
    [
        (torch.int64, [LARGE, 5], [LARGE + 1, 5], 1.0),
        (torch.int64, [-(2**63), 0], [2**63 - 1, 0], 2.0**64),
        (torch.int64, [-1, 0], [0, 0], 1.0),
        (torch.int64, [2**32, 0], [2**32 - 1, 0], 1.0),
        (torch.uint64, [2**64 - 1, 7], [2**64 - 2, 7], 1.0),
        (torch.bool, [True, False], [False, False], 1.0),
    ],
)
def test_whole_numbers_that_float64_takes_for_the_same_are_not(
    dtype: torch.dtype, before: list[int], after: list[int], absolute: float, tmp_path: Path
) -> None:
    first, second = (
        saved(tmp_path / name, {"model.count": torch.tensor(values, dtype=dtype)})
        for name, values in (("a", before), ("b", after))
    )
    (found,) = compare(first, second).tensors
    assert (found.what, found.elements, found.absolute, found.index) == ("altered", 1, absolute, (0,))


def test_whole_numbers_of_other_types_are_the_same_only_where_they_are(tmp_path: Path) -> None:
    def count(name: str, values: list[int], dtype: torch.dtype) -> Checkpoint:
        return saved(tmp_path / name, {"model.count": torch.tensor(values, dtype=dtype)})

    signed = count("signed", [LARGE + 1, -1], torch.int64)
    for name, values, elements in (("a", [LARGE + 1, 2**64 - 1], 1), ("b", [LARGE, 2**64 - 1], 2)):
        (found,) = compare(signed, count(name, values, torch.uint64)).tensors
        assert (found.what, found.elements, found.index) == ("retyped", elements, (1,))
    (found,) = compare(count("large", [3, -1], torch.int64), count("small", [3, -1], torch.int8)).tensors
    assert (found.what, found.elements) == ("retyped", 0)


@pytest.mark.distributed
def test_a_save_by_two_ranks_differs_from_one_by_one_rank_in_what_was_changed_alone(
    pool: Pools, first: Checkpoint, tmp_path: Path
) -> None:
    def changed() -> dict[str, torch.Tensor]:
        tensors = whole_tensors()
        tensors["model.embedding.weight"][12, 6] += 0.5
        return tensors

    def case() -> tuple[Path, Path]:
        rank = dist.get_rank()
        same = save_together(tmp_path / "same").path
        return same, save_together(tmp_path / "changed", pairs=parts(changed(), rank, 2)).path

    same, other = (Checkpoint.open(path) for path in pool(2).run(case)[0])
    assert len(list(same.path.glob("*.safetensors"))) == 2
    found = compare(first, same)
    assert (found.equal, found.num_equal, found.tensors, found.state) == (True, 7, (), {})
    difference = only(first, other)
    assert (difference.name, difference.elements, difference.index) == ("model.embedding.weight", 1, (12, 6))
    assert difference.absolute == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize(("value", "elements"), [(float("nan"), 1), (float("inf"), 1)])
def test_what_is_not_finite_differs_from_a_number_by_inf(
    first: Checkpoint, tmp_path: Path, value: float, elements: int
) -> None:
    changed = whole_tensors()["model.embedding.weight"].clone()
    changed[0, 0] = value
    second = saved(tmp_path / "second", {"model.embedding.weight": changed})
    found = only(first, second)
    assert (found.elements, found.absolute, found.index) == (elements, float("inf"), (0, 0))
    row = compare(first, second).to_json()["tensors"][0]
    assert row["absolute"] == "inf"
    assert compare(second, second).equal


def test_ties_and_state(first: Checkpoint, tmp_path: Path) -> None:
    state = {"position": 1600, "best": 0.2, "inner": {"list": [1, 2]}}
    found = compare(first, saved(tmp_path / "second", aliases={}, state=state))
    assert found.aliases == {"model.head.weight": ("model.embedding.weight", None)}
    assert found.state == {
        "best": (0.1, 0.2),
        "worst.__float__": ("-inf", None),
        "inner.list[0]": (None, 1),
        "inner.list[1]": (None, 2),
    }
    assert not found.equal and not found.tensors
