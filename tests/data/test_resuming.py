"""What a position stands on: another length is refused; shards that are dealt anew are said."""

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch.utils.data

from allranks.data.cut import Cut
from allranks.data.resuming import circumstances, compare_circumstances
from allranks.data.stream import DataStream
from allranks.errors import CheckpointError
from allranks.left_out import LeftOut


class Part(torch.utils.data.IterableDataset[int]):
    """The `rank`-th of `num_ranks` equal parts of 0..119, which lie one after another."""

    order = "sharded"

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.size = 120 // num_ranks
        self.first = rank * self.size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.first + self.size))


class Endless(torch.utils.data.IterableDataset[int]):
    """A length that nobody knows."""

    order = "global"

    def __iter__(self) -> Iterator[int]:
        return iter(range(100))


def shards(global_batch: int, num_ranks: int, position: int = 0) -> list[DataStream]:
    """Every rank's stream, at a position."""
    cut = Cut(global_batch, num_ranks)
    streams = [DataStream(Part(rank, num_ranks), cut=cut, dp_rank=rank, epochs=1) for rank in range(num_ranks)]
    for stream in streams:
        stream.load_state_dict({"position": position})
    return streams


def read(streams: list[DataStream], num_steps: int) -> Counter[int]:
    """How often each sample is read in so many steps of all ranks."""
    found = Counter[int]()
    for stream in streams:
        for plan, items in islice(stream.read(draws=False), num_steps):
            for micro, chosen in zip(plan.micro_plans, items, strict=True):
                found.update(chosen if micro.weight else ())
    return found


def test_another_length_is_refused_with_both_numbers_and_the_next_move() -> None:
    kept = circumstances(DataStream(range(20), cut=Cut(4)))
    with pytest.raises(CheckpointError) as caught:
        compare_circumstances(kept, 8, DataStream(range(21), cut=Cut(4)))
    line = str(caught.value)
    assert "range has 21 samples, but had 20" in line and "\n" not in line
    assert "bring the old data back, or start a new run" in line and "allranks.load" in line


@pytest.mark.parametrize("before", [True, False])
def test_the_other_order_is_refused(before: bool) -> None:
    kept = circumstances(DataStream(range(20), cut=Cut(4), shuffle=before))
    with pytest.raises(CheckpointError) as caught:
        compare_circumstances(kept, 8, DataStream(range(20), cut=Cut(4), shuffle=not before))
    line = str(caught.value)
    assert line.startswith(f"shuffle={not before}, but the checkpoint was written with shuffle={before}")
    assert f"give world.stream(shuffle={before}), or start a new run" in line and "\n" not in line


def test_what_has_an_order_of_its_own_is_never_shuffled() -> None:
    kept = circumstances(DataStream(Endless(), cut=Cut(4), shuffle=True))
    assert compare_circumstances(kept, 8, DataStream(Endless(), cut=Cut(4), shuffle=False)) == ()


@pytest.mark.parametrize("kept", [{}, {"num_samples": None}, {"num_samples": 20, "num_ranks": 3, "global_batch": 5}])
def test_the_same_length_or_an_unknown_one_goes_on(kept: dict[str, Any]) -> None:
    """In a fixed order the ranks and the batch may change."""
    assert compare_circumstances(kept, 8, DataStream(range(20), cut=Cut(4, 2))) == ()
    assert compare_circumstances(kept, 8, DataStream(Endless(), cut=Cut(4, 2))) == ()


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ((12, 2), (12, 2), ""),
        ((12, 2), (12, 3), "2 data-parallel ranks have read so far, and 3 go on"),
        ((12, 3), (12, 2), "3 data-parallel ranks have read so far, and 2 go on"),
        ((12, 2), (6, 2), ""),
        ((10, 3), (6, 3), "train.global_batch was 10, and is 6"),
        ((6, 2), (8, 2), "train.global_batch was 6, and is 8"),
        ((9, 2), (6, 2), "train.global_batch was 9, and is 6"),
        ((12, 2), (3, 2), "train.global_batch was 12, and is 3"),
    ],
)
def test_what_is_said_of_shards_is_what_happens(before: tuple[int, int], after: tuple[int, int], said: str) -> None:
    """Nothing is said exactly where every sample is read once."""
    one = shards(*before)
    kept, position = circumstances(one[0]), 2 * before[0]
    other = shards(*after, position)
    seen = read(one, 2) + read(other, 20)
    decisions = compare_circumstances(kept, position, other[0])
    assert (set(seen) == set(range(120)) and set(seen.values()) == {1}) == (not decisions)
    assert [decision.because.split(":")[0] for decision in decisions] == ([said] if said else [])
    assert all(decision.what == "some samples may be read twice, and others never" for decision in decisions)


def test_nothing_was_read_or_nobody_knows_by_whom() -> None:
    kept, now = circumstances(shards(12, 2)[0]), shards(12, 3)[0]
    assert compare_circumstances(kept, 0, now) == ()
    assert compare_circumstances({}, 24, now) == ()


def test_what_was_fed_cannot_be_left_out_afterwards() -> None:
    def stream(*ranges: tuple[int, int]) -> DataStream:
        found = DataStream(range(40), cut=Cut(4), left_out=LeftOut(ranges))
        found.load_state_dict({"position": 16})
        return found

    fed, left = circumstances(stream()), circumstances(stream((4, 8)))
    assert compare_circumstances(fed, 16, stream((16, 24))) == () == compare_circumstances(left, 16, stream((4, 8)))
    assert compare_circumstances({}, 16, stream()) == (), "an older checkpoint does not say"
    with pytest.raises(CheckpointError, match=r"data.skip=4:8: before position 16.*, 0 samples were left out"):
        compare_circumstances(fed, 16, stream((4, 8)))
    with pytest.raises(CheckpointError, match=r"data.skip=: before position 16.*, 4 samples were left out"):
        compare_circumstances(left, 16, stream())
