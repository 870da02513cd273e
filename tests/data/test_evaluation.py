import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch.utils.data
from hypothesis import given, settings
from hypothesis import strategies as st

from allranks.data.evaluation import evaluation_batches
from allranks.data.micro_step import MicroStep
from allranks.errors import ConfigError, DataError


class Numbers(torch.utils.data.IterableDataset[int]):
    """0..n-1; `order` as declared."""

    def __init__(self, n: int, order: str) -> None:
        self.n, self.order = n, order

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.n))


def evaluate(dataset: Any, batch_size: int, num_ranks: int, **options: Any) -> list[list[MicroStep]]:
    """Every rank's forwards."""
    return [
        list(evaluation_batches(dataset, batch_size=batch_size, num_ranks=num_ranks, dp_rank=rank, **options))
        for rank in range(num_ranks)
    ]


@pytest.mark.parametrize("iterable", [False, True])
@given(st.integers(1, 40), st.integers(1, 5), st.integers(0, 6), st.none() | st.integers(1, 3))
@settings(max_examples=40)
def test_every_sample_once_and_as_many_forwards_on_each_rank(
    iterable: bool, n: int, num_ranks: int, more: int, micro_batch: int | None
) -> None:
    dataset = Numbers(n, "global") if iterable else list(range(n))
    ranks = evaluate(dataset, num_ranks + more, num_ranks, micro_batch=micro_batch)
    fed = [item for forwards in ranks for micro in forwards if micro.weight for item in micro.batch.tolist()]
    assert sorted(fed) == list(range(n))
    assert len({len(forwards) for forwards in ranks}) == 1
    for forwards in ranks:
        for micro in forwards:
            assert micro.samples.tolist() == (micro.batch.tolist() if micro.weight else [])
            assert len(micro.batch) <= (micro_batch or num_ranks + more)


def test_the_order_is_the_datasets() -> None:
    (forwards,) = evaluate(list(range(7)), 3, 1)
    assert [micro.batch.tolist() for micro in forwards] == [[0, 1, 2], [3, 4, 5], [6]]


def test_random_items_are_the_same_in_every_evaluation_and_at_every_world_size() -> None:
    class Noisy(list[int]):
        def __getitem__(self, index: Any) -> Any:
            return random.random()

    def values(num_ranks: int, seed: int = 0) -> list[float]:
        ranks = evaluate(Noisy(range(10)), 4, num_ranks, seed=seed)
        return sorted(
            value for forwards in ranks for micro in forwards if micro.weight for value in micro.batch.tolist()
        )

    first = values(1)
    random.seed(4)
    assert first == values(1) == values(3) and first != values(1, seed=1)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_collate_that_draws_is_the_same_in_every_evaluation(workers: int) -> None:
    def mask(samples: list[int]) -> list[float]:
        return [random.random(), *samples]

    def values(workers: int, seed: int = 0) -> list[Any]:
        (forwards,) = evaluate(list(range(10)), 4, 1, draws=False, collate=mask, workers=workers, seed=seed)
        return [micro.batch for micro in forwards]

    first = values(0)
    random.seed(4)
    assert values(workers) == first != values(workers, seed=1)
    assert len({batch[0] for batch in first}) == 3


def test_targets_of_fillers_do_not_count() -> None:
    ranks = evaluate(list(range(5)), 4, 4, count_targets=len)
    assert [sum(micro.targets or 0 for micro in forwards) for forwards in ranks] == [2, 1, 1, 1]


def test_a_dataset_that_shards_itself_is_refused_at_once() -> None:
    with pytest.raises(DataError, match='declares order="sharded", so nobody knows'):
        evaluation_batches(Numbers(5, "sharded"), batch_size=4)


def test_fewer_samples_at_a_time_than_ranks_are_one_a_rank() -> None:
    ranks = evaluate([1, 2, 3, 4], 1, 3)
    assert [[(micro.batch.tolist(), micro.weight) for micro in forwards] for forwards in ranks] == [
        [([1], 1), ([4], 1)],
        [([2], 1), ([4], 0)],
        [([3], 1), ([4], 0)],
    ]


def test_an_empty_dataset_and_an_empty_batch_are_refused_at_once() -> None:
    with pytest.raises(DataError, match="list is empty"):
        evaluation_batches([], batch_size=4)
    with pytest.raises(ConfigError, match="has to be at least 1"):
        evaluation_batches([1, 2, 3], batch_size=0, num_ranks=3)


def test_leaving_early_ends_the_workers() -> None:
    import multiprocessing

    forwards = evaluation_batches(list(range(50)), batch_size=2, workers=1)
    next(forwards)
    assert len(multiprocessing.active_children()) == 1
    forwards.close()  # type: ignore[attr-defined]
    assert multiprocessing.active_children() == []
