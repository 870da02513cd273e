from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch.utils.data
from hypothesis import given, settings
from hypothesis import strategies as st

from allranks.data import random_keys
from allranks.data.cut import Cut
from allranks.data.micro_step import StepPlan
from allranks.data.stream import DataStream, declared_order, item_key, random_key, seed_all
from allranks.errors import CheckpointError, ConfigError, DataError
from allranks.left_out import LeftOut


def fed(plans: list[StepPlan]) -> list[tuple[int, int]]:
    """(position, sample) of everything that counts."""
    return [
        pair
        for plan in plans
        for micro in plan.micro_plans
        for pair in zip(micro.positions.tolist(), micro.samples.tolist(), strict=True)
    ]


def world(n: int, cut: Cut, **options: Any) -> list[list[StepPlan]]:
    """Every rank's plans."""
    return [list(DataStream(range(n), cut=cut, dp_rank=rank, **options).steps()) for rank in range(cut.num_ranks)]


@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 4), st.data())
@settings(max_examples=60)
def test_every_position_once_over_ranks_and_micro_steps(
    n: int, num_ranks: int, epochs: int, data: st.DataObject
) -> None:
    global_batch = data.draw(st.integers(num_ranks, max(n, num_ranks)))
    cut = Cut(global_batch, num_ranks, data.draw(st.none() | st.integers(1, 5)))
    ranks = world(n, cut, epochs=epochs, allow_small=True)
    pairs = sorted(pair for plans in ranks for pair in fed(plans))
    assert [position for position, _ in pairs] == list(range(n * epochs))
    for epoch in range(epochs):
        assert sorted(sample for _, sample in pairs[epoch * n : (epoch + 1) * n]) == list(range(n))
    assert len({tuple(len(plan.micro_plans) for plan in plans) for plans in ranks}) == 1


@given(st.integers(8, 60), st.integers(1, 5), st.integers(1, 5))
@settings(max_examples=40)
def test_the_order_does_not_depend_on_the_ranks(n: int, one: int, other: int) -> None:
    def pairs(num_ranks: int) -> list[list[tuple[int, int]]]:
        ranks = world(n, Cut(8, num_ranks, 2), epochs=2, seed=3)
        return [sorted(pair for plan in step for pair in fed([plan])) for step in zip(*ranks, strict=True)]

    assert pairs(one) == pairs(other)


def test_only_the_last_batch_of_all_epochs_is_short() -> None:
    stream = DataStream(range(10), cut=Cut(4), epochs=3)
    plans = list(stream.steps())
    assert [plan.size for plan in plans] == [4] * 7 + [2]
    assert [plan.position for plan in plans] == list(range(0, 32, 4))
    assert [plan.step for plan in plans] == list(range(8))
    assert (stream.steps_total, stream.steps_per_epoch, stream.samples_total) == (8, 2.5, 30)


def test_epochs_have_different_orders_and_seeds_too() -> None:
    plans = fed(list(DataStream(range(50), cut=Cut(10), epochs=2).steps()))
    orders = [[sample for _, sample in plans[:50]], [sample for _, sample in plans[50:]]]
    other = [sample for _, sample in fed(list(DataStream(range(50), cut=Cut(10), epochs=1, seed=1).steps()))]
    assert orders[0] != orders[1] and orders[0] != other


def test_without_shuffle_the_order_is_the_datasets() -> None:
    plans = fed(list(DataStream(range(5), cut=Cut(2), epochs=2, shuffle=False).steps()))
    assert plans == [(position, position % 5) for position in range(10)]


def test_samples_at_is_the_order_that_is_fed() -> None:
    stream = DataStream(range(30), cut=Cut(7, 3), dp_rank=1, epochs=2, seed=5)
    for position, sample in fed(list(stream.steps())):
        assert stream.samples_at(np.array([position])).tolist() == [sample]


def test_indices_are_the_samples_and_first_is_where_they_begin() -> None:
    for plan in DataStream(range(30), cut=Cut(7, 3, 2), dp_rank=2, epochs=2).steps():
        for micro in plan.micro_plans:
            if micro.weight:
                assert micro.indices == micro.samples.tolist()
                assert micro.positions.tolist() == list(range(micro.first, micro.first + len(micro.indices)))


def test_a_filler_repeats_the_first_sample_of_its_micro_step() -> None:
    cut = Cut(4, 4)
    ranks = world(6, cut, epochs=1)
    first = ranks[0][1].micro_plans[0]
    for rank in (2, 3):
        filler = ranks[rank][1].micro_plans[0]
        assert (filler.weight, filler.positions.tolist(), filler.samples.tolist()) == (0, [], [])
        assert filler.positions.dtype == filler.samples.dtype == np.int64
        assert (filler.first, filler.indices) == (first.first, first.indices)


