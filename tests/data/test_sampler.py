import inspect
from itertools import islice
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import allranks.data
from allranks.data.cut import Cut
from allranks.data.sampler import Sampler
from allranks.data.stream import DataStream
from allranks.errors import CheckpointError, DataError, LayoutError


class Numbers(Dataset[int]):
    """0..10."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> int:
        return index


def world(n: int, num_replicas: int, **options: Any) -> list[Sampler]:
    """One sampler for each process."""
    return [Sampler(range(n), num_replicas, rank, **options) for rank in range(num_replicas)]


@given(st.integers(1, 200), st.integers(1, 9), st.booleans(), st.booleans())
def test_no_sample_twice_and_none_left_out(n: int, num_replicas: int, shuffle: bool, drop_last: bool) -> None:
    samplers = world(n, num_replicas, shuffle=shuffle, drop_last=drop_last)
    parts = [list(sampler) for sampler in samplers]
    seen = [index for part in parts for index in part]
    assert len(set(seen)) == len(seen) == (n - n % num_replicas if drop_last else n)
    lengths = [len(part) for part in parts]
    assert lengths == [len(sampler) for sampler in samplers]
    assert max(lengths) - min(lengths) <= (0 if drop_last else 1)


def test_the_signature_is_that_of_distributed_sampler() -> None:
    theirs = inspect.signature(DistributedSampler.__init__).parameters
    ours = inspect.signature(Sampler.__init__).parameters
    assert [(name, value.default) for name, value in ours.items()] == [
        (name, value.default) for name, value in theirs.items()
    ]


def test_every_epoch_has_a_new_order_without_set_epoch() -> None:
    sampler = Sampler(range(50))
    orders = [list(sampler) for _ in range(3)]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert all(sorted(order) == list(range(50)) for order in orders)


def test_set_epoch_chooses_the_order() -> None:
    sampler, plain = Sampler(range(50)), Sampler(range(50))
    plain_orders = [list(plain) for _ in range(3)]
    orders = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
    assert orders == plain_orders
    sampler.set_epoch(1)
    assert list(sampler) == plain_orders[1]


def test_a_pass_given_up_is_followed_by_the_next_epoch() -> None:
    sampler, plain = Sampler(range(50)), Sampler(range(50))
    list(islice(sampler, 7))
    list(plain)
    assert list(sampler) == list(plain)


def test_without_shuffle_and_other_seeds() -> None:
    assert list(Sampler(range(6), 2, 1, shuffle=False)) == [1, 3, 5]
    assert list(Sampler(range(50), seed=1)) != list(Sampler(range(50), seed=2))


def test_what_drop_last_leaves_out_changes_with_the_epoch() -> None:
    samplers = world(50, 4, drop_last=True)
    left = {frozenset(range(50)) - {index for sampler in samplers for index in sampler} for _ in range(4)}
    assert len(left) > 1


def test_the_order_is_that_of_the_data_stream() -> None:
    stream = DataStream(range(30), cut=Cut(4), epochs=1, seed=3)
    fed = [index for plan in stream.steps() for micro in plan.micro_plans for index in micro.indices]
    assert list(Sampler(range(30), seed=3)) == fed


def test_inside_a_data_loader() -> None:
    loaded = []
    for rank in range(2):
        loader: DataLoader[int] = DataLoader(Numbers(), 3, sampler=Sampler(Numbers(), 2, rank))
        loaded += [value for batch in loader for value in batch.tolist()]
    assert sorted(loaded) == list(range(11))


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_resume_within_an_epoch(taken: int) -> None:
    whole = Sampler(range(11), 2, 1)
    orders = [list(whole) for _ in range(3)]
    sampler = Sampler(range(11), 2, 1)
    list(sampler)
    assert list(islice(sampler, taken)) == orders[1][:taken]
    again = Sampler(range(11), 2, 1)
    again.load_state_dict(sampler.state_dict())
    again.set_epoch(1)  # loops call it at the start of the epoch that they resume
    assert list(again) == orders[1][taken:]
    assert list(again) == orders[2]


def test_resume_at_the_end_of_an_epoch_begins_the_next() -> None:
    sampler = Sampler(range(10))
    orders = [list(sampler) for _ in range(2)]
    again = Sampler(range(10))
    list(again)
    resumed = Sampler(range(10))
    resumed.load_state_dict(again.state_dict())
    assert list(resumed) == orders[1]


@given(st.integers(1, 60), st.lists(st.integers(1, 5), min_size=2, max_size=4), st.integers(0, 10), st.booleans())
def test_resume_with_other_numbers_of_processes(n: int, worlds: list[int], taken: int, shuffle: bool) -> None:
    seen: list[int] = []
    state = {"epoch": 0, "position": 0}
    for num_replicas in worlds:
        samplers = world(n, num_replicas, shuffle=shuffle)
        for sampler in samplers:
            sampler.load_state_dict(state)
        parts = [list(islice(sampler, taken)) for sampler in samplers]
        seen += [index for part in parts for index in part]
        if len({len(part) for part in parts}) > 1 or len(seen) >= n:
            break
        state = samplers[-1].state_dict()
        assert state == samplers[0].state_dict() == {"epoch": 0, "position": len(seen)}
    else:
        for sampler in (rest := world(n, 3, shuffle=shuffle)):
            sampler.load_state_dict(state)
        seen += [index for sampler in rest for index in sampler]
        assert sorted(seen) == list(range(n))
    assert len(set(seen)) == len(seen)


@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 5), st.integers(0, 5))
def test_drop_last_keeps_lengths_equal_after_a_resume_too(n: int, before: int, after: int, taken: int) -> None:
    state = {"epoch": 0, "position": min(taken * before, n)}
    samplers = world(n, after, drop_last=True)
    for sampler in samplers:
        sampler.load_state_dict(state)
    assert len({len(list(sampler)) for sampler in samplers}) == 1


def test_an_epoch_that_was_consumed_is_followed_by_the_next_one() -> None:
    sampler = Sampler(range(10), 2, 0)
    next(iter(sampler))
    assert sampler.state_dict(consumed=5) == {"epoch": 1, "position": 0}
    other = Sampler(range(11), 4, 0, drop_last=True)
    other.load_state_dict({"epoch": 0, "position": 8})
    assert len(list(other)) == 2 and other.state_dict()["epoch"] == 2


def test_what_the_loop_consumed_counts_where_workers_ask_ahead() -> None:
    sampler = Sampler(range(11))
    loader: DataLoader[int] = DataLoader(Numbers(), batch_size=2, sampler=sampler, num_workers=1)
    batches = iter(loader)
    consumed = [*next(batches).tolist(), *next(batches).tolist()]
    ahead, exact = sampler.state_dict()["position"], sampler.state_dict(consumed=4)["position"]
    del batches
    assert ahead > exact == 4
    sampler.load_state_dict({"epoch": 0, "position": exact})
    assert sorted([*consumed, *sampler]) == list(range(11))


def test_a_loop_stopped_in_its_last_batches_resumes_there_where_workers_have_asked_for_all() -> None:
    sampler = Sampler(range(11))
    list(sampler)
    sampler.load_state_dict({"epoch": 1, "position": 3})
    loader: DataLoader[int] = DataLoader(Numbers(), batch_size=2, sampler=sampler, num_workers=2)
    consumed = next(iter(loader)).tolist()  # two workers ask for four batches ahead: there are no more
    assert sampler.state_dict() == {"epoch": 2, "position": 0}
    state = sampler.state_dict(consumed=2)
    assert state == {"epoch": 1, "position": 5}
    again, whole = Sampler(range(11)), Sampler(range(11))
    again.load_state_dict(state)
    whole.set_epoch(1)
    assert [*consumed, *again] == list(whole)[3:]
    assert list(again) == list(whole)  # nothing of the next epoch is skipped
    assert sampler.state_dict(consumed=8) == {"epoch": 2, "position": 0}


def test_what_was_consumed_of_an_ended_pass_does_not_count_for_the_next_one() -> None:
    sampler = Sampler(range(11))
    list(sampler)
    sampler.set_epoch(1)
    assert sampler.state_dict(consumed=0) == {"epoch": 1, "position": 0}
    list(sampler)
    next(iter(sampler))
    assert sampler.state_dict(consumed=3) == {"epoch": 2, "position": 3}


def test_num_replicas_and_rank_come_from_torch_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 5)
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    sampler = Sampler(range(20))
    assert (sampler.num_replicas, sampler.rank) == (5, 3)
    given = Sampler(range(20), num_replicas=2, rank=0)
    assert (given.num_replicas, given.rank) == (2, 0)


def test_alone_it_is_the_only_process() -> None:
    sampler = Sampler(range(20))
    assert (sampler.num_replicas, sampler.rank) == (1, 0)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"rank\(2\) is not in 0 .. num_replicas\(2\) - 1"):
        Sampler(range(5), 2, 2)
    with pytest.raises(DataError, match="range is empty"):
        Sampler(range(0))
    with pytest.raises(CheckpointError, match="sampler's state"):
        Sampler(range(5)).load_state_dict({"epoch": 1})


def test_it_is_what_the_package_shows() -> None:
    assert allranks.data.Sampler is Sampler
