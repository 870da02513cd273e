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
    assert watch.repeated == [1]
    watch.reset()
    list(once)
    assert watch.repeated == []


def test_a_sampler_made_anew_begins_the_same_epoch(watch: LoaderWatch) -> None:
    list(sampler()), list(sampler())
    assert watch.repeated == [0]


def test_what_is_not_shuffled_repeats_by_right(watch: LoaderWatch) -> None:
    ordered = sampler(shuffle=False)
    list(ordered), list(ordered)
    assert watch.repeated == []


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
