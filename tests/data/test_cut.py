from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.config_sections import TrainConfig
from allranks.data.cut import Cut, Span, cut_step, samples_a_forward
from allranks.errors import ConfigError, LayoutError
from allranks.layout import Layout


@st.composite
def cuts(draw: st.DrawFn, fixed: bool | None = None) -> tuple[Cut, int]:
    """A cut and the size of a step, full or short."""
    num_ranks = draw(st.integers(1, 9))
    global_batch = draw(st.integers(num_ranks, 120))
    micro_batch = draw(st.none() | st.integers(1, 40))
    fixed = draw(st.booleans()) if fixed is None else fixed
    micro_steps = draw(st.integers(1, global_batch)) if fixed else None
    size = draw(st.just(global_batch) | st.integers(1, global_batch))
    return Cut(global_batch, num_ranks, micro_batch, micro_steps), size


def by_micro_step(cut: Cut, size: int) -> list[list[Span]]:
    """For each micro-step the ranks' spans, in rank order."""
    return [list(spans) for spans in zip(*(cut.spans(size, rank) for rank in range(cut.num_ranks)), strict=True)]


@given(cuts())
def test_every_sample_once_micro_steps_first_then_ranks(case: tuple[Cut, int]) -> None:
    cut, size = case
    covered = [
        offset + place for spans in by_micro_step(cut, size) for offset, length in spans for place in range(length)
    ]
    assert covered == list(range(size))


@given(cuts())
def test_sizes_are_near_equal(case: tuple[Cut, int]) -> None:
    cut, size = case
    micro_steps = by_micro_step(cut, size)
    whole = [sum(length for _, length in spans) for spans in micro_steps]
    assert max(whole) - min(whole) <= 1
    for spans in micro_steps:
        lengths = [length for _, length in spans]
        assert max(lengths) - min(lengths) <= 1
    shares = [sum(length for _, length in cut.spans(size, rank)) for rank in range(cut.num_ranks)]
    assert max(shares) - min(shares) <= 1


@given(cuts())
def test_every_rank_runs_every_micro_step_and_a_filler_stands_at_its_start(case: tuple[Cut, int]) -> None:
    cut, size = case
    begin = 0
    micro_steps = by_micro_step(cut, size)
    assert len(micro_steps) == cut.num_micro_steps(size)
    for spans in micro_steps:
        assert all(offset == begin for offset, length in spans if length == 0)
        begin += sum(length for _, length in spans)


