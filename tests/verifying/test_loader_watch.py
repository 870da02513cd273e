"""What loaders do is seen, and what they draw for themselves is told from what samples draw."""

from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from allranks.verifying.loader_watch import LoaderWatch, torch_digest

DATASET = TensorDataset(torch.arange(8.0))


@pytest.fixture
def watch() -> Iterator[LoaderWatch]:
    found = LoaderWatch()
    with found.watching():
        yield found


def sampler(**options: bool) -> DistributedSampler[object]:
    return DistributedSampler(DATASET, num_replicas=2, rank=0, **options)


def test_an_epoch_that_begins_again_is_seen(watch: LoaderWatch) -> None:
    once = sampler()
    for epoch in (0, 1, 1):
        once.set_epoch(epoch)
        assert len(list(once)) == 4
        watch.note_step()
    assert watch.repeated == [1]
    watch.reset()
    list(once)
    watch.note_step()
    assert watch.repeated == []


def test_a_sampler_made_anew_begins_the_same_epoch(watch: LoaderWatch) -> None:
    for _ in range(2):
        list(sampler())
        watch.note_step()
    assert watch.repeated == [0]


def test_what_is_not_shuffled_repeats_by_right(watch: LoaderWatch) -> None:
    ordered = sampler(shuffle=False)
    for _ in range(2):
        list(ordered)
        watch.note_step()
    assert watch.repeated == []


@pytest.mark.parametrize("workers", [0, 1])
def test_a_look_at_one_batch_is_no_epoch(workers: int, watch: LoaderWatch) -> None:
    """Before the first epoch, and in the middle of it; workers may have read all of the order then."""
    once = sampler()
    loader = DataLoader(DATASET, batch_size=1, sampler=once, num_workers=workers)
    for epoch in (0, 1):
        once.set_epoch(epoch)
        next(iter(loader))
        for place, _ in enumerate(loader):
            watch.note_step()
            if place == 1:
                next(iter(loader))
    assert watch.repeated == []
    next(iter(loader))
    watch.note_step()
    assert watch.repeated == [1], "it is one where a step is made of it"


def test_an_epoch_of_which_all_batches_are_made_before_the_first_step(watch: LoaderWatch) -> None:
    once = sampler()
    loader = DataLoader(DATASET, batch_size=2, sampler=once)
    batches = [batch for _ in range(2) for batch in loader]
    for _ in batches:
        watch.note_step()
    assert watch.repeated == [0]


def test_two_datasets_each_have_their_epochs(watch: LoaderWatch) -> None:
    first = sampler()
    second: DistributedSampler[object] = DistributedSampler(TensorDataset(torch.arange(6.0)), num_replicas=2, rank=0)
    for epoch in (0, 1):
        second.set_epoch(epoch)
        for _ in zip(first, second, strict=False):
            watch.note_step()
    assert watch.repeated == [0], "of the first alone"


def test_a_loader_draws_for_itself(watch: LoaderWatch) -> None:
    before = torch_digest()
    batches = iter(DataLoader(DATASET, batch_size=2, shuffle=True))
    next(batches)
    assert before != torch_digest() and watch.is_own_draw(before, torch_digest())
    before = torch_digest()
    next(batches)
    torch.rand(1)
    assert not watch.is_own_draw(before, torch_digest())


def test_all_samples_come_and_nothing_stays_patched() -> None:
    original = DistributedSampler.__iter__, torch.utils.data.RandomSampler.__iter__
    with LoaderWatch().watching():
        rows = [float(x) for (batch,) in DataLoader(DATASET, batch_size=3, shuffle=True) for x in batch]
    assert sorted(rows) == [float(n) for n in range(8)]
    assert (DistributedSampler.__iter__, torch.utils.data.RandomSampler.__iter__) == original