def test_long_streams_go_on_past_a_block() -> None:
    """Plans are made thousands at once; where one lot ends and the next begins nothing is lost."""
    plans = list(islice(DataStream(range(1000), cut=Cut(3, 2), dp_rank=1).steps(), 6000))
    assert [plan.position for plan in plans] == [3 * step for step in range(6000)]
    stream = DataStream(range(1000), cut=Cut(3, 2), dp_rank=1)
    stream.load_state_dict({"position": 3 * 5000})
    assert fed(plans[5000:5003]) == fed(list(islice(stream.steps(), 3)))
    assert plans[5000].micro_plans[0].random_key == random_key(0, 5000, 0, 1)


def test_random_keys_are_those_of_the_law() -> None:
    for plan in DataStream(range(20), cut=Cut(8, 2, 2), dp_rank=1, epochs=1, seed=9).steps():
        keys = [micro.random_key for micro in plan.micro_plans]
        assert keys == [random_key(9, plan.step, micro_step, 1) for micro_step in range(len(keys))]


@pytest.mark.parametrize("taken", [0, 1, 5, 7])
def test_resume_is_one_integer(taken: int) -> None:
    stream = DataStream(range(10), cut=Cut(4, 2), dp_rank=1, epochs=3)
    plans = list(stream.steps())
    for plan in plans[:taken]:
        stream.take(plan)
    assert stream.state_dict() == {"position": 4 * taken}
    again = DataStream(range(10), cut=Cut(4, 2), dp_rank=1, epochs=3)
    again.load_state_dict(stream.state_dict())
    rest = list(again.steps())
    assert fed(rest) == fed(plans[taken:])
    assert [plan.step for plan in rest] == list(range(taken, 8))
    keys = [[micro.random_key for micro in plan.micro_plans] for plan in rest]
    assert keys == [[micro.random_key for micro in plan.micro_plans] for plan in plans[taken:]]
    assert again.steps_total == 8


def test_resume_at_another_world_size_continues_with_the_next_sample() -> None:
    whole = sorted(pair for plans in world(20, Cut(4, 1), epochs=2) for pair in fed(plans))
    rest = []
    for rank in range(3):
        stream = DataStream(range(20), cut=Cut(4, 3), dp_rank=rank, epochs=2)
        stream.load_state_dict({"position": 12})
        rest += fed(list(stream.steps()))
    assert sorted(rest) == whole[12:]


def test_resume_with_more_epochs_after_a_short_batch() -> None:
    stream = DataStream(range(10), cut=Cut(4), epochs=2)
    stream.load_state_dict({"position": 10})
    plans = list(stream.steps())
    assert [(plan.step, plan.position, plan.size) for plan in plans] == [(3, 10, 4), (4, 14, 4), (5, 18, 2)]
    assert stream.steps_total == 6