@given(cuts(fixed=False))
def test_micro_steps_follow_the_formula_and_no_forward_is_too_large(case: tuple[Cut, int]) -> None:
    cut, size = case
    per_forward = cut.micro_batch or cut.global_batch
    assert cut.num_micro_steps(size) == (1 if cut.micro_batch is None else -(-size // (cut.num_ranks * per_forward)))
    assert all(length <= per_forward for rank in range(cut.num_ranks) for _, length in cut.spans(size, rank))


@given(cuts(fixed=True), st.integers(1, 9))
def test_given_micro_steps_never_depend_on_the_ranks(case: tuple[Cut, int], other: int) -> None:
    cut, size = case
    assert cut.num_micro_steps(size) == min(cut.micro_steps or 0, size)
    if other <= cut.global_batch:
        spread = Cut(cut.global_batch, other, cut.micro_batch, cut.micro_steps)
        borders = [spans[0][0] for spans in by_micro_step(spread, size)]
        assert borders == [spans[0][0] for spans in by_micro_step(cut, size)]


@pytest.mark.parametrize(("size", "number"), [(12, 6), (11, 5), (4, 2), (3, 1), (2, 1), (1, 1)])
def test_a_short_step_rather_has_fewer_forwards_than_small_ones(size: int, number: int) -> None:
    cut = Cut(12, 1, None, 6, least=2)
    assert cut.num_micro_steps(size) == number
    assert min(length for _, length in cut.spans(size, 0)) >= min(size, 2)
    assert Cut(12, 1, None, 12, least=2).num_micro_steps() == 12  # a full step is as it was asked for


def test_what_the_sample_numbers_are() -> None:
    cut = Cut(global_batch=11, num_ranks=4, micro_batch=2)
    assert [cut.spans(11, rank) for rank in range(4)] == [
        [(0, 2), (6, 1)],
        [(2, 2), (7, 1)],
        [(4, 1), (8, 2)],
        [(5, 1), (10, 1)],
    ]
    assert [cut.spans(2, rank) for rank in range(4)] == [[(0, 1)], [(1, 1)], [(0, 0)], [(0, 0)]]


def test_fewer_samples_than_ranks_are_refused_with_the_numbers() -> None:
    with pytest.raises(
        LayoutError, match=r"train.global_batch\(3\) < dp_replicate \* dp_shard\(4\).*train.global_batch=4"
    ):
        Cut(global_batch=3, num_ranks=4)
    Cut(global_batch=4, num_ranks=4)


def test_more_micro_steps_than_samples_are_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"train.micro_steps\(9\) > train.global_batch\(8\)"):
        Cut(global_batch=8, micro_steps=9)


@pytest.mark.parametrize("key", ["global_batch", "micro_batch", "micro_steps"])
def test_nothing_is_below_one(key: str) -> None:
    with pytest.raises(ConfigError, match=f"train.{key}=0"):
        Cut(**{"global_batch": 4, key: 0})


def pipelined(schedule: str = "", dp: int = 1, **train: Any) -> Cut:
    return cut_step(TrainConfig(**train), Layout(pp=2, dp_replicate=dp, schedule=schedule or "1f1b"))


@pytest.mark.parametrize(
    ("batch", "dp", "schedule", "expected"),
    [
        (32, 1, "1f1b", (8, 4)),
        (32, 2, "1f1b", (4, 4)),
        (12, 1, "1f1b", (3, 4)),
        (10, 1, "1f1b", (2, 5)),
        (6, 1, "1f1b", (1, 6)),
        (3, 1, "1f1b", (1, 3)),
        (32, 1, "interleaved", (4, 8)),
        (20, 1, "interleaved", (2, 10)),
    ],
)
def test_a_pipeline_gets_micro_steps_of_one_shape(
    batch: int, dp: int, schedule: str, expected: tuple[int, int]
) -> None:
    cut = pipelined(schedule, dp, global_batch=batch)
    assert (cut.micro_batch, cut.micro_steps) == expected
    assert {length for rank in range(dp) for _, length in cut.spans(batch, rank)} == {expected[0]}


def test_a_pipeline_takes_what_is_asked_for_where_it_fits() -> None:
    assert pipelined(global_batch=24, micro_steps=12).num_micro_steps() == 12
    assert pipelined(global_batch=24, micro_batch=8).num_micro_steps() == 3
    assert cut_step(TrainConfig(global_batch=24, micro_steps=6), Layout(pp=2), fixed=True).micro_steps == 6


@pytest.mark.parametrize(
    ("schedule", "dp", "train", "message"),
    [
        ("", 1, {"global_batch": 12, "micro_steps": 5}, "micro_steps=5 does not cut 12 .* can be 4, 6, 3"),
        ("", 1, {"global_batch": 12, "micro_batch": 5}, "micro_batch=5 does not cut 12 .* can be 2, 3, 4"),
        ("interleaved", 1, {"global_batch": 12, "micro_steps": 3}, "over 4 stages: train.micro_steps can be 4, 6, 12"),
        ("", 2, {"global_batch": 7}, r"train.global_batch\(7\) over .*\(2\) leaves 1: train.global_batch=6 or 8 fits"),
        ("zbv", 1, {"global_batch": 3}, r"needs at least 4 micro-steps of one shape, .* set train.global_batch=4 or"),
        ("", 3, {"global_batch": 2}, r"train.global_batch\(2\) < dp_replicate"),
        ("", 1, {"global_batch": 10**12, "micro_steps": 7}, "train.micro_steps can be 8, 5, 4"),
    ],
)
def test_what_does_not_go_through_a_pipeline_is_refused(
    schedule: str, dp: int, train: dict[str, int], message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        pipelined(schedule, dp, **train)


def test_batch_statistics_want_their_micro_steps_said() -> None:
    with pytest.raises(LayoutError, match=r"train.micro_steps=1 does not cut 12 samples"):
        cut_step(TrainConfig(global_batch=12), Layout(pp=2), fixed=True)


def test_more_micro_steps_than_have_a_place_in_memory_are_refused() -> None:
    Cut(400_000, num_ranks=4, micro_batch=1)
    with pytest.raises(ConfigError, match="has 250,000,000 micro-steps, and can have 100,000"):
        Cut(10**9, num_ranks=4, micro_batch=1)
    with pytest.raises(ConfigError, match="has 100,001 micro-steps"):
        Cut(10**9, micro_steps=100_001)


def test_without_a_pipeline_the_keys_are_taken_as_they_are() -> None:
    assert cut_step(TrainConfig(global_batch=12), Layout(dp_replicate=2)) == Cut(12, 2)
    assert cut_step(TrainConfig(global_batch=12, micro_batch=5), Layout()) == Cut(12, 1, 5)
    assert cut_step(TrainConfig(global_batch=12), Layout(), fixed=True) == Cut(12, 1, None, 1)
    with pytest.raises(ConfigError, match="both say how a step is cut"):
        cut_step(TrainConfig(micro_batch=2, micro_steps=2), Layout())
    with pytest.raises(ConfigError, match="has to be fixed: set"):
        cut_step(TrainConfig(micro_batch=2), Layout(), fixed=True)


@pytest.mark.parametrize("keys", [{}, {"micro_batch": 3}, {"micro_steps": 2}])
def test_no_forward_has_more_samples_than_is_told(keys: dict[str, Any]) -> None:
    train, layout = TrainConfig(steps=1, global_batch=14, **keys), Layout(dp_replicate=2)
    cut = cut_step(train, layout)
    longest = max(length for rank in range(2) for _, length in cut.spans(14, rank))
    assert longest == samples_a_forward(train, layout) == {(): 7, ("micro_batch",): 3, ("micro_steps",): 4}[tuple(keys)]
