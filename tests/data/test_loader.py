import multiprocessing
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import default_collate

from allranks.data import worker_process
from allranks.data.cut import Cut
from allranks.data.loader import Loader, came_from_loader
from allranks.data.micro_step import StepBatch
from allranks.data.stream import DataStream
from allranks.errors import ProcessError
from allranks.failure import read_failures
from allranks.recorded import run_recorded
from allranks.task import Task


class Augmented(torch.utils.data.Dataset[torch.Tensor]):
    """(i, a number from python, one from numpy, one from torch)."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, random.random(), np.random.rand(), torch.rand(()).item()], dtype=torch.float64)


class Numbers(torch.utils.data.IterableDataset[int]):
    """0..n-1; `order` as declared."""

    def __init__(self, n: int, order: str) -> None:
        self.n, self.order = n, order

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.n))


def load(dataset: Any, workers: int, cut: Cut, rank: int = 0, **options: Any) -> list[StepBatch]:
    """All the batches of two epochs."""
    loader_options = {key: options.pop(key) for key in ("draws", "count_targets", "collate") if key in options}
    stream = DataStream(dataset, cut=cut, dp_rank=rank, **({"epochs": 2} | options))
    with Loader(stream, workers=workers, **loader_options) as loader:
        return list(loader)


@given(st.integers(1, 23), st.integers(1, 4), st.none() | st.integers(1, 3), st.integers(1, 2))
@settings(max_examples=25)
def test_a_batch_holds_the_samples_that_it_names(
    size: int, num_ranks: int, micro_batch: int | None, epochs: int
) -> None:
    cut = Cut(max(size, num_ranks), num_ranks, micro_batch)
    seen = []
    for rank in range(num_ranks):
        for step in load(list(range(23)), 0, cut, rank, epochs=epochs, draws=False):
            for micro in step.micro_steps:
                if micro.weight:
                    assert micro.batch.tolist() == micro.samples.tolist()
                assert len(micro.batch) == max(1, len(micro.positions))
                seen += micro.positions.tolist()
    assert sorted(seen) == list(range(23 * epochs))


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_load_the_same_in_the_same_order(workers: int) -> None:
    """Random numbers included: they depend on seed, epoch and position, never on who loads."""
    cut = Cut(7, 2, micro_batch=2)
    here, there = load(Augmented(), 0, cut, 1), load(Augmented(), workers, cut, 1)
    assert len(here) == len(there) == 7
    for one, other in zip(here, there, strict=True):
        assert (one.step, one.position, one.size) == (other.step, other.position, other.size)
        for a, b in zip(one.micro_steps, other.micro_steps, strict=True):
            assert torch.equal(a.batch, b.batch)
            assert (a.weight, a.random_key) == (b.weight, b.random_key)
            assert a.positions.tolist() == b.positions.tolist() and a.samples.tolist() == b.samples.tolist()


def test_random_items_are_the_same_at_every_world_size_and_new_in_every_epoch() -> None:
    def items(num_ranks: int) -> dict[int, list[float]]:
        return {
            position: row
            for rank in range(num_ranks)
            for step in load(Augmented(), 0, Cut(6, num_ranks), rank)
            for micro in step.micro_steps
            for position, row in zip(micro.positions.tolist(), micro.batch.tolist(), strict=False)
        }

    one = items(1)
    assert one == items(3)
    by_sample: dict[float, list[list[float]]] = {}
    for row in one.values():
        by_sample.setdefault(row[0], []).append(row)
    for first, second in by_sample.values():
        assert all(a != b for a, b in zip(first[1:], second[1:], strict=True))


def test_a_filler_loads_the_very_item_it_repeats() -> None:
    ranks = [load(Augmented(), 0, Cut(4, 4), rank, epochs=1)[-1].micro_steps[0] for rank in range(4)]
    assert [micro.weight for micro in ranks] == [1, 1, 1, 0]
    assert torch.equal(ranks[3].batch, ranks[0].batch)


def test_targets_are_counted_and_fillers_have_none() -> None:
    def count(batch: torch.Tensor) -> int:
        return 10 * len(batch)

    last = [load(list(range(6)), 0, Cut(4, 4), rank, epochs=1, count_targets=count)[-1] for rank in range(4)]
    assert [step.targets for step in last] == [10, 10, 0, 0]
    assert load(list(range(6)), 0, Cut(4), epochs=1)[0].targets is None


def test_a_dataset_that_draws_nothing_is_not_seeded_and_asked_for_all_items_at_once() -> None:
    class Several(list[int]):
        def __getitems__(self, indices: list[int]) -> list[int]:
            return [100 + index for index in indices]

    random.seed(3)
    expected = random.random()
    random.seed(3)
    steps = load(Several(range(6)), 0, Cut(3), epochs=1, draws=False)
    assert random.random() == expected
    for step in steps:
        assert step.micro_steps[0].batch.tolist() == [100 + sample for sample in step.micro_steps[0].samples.tolist()]


def mask(samples: list[int]) -> torch.Tensor:
    """A collate that draws: the samples, and a number from each generator beside them."""
    drawn = [random.random(), np.random.rand(), torch.rand(()).item()]
    return torch.tensor([*drawn, *samples], dtype=torch.float64)


def masked(dataset: Any, workers: int, rank: int = 0, position: int = 0, draws: bool = False) -> dict[int, list[float]]:
    """Batches by the position of their first sample, whatever the generators of this process stand at."""
    stream = DataStream(dataset, cut=Cut(6, 2, 2), dp_rank=rank, epochs=2)
    stream.load_state_dict({"position": position})
    random.seed(workers + position)
    np.random.seed(workers + position)
    torch.manual_seed(workers + position)
    with Loader(stream, workers=workers, collate=mask, draws=draws) as loader:
        micro_steps = [micro for step in loader for micro in step.micro_steps if micro.weight]
    return {int(micro.positions[0]): micro.batch.tolist() for micro in micro_steps}


KINDS = [range(23), Numbers(23, "global"), Numbers(23, "sharded")]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_collate_that_draws_makes_the_same_batches_in_any_process(workers: int) -> None:
    """Whoever loads them, in whichever order, and also where a run goes on in the middle."""
    for dataset in KINDS[:2]:
        here = masked(dataset, 0)
        assert len(here) > 8 and masked(dataset, workers) == here
        for again in (0, workers):
            assert masked(dataset, again, position=12) == {first: here[first] for first in here if first >= 12}


@pytest.mark.parametrize(("dataset", "draws"), [(range(23), False), (KINDS[1], False), (KINDS[1], True)])
def test_a_collate_draws_other_numbers_for_every_batch_of_every_rank(dataset: Any, draws: bool) -> None:
    batches = [batch for rank in (0, 1) for batch in masked(dataset, 0, rank, draws=draws).values()]
    for place in range(3):
        assert len({batch[place] for batch in batches}) == len(batches) > 16


def test_a_shard_is_collated_under_its_own_seeds_too() -> None:
    def first(rank: int, seed: int) -> list[list[float]]:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        stream = DataStream(KINDS[2], cut=Cut(6, 2, 2), dp_rank=rank)
        with Loader(stream, collate=mask, draws=False) as loader:
            return [micro.batch.tolist() for micro in next(loader).micro_steps]

    assert first(0, 1) == first(0, 2)
    assert all(one[:3] != other[:3] for one in first(0, 1) for other in first(1, 1))


@pytest.mark.parametrize("collate", [default_collate, MethodType(Task.collate, "a Task")])
@pytest.mark.parametrize("dataset", [range(6), Numbers(6, "global")])
def test_torchs_collate_costs_no_seeding(dataset: Any, collate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seeded = list[int]()
    monkeypatch.setattr(worker_process, "seed_all", seeded.append)
    load(dataset, 0, Cut(3), epochs=1, draws=False, collate=collate)
    assert seeded == []
    load(dataset, 0, Cut(3), epochs=1, draws=False, collate=mask)
    assert len(seeded) == 2, "once a micro-step"


@pytest.mark.parametrize("workers", [0, 1])
def test_the_global_torch_generator_is_left_alone(workers: int) -> None:
    torch.manual_seed(7)
    expected = torch.rand(())
    torch.manual_seed(7)
    load(list(range(6)), workers, Cut(3), epochs=1, draws=False)
    assert torch.equal(torch.rand(()), expected)


@pytest.mark.parametrize("workers", [0, 2])
def test_it_runs_ahead_without_moving_the_stream(workers: int) -> None:
    stream = DataStream(list(range(20)), cut=Cut(4), epochs=1)
    with Loader(stream, workers=workers) as loader:
        first, second = next(loader), next(loader)
        assert stream.position == 0
        stream.take(first)
        assert (stream.position, second.position) == (4, 4)


@pytest.mark.parametrize("workers", [0, 2])
def test_it_starts_where_the_stream_stands(workers: int) -> None:
    stream = DataStream(list(range(20)), cut=Cut(4), epochs=2)
    loader = Loader(stream, workers=workers)
    stream.load_state_dict({"position": 24})
    assert [(step.step, step.position) for step in loader] == [(6, 24), (7, 28), (8, 32), (9, 36)]


@pytest.mark.parametrize("workers", [0, 2])
def test_close_ends_everything(workers: int) -> None:
    loader = Loader(DataStream(list(range(20)), cut=Cut(4)), workers=workers)
    next(loader)
    assert len(multiprocessing.active_children()) == workers
    loader.close()
    loader.close()
    assert multiprocessing.active_children() == []
    assert list(loader) == []


def test_the_end_of_the_stream_ends_the_workers() -> None:
    loader = Loader(DataStream(list(range(8)), cut=Cut(4), epochs=1), workers=1)
    assert len(list(loader)) == 2
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_the_users_passes_through_and_says_which_sample(workers: int) -> None:
    class Broken(list[int]):
        def __getitem__(self, index: Any) -> Any:
            if index == 5:
                raise ValueError("unreadable image")
            return index

    with pytest.raises(ValueError, match="unreadable image") as caught:
        load(Broken(range(8)), workers, Cut(2), shuffle=False)
    assert "while loading sample 5 (position 5) of Broken" in told(caught.value)
    assert came_from_loader(caught.value)
    assert multiprocessing.active_children() == []


def test_an_error_of_the_device_is_noted_before_anything_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's watchdog leaves no time after it."""
    noted = []

    def pinned(batch: Any) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    loader = Loader(DataStream(list(range(8)), cut=Cut(4), epochs=1))
    monkeypatch.setattr(loader, "_pinned", pinned)
    monkeypatch.setattr(loader, "_end", lambda: noted.extend(read_failures(tmp_path)))
    assert run_recorded(next, (loader,), rank=0, folder=tmp_path) == 1
    assert [failure.noted for failure in noted] == [True]


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_in_collate_says_where(workers: int) -> None:
    def collate(samples: list[int]) -> list[int]:
        if 5 in samples:
            raise ValueError("sizes differ")
        return samples

    with pytest.raises(ValueError, match="sizes differ") as caught:
        load(list(range(8)), workers, Cut(4), shuffle=False, collate=collate)
    assert "while collating 4 samples (positions 4 to 7)" in told(caught.value)
    assert came_from_loader(caught.value)


