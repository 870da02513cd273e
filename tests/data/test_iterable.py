import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch.utils.data

from allranks.data.cut import Cut
from allranks.data.iterable import Pass
from allranks.data.micro_step import StepPlan
from allranks.data.stream import DataStream
from allranks.errors import DataError
from allranks.left_out import LeftOut

Read = list[tuple[StepPlan, list[list[Any]]]]


class Numbers(torch.utils.data.IterableDataset[int]):
    """0..n-1, in an order of its own; notes the epochs it is told."""

    def __init__(self, n: int, order: str) -> None:
        self.n, self.order = n, order
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.n))


class Measured(Numbers):
    """The same, with a length; it remembers how often it was read."""

    def __init__(self, n: int, order: str, length: int | None = None) -> None:
        super().__init__(n, order)
        self.length, self.reads = length or n, 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        for number in range(self.n):
            self.reads += 1
            yield number


class Shuffled(Numbers):
    """Draws from python's generator, both where it begins and for each item."""

    def __iter__(self) -> Iterator[tuple[int, float]]:  # type: ignore[override]
        order = list(range(self.n))
        random.shuffle(order)
        return ((number, random.random()) for number in order)


class Shard(torch.utils.data.IterableDataset[int]):
    """One rank's own part."""

    order = "sharded"

    def __init__(self, items: list[int]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[int]:
        return iter(self.items)


def read(dataset: Any, cut: Cut, rank: int, position: int = 0, draws: bool = False, **options: Any) -> Iterator[Any]:
    """A rank's plans and items from a position on."""
    stream = DataStream(dataset, cut=cut, dp_rank=rank, **options)
    stream.load_state_dict({"position": position})
    return stream.read(draws)


def fed(steps: Read) -> list[tuple[int, int, Any]]:
    """(position, sample, item) of everything that counts, after a look at every micro-step's form."""
    found = []
    for plan, items in steps:
        for micro, loaded in zip(plan.micro_plans, items, strict=True):
            assert loaded, "nothing to run"
            assert micro.weight == (1 if len(micro.positions) else 0)
            assert len(loaded) == max(1, len(micro.positions)) and len(micro.samples) == len(micro.positions)
            if micro.weight:
                found += list(zip(micro.positions.tolist(), micro.samples.tolist(), loaded, strict=True))
    return found


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_global_order_feeds_every_sample_once_in_its_own_order(num_ranks: int) -> None:
    cut = Cut(4, num_ranks, micro_batch=1)
    ranks = [list(read(Numbers(10, "global"), cut, rank, epochs=2)) for rank in range(num_ranks)]
    pairs = sorted(triple for steps in ranks for triple in fed(steps))
    assert pairs == [(position, position % 10, position % 10) for position in range(20)]
    assert [plan.size for plan, _ in ranks[0]] == [4] * 5
    assert len({tuple(len(plan.micro_plans) for plan, _ in steps) for steps in ranks}) == 1


def test_global_order_ends_with_a_short_batch_and_fillers() -> None:
    ranks = [list(read(Numbers(9, "global"), Cut(4, 3), rank, epochs=1)) for rank in range(3)]
    assert [plan.size for plan, _ in ranks[0]] == [4, 4, 1]
    assert sorted(fed([steps[-1] for steps in ranks])) == [(8, 8, 8)]
    for steps in ranks[1:]:
        plan, items = steps[-1]
        assert (plan.micro_plans[0].weight, items) == (0, [[8]])


@pytest.mark.parametrize("taken", [0, 4, 12, 16])
@pytest.mark.parametrize("kind", [Numbers, Measured])
def test_global_order_resumes_by_skipping(kind: type[Numbers], taken: int) -> None:
    whole = fed(list(read(kind(9, "global"), Cut(4), 0, epochs=2)))
    rest = list(read(kind(9, "global"), Cut(4), 0, position=taken, epochs=2))
    assert fed(rest) == whole[taken:]
    assert rest[0][0].step == taken // 4


def test_a_length_saves_reading_whole_epochs() -> None:
    dataset = Measured(9, "global")
    next(read(dataset, Cut(4), 0, position=9 * 7 + 5))
    assert (dataset.reads, dataset.epochs) == (5 + 4, [7])


def test_a_wrong_length_is_refused_with_both_numbers() -> None:
    with pytest.raises(DataError, match=r"len\(Measured\) is 10, but epoch 0 has 9 samples"):
        list(read(Measured(9, "global", length=10), Cut(4), 0, epochs=1))


def test_a_length_gives_the_number_of_steps() -> None:
    assert DataStream(Measured(9, "global"), cut=Cut(4), epochs=2).steps_total == 5
    assert DataStream(Numbers(9, "global"), cut=Cut(4), epochs=2).steps_total is None
    with pytest.raises(DataError, match="fewer than train"):
        DataStream(Measured(3, "global"), cut=Cut(4))


def test_random_datasets_give_every_rank_and_a_resumed_run_the_same() -> None:
    cut = Cut(6, 2)
    whole = sorted(fed(list(read(Shuffled(10, "global"), Cut(6), 0, draws=True, epochs=2))))
    random.seed(1)
    ranks = [fed(list(read(Shuffled(10, "global"), cut, rank, draws=True, epochs=2))) for rank in range(2)]
    assert sorted(ranks[0] + ranks[1]) == whole
    assert fed(list(read(Shuffled(10, "global"), Cut(6), 0, position=12, draws=True, epochs=2))) == whole[12:]
    assert [item[0] for _, _, item in whole[:10]] != [item[0] for _, _, item in whole[10:]]


class Files(torch.utils.data.IterableDataset[int]):
    """Shuffles what all ranks have in common, and takes every second of it: in `__iter__`, or in its generator."""

    order = "sharded"

    def __init__(self, rank: int, lazily: bool) -> None:
        self.rank, self.lazily = rank, lazily

    def __iter__(self) -> Iterator[int]:
        return self._shuffled() if self.lazily else iter(list(self._shuffled()))

    def _shuffled(self) -> Iterator[int]:
        files = list(range(16))
        random.shuffle(files)
        yield from files[self.rank :: 2]


@pytest.mark.parametrize("lazily", [False, True])
def test_what_a_sharded_dataset_shuffles_at_its_beginning_is_alike_on_all_ranks(lazily: bool) -> None:
    halves = []
    for rank in range(2):
        random.seed(rank)
        steps: Read = list(islice(read(Files(rank, lazily), Cut(4, 2), rank, draws=True, epochs=2), 8))
        halves.append([item for _, _, item in fed(steps)])
    epochs = [halves[0][:8] + halves[1][:8], halves[0][8:] + halves[1][8:]]
    assert [sorted(epoch) for epoch in epochs] == [[*range(16)]] * 2
    assert epochs[0] != epochs[1]


def test_without_draws_no_generator_is_touched() -> None:
    random.seed(5)
    expected = random.random()
    random.seed(5)
    list(read(Numbers(9, "global"), Cut(4), 0, epochs=1))
    assert random.random() == expected


def test_steps_end_the_reading_without_a_sample_too_many() -> None:
    dataset = Measured(100, "global")
    assert len(list(read(dataset, Cut(4), 0, steps=3))) == 3
    assert dataset.reads == 12
    assert list(read(dataset, Cut(4), 0, position=12, steps=3)) == []


def test_epochs_are_told_to_the_dataset() -> None:
    dataset = Numbers(4, "global")
    list(read(dataset, Cut(4), 0, epochs=3))
    assert dataset.epochs == [0, 1, 2]


@pytest.mark.parametrize("order", ["global", "sharded"])
def test_an_iterable_without_samples_is_refused(order: str) -> None:
    with pytest.raises(DataError, match="Numbers yields no sample in epoch 0"):
        list(islice(read(Numbers(0, order), Cut(4), 0), 1))


def test_an_iterable_that_can_be_used_once_is_refused_in_its_second_epoch() -> None:
    class Once(Numbers):
        left = iter(range(6))

        def __iter__(self) -> Iterator[int]:
            return self.left

    dataset = Once(6, "global")
    with pytest.raises(DataError, match=r"no sample in epoch 1.*can be iterated over only once"):
        list(read(dataset, Cut(4), 0, epochs=2))


def test_sharded_ranks_take_their_share_and_then_run_fillers() -> None:
    shards = [[10, 11, 12, 13, 14], [20, 21, 22]]
    ranks = [list(islice(read(Shard(shard), Cut(4, 2, 1), rank, epochs=1), 4)) for rank, shard in enumerate(shards)]
    for shard, steps in zip(shards, ranks, strict=True):
        assert [item for _, _, item in fed(steps)] == shard
        assert [len(plan.micro_plans) for plan, _ in steps] == [2] * 4
    assert [plan.exhausted for plan, _ in ranks[0]] == [False, False, True, True]
    assert [plan.exhausted for plan, _ in ranks[1]] == [False, True, True, True]
    assert [[micro.weight for micro in plan.micro_plans] for plan, _ in ranks[1]] == [[1, 1], [1, 0], [0, 0], [0, 0]]
    assert ranks[1][1][1] == [[22], [22]] and ranks[1][3][1] == [[22], [22]]
    positions = [position for steps in ranks for position, _, _ in fed(steps)]
    samples = [sample for steps in ranks for _, sample, _ in fed(steps)]
    assert len(set(positions)) == len(positions) and len(set(samples)) == len(samples)
    assert [plan.position for plan, _ in ranks[0]] == [0, 4, 8, 12]


@pytest.mark.parametrize("taken", [1, 2, 3, 5])
def test_sharded_resumes_by_skipping_its_own(taken: int) -> None:
    whole: Read = list(islice(read(Shard(list(range(7))), Cut(5, 2), 0, epochs=2), 8))
    rest: Read = list(islice(read(Shard(list(range(7))), Cut(5, 2), 0, position=5 * taken, epochs=2), 8 - taken))
    assert fed(rest) == fed(whole[taken:])
    assert [plan.exhausted for plan, _ in rest] == [plan.exhausted for plan, _ in whole[taken:]]
    assert [plan.step for plan, _ in rest] == list(range(taken, 8))


def test_sharded_resumed_after_its_end_runs_fillers() -> None:
    plan, items = next(read(Shard([7, 8]), Cut(4, 2), 1, position=40, epochs=1))
    assert (plan.exhausted, plan.micro_plans[0].weight, items) == (True, 0, [[7]])


def test_sharded_without_end_begins_again() -> None:
    steps: Read = list(islice(read(Shard([7, 8, 9]), Cut(4, 2), 0), 3))
    assert [item for _, _, item in fed(steps)] == [7, 8, 9, 7, 8, 9]
    assert not any(plan.exhausted for plan, _ in steps)


def test_an_error_says_where() -> None:
    class Broken(Numbers):
        def __iter__(self) -> Iterator[int]:
            yield from range(3)
            raise ValueError("bad line")

    with pytest.raises(ValueError, match="bad line") as caught:
        list(read(Broken(9, "global"), Cut(2), 0))
    assert caught.value.__notes__ == ["allranks: while reading sample 3 of epoch 0 (position 3) of Broken"]


def test_a_pass_over_numbers_counts_them() -> None:
    source = Pass(Numbers(3, "global"), 2, None)
    assert [source.draw(position) for position in range(6)] == [0, 1, 2, 0, 1, 2]
    assert (source.epoch, source.number) == (1, 2)


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("position", [0, 4, 8])
def test_global_order_reads_over_what_is_left_out(num_ranks: int, position: int) -> None:
    left_out = LeftOut(((8, 14), (18, 19)))
    ranks = [
        list(read(Numbers(10, "global"), Cut(4, num_ranks), rank, position, epochs=3, left_out=left_out))
        for rank in range(num_ranks)
    ]
    kept = [p for p in range(position, 30) if p not in (8, 9, 10, 11, 12, 13, 18)]
    assert sorted(triple for steps in ranks for triple in fed(steps)) == [(p, p % 10, p % 10) for p in kept]
    assert [(plan.position, plan.left_out) for plan, _ in ranks[0]][-3:] == [(19, 7), (23, 7), (27, 7)]


def test_a_length_that_a_dataset_cannot_say_is_unknown() -> None:
    """torch's ChainDataset has a `__len__` that needs those of its parts."""
    chain = torch.utils.data.ChainDataset([Numbers(5, "global"), Numbers(4, "global")])
    chain.order = "global"  # type: ignore[attr-defined]
    stream = DataStream(chain, cut=Cut(4), epochs=1)
    assert stream.num_samples is None
    assert [item for _, micro_steps in stream.read(False) for items in micro_steps for item in items] == [
        *range(5), *range(4)
    ]  # fmt: skip
    measured = torch.utils.data.ChainDataset([Measured(5, "global"), Measured(4, "global")])
    measured.order = "global"  # type: ignore[attr-defined]
    assert DataStream(measured, cut=Cut(4), epochs=1).num_samples == 9