@pytest.mark.parametrize(("cut", "size"), [(Cut(4), 9), (Cut(3), 8), (Cut(5), 8)], ids=str)
def test_steps_count_on_after_a_short_batch_and_another_global_batch(cut: Cut, size: int) -> None:
    """`size` samples were done in three steps: the numbers of plans and of what is taken are one count."""
    stream = DataStream(range(9), cut=cut, epochs=2)
    stream.load_state_dict({"position": size})
    stream.continue_at(3)
    for number, plan in enumerate(list(stream.steps()), 4):
        assert plan.step == stream.step
        stream.take(plan)
        assert stream.step == number
    assert stream.step == stream.steps_total == 3 + -(-(18 - size) // cut.global_batch)


def test_position_moves_only_when_a_step_is_taken() -> None:
    stream = DataStream(range(10), cut=Cut(4), epochs=1)
    plans = list(stream.steps())
    assert stream.position == 0
    stream.take(plans[0])
    assert stream.position == 4
    with pytest.raises(AssertionError, match="a step at 8, but the stream stands at 4"):
        stream.take(plans[2])


def test_steps_end_the_stream() -> None:
    stream = DataStream(range(10), cut=Cut(4), steps=7)
    assert len(list(stream.steps())) == stream.steps_total == 7
    stream.load_state_dict({"position": 24})
    assert [plan.step for plan in stream.steps()] == [6]
    both = DataStream(range(10), cut=Cut(4), steps=7, epochs=1)
    assert len(list(both.steps())) == both.steps_total == 3
    assert DataStream(range(10), cut=Cut(4)).steps_total is None


@pytest.mark.parametrize(
    "state", [{}, {"position": -1}, {"position": "3"}, {"position": True}, {"position": 3, "epoch": 0}, [], 3, None]
)
def test_a_state_that_is_none_is_refused(state: Any) -> None:
    with pytest.raises(CheckpointError, match="position"):
        DataStream(range(10), cut=Cut(4)).load_state_dict(state)


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(DataError, match=r"list is empty: it has 0 samples, and train.global_batch is 4"):
        DataStream([], cut=Cut(4))
    with pytest.raises(DataError, match="empty"):
        DataStream([], cut=Cut(4), allow_small=True)


def test_a_dataset_smaller_than_a_batch_is_refused_with_both_numbers() -> None:
    with pytest.raises(DataError, match=r"list has 3 samples, fewer than train.global_batch\(4\)"):
        DataStream([1, 2, 3], cut=Cut(4))
    DataStream([1, 2, 3, 4], cut=Cut(4))


class Endless(torch.utils.data.IterableDataset[int]):
    """An iterable dataset with whatever order is set on it."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(100))


def test_orders_are_recognised() -> None:
    dataset = Endless()
    assert declared_order([1]) == "map"
    for order in ("global", "sharded"):
        dataset.order = order  # type: ignore[attr-defined]
        assert declared_order(dataset) == order


@pytest.mark.parametrize("order", [None, "globally"])
def test_an_undeclared_order_is_refused_with_the_remedy(order: str | None) -> None:
    dataset = Endless()
    if order is not None:
        dataset.order = order  # type: ignore[attr-defined]
    with pytest.raises(DataError, match=rf'Endless is iterable and declares order={order!r}: set `order = "global"`'):
        DataStream(dataset, cut=Cut(4))


def test_a_data_loader_is_refused_with_the_reason() -> None:
    loader: torch.utils.data.DataLoader[int] = torch.utils.data.DataLoader(Endless())
    with pytest.raises(DataError, match=r"DataLoader, which batches and shards by itself.*return its .dataset"):
        DataStream(loader, cut=Cut(4))


@pytest.mark.parametrize("thing", [3, object()])
def test_what_is_no_dataset_is_refused(thing: object) -> None:
    with pytest.raises(DataError, match="is no dataset: it needs"):
        DataStream(thing, cut=Cut(4))


def test_no_dataset_is_refused() -> None:
    with pytest.raises(DataError, match="returned None"):
        DataStream(None, cut=Cut(4))


def test_the_keys_are_those_of_random_keys() -> None:
    assert (random_key, item_key, seed_all) == (random_keys.random_key, random_keys.item_key, random_keys.seed_all)


@given(st.integers(1, 3), st.integers(1, 4), st.integers(0, 5), st.integers(1, 17))
@settings(max_examples=40)
def test_what_is_left_out_is_never_fed_and_all_else_is_as_it_was(
    num_ranks: int, epochs: int, begins: int, length: int
) -> None:
    n, cut = 23, Cut(4, num_ranks, 2)
    left_out = LeftOut(((4 * begins, 4 * begins + length),))
    ranks = world(n, cut, epochs=epochs, left_out=left_out)
    pairs = sorted(pair for plans in ranks for pair in fed(plans))
    whole = sorted(pair for plans in world(n, cut, epochs=epochs) for pair in fed(plans))
    (first, past), *_ = left_out.ranges
    assert pairs == [(position, sample) for position, sample in whole if not first <= position < past]
    steps = ranks[0]
    assert [plan.step for plan in steps] == list(range(len(steps)))
    assert [plan.position - plan.left_out for plan in steps] == [4 * step for step in range(len(steps))], "samples seen"
    stream = DataStream(range(n), cut=cut, epochs=epochs, left_out=left_out)
    assert stream.steps_total == len(steps)
    assert stream.steps_in_full == DataStream(range(n), cut=cut, epochs=epochs).steps_total
    keys = [[micro.random_key for micro in plan.micro_plans] for plan in steps[:-1]]
    plain = [[micro.random_key for micro in plan.micro_plans] for plan in world(n, cut, epochs=9)[0]]
    assert keys == plain[: len(keys)], "random numbers are those of the step"


def test_a_stream_goes_on_after_what_is_left_out() -> None:
    stream = DataStream(range(40), cut=Cut(4), left_out=LeftOut(((8, 16), (16, 20))))
    for plan in islice(stream.steps(), 3):
        stream.take(plan)
    assert (stream.position, stream.seen, stream.step) == (24, 12, 3)
    resumed = DataStream(range(40), cut=Cut(4), left_out=stream.left_out)
    resumed.load_state_dict({"position": 8})
    resumed.continue_at(2)
    assert (resumed.position, resumed.seen, resumed.step) == (20, 8, 2)
    assert next(resumed.steps()).step == 2


def test_ranges_that_begin_within_a_step_and_shards_are_refused() -> None:
    stream = DataStream(range(40), cut=Cut(4), left_out=LeftOut(((10, 16),)))
    with pytest.raises(ConfigError, match=r"data.skip=10:16: position 10 lies in the middle of a step of 4 samples"):
        next(stream.steps())

    class Shards(torch.utils.data.IterableDataset[int]):
        order = "sharded"

        def __iter__(self) -> Iterator[int]:
            return iter(range(9))

    with pytest.raises(DataError, match=r"data.skip=8:12: Shards declares order=.sharded."):
        DataStream(Shards(), cut=Cut(4), left_out=LeftOut(((8, 12),)))