def test_an_error_of_who_takes_the_batches_is_not_the_loaders() -> None:
    with pytest.raises(ValueError) as caught:
        for _ in Loader(DataStream(list(range(8)), cut=Cut(4), epochs=1)):
            raise ValueError("of the loop")
    assert not came_from_loader(caught.value)


def told(error: BaseException) -> str:
    """What the user reads: a worker's message holds its notes already."""
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


def test_a_worker_that_dies_is_one_clear_line() -> None:
    class Deadly(list[int]):
        def __getitem__(self, index: Any) -> Any:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(ProcessError, match=r"a process that loads data died \(DataLoader worker.*lower data.workers"):
        load(Deadly(range(8)), 1, Cut(4))
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_a_global_iterable_is_read_once_whatever_the_workers(workers: int) -> None:
    ranks = [load(Numbers(11, "global"), workers, Cut(4, 3, 1), rank, epochs=1) for rank in range(3)]
    fed = [
        pair
        for steps in ranks
        for step in steps
        for micro in step.micro_steps
        if micro.weight
        for pair in zip(micro.positions.tolist(), micro.batch.tolist(), strict=True)
    ]
    assert sorted(fed) == [(number, number) for number in range(11)]
    assert [step.size for step in ranks[0]] == [4, 4, 3]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_shard_says_that_it_is_exhausted(workers: int) -> None:
    with Loader(DataStream(Numbers(3, "sharded"), cut=Cut(4, 2), epochs=1), workers=workers) as loader:
        steps = [next(loader) for _ in range(3)]
    assert [(step.exhausted, step.local_size) for step in steps] == [(False, 2), (True, 1), (True, 0)]


def test_decisions_are_said_with_because() -> None:
    def because(dataset: Any, workers: int) -> tuple[int, str]:
        loader = Loader(DataStream(dataset, cut=Cut(4)), workers=workers)
        return loader.workers, "; ".join(map(str, loader.decisions))

    assert because(list(range(9)), 3) == (3, "")
    workers, reason = because(Numbers(9, "global"), 3)
    assert workers == 1 and "because each would read all of an iterable dataset" in reason
    reason = because(Numbers(9, "sharded"), 0)[1]
    assert "no fixed order, because the dataset declares" in reason
    assert reason.endswith("covered only as long as the number of data-parallel ranks and train.global_batch stay")


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 1])
def test_pinned_batches(workers: int) -> None:
    with Loader(DataStream(list(range(8)), cut=Cut(4), epochs=1), workers=workers, pin=True) as loader:
        assert all(step.micro_steps[0].batch.is_pinned() for step in loader)
