"""One line for each configuration, with the numbers that decide."""

from dataclasses import replace
from typing import Any

from allranks.layout import Layout
from allranks.plan import Choice, Estimate, MemoryUse, Span, StepTime
from allranks.planning.reasons import (
    bytes_by_category,
    difference,
    refused_by_host,
    seconds_by_cause,
    why_first,
    why_not,
    why_unfit,
)


def estimate(time: StepTime, memory: MemoryUse, capacity: float = 80e9, **changes: Any) -> Estimate:
    size, seconds = memory.total, time.total
    made = Estimate(
        Choice(Layout(dp_replicate=8), 64, 2), memory, {}, Span(0.9 * size, size, 1.1 * size), capacity, time,
        Span(0.9 * seconds, seconds, 1.1 * seconds), (), 0.4, 64 / seconds, 64 / seconds,
    )  # fmt: skip
    return replace(made, **changes)


BEST = estimate(
    StepTime(compute=8.0, data=2.0),
    MemoryUse(weights=20e9, activations=30e9),
    choice=Choice(Layout(dp_shard=8), 64, 2),
)


def test_the_largest_comes_first_and_nothing_is_left_out() -> None:
    assert list(seconds_by_cause(StepTime(data=2.0, compute=8.0)).items()) == [("compute", 8.0), ("data", 2.0)]
    assert list(bytes_by_category(MemoryUse(weights=1.0, logits=2.0))) == ["logits", "weights"]


def test_the_best_says_where_its_time_and_memory_go() -> None:
    assert why_first(BEST, 7) == (
        "the fastest of 7 that fit: computation 80% of the step, gradients and gathered parameters 20%;"
        " 50.0 GB in use of 80.0 GB"
    )
    assert why_first(BEST, 1).startswith("the only one that fits: ")
    full = estimate(StepTime(compute=8.0), MemoryUse(weights=79.5e9))
    assert why_first(full, 1).endswith("79.5 GB in use of 80.0 GB, the peak within 1% of it")


def test_a_slower_one_says_what_takes_longer_and_what_it_saves() -> None:
    slow = estimate(StepTime(compute=8.0, tensor=4.0, data=1.0), MemoryUse(weights=10e9, activations=30e9))
    assert why_not(slow, BEST) == "30% slower: the collectives of tp +4.0 s a step; 10.0 GB less memory"
    assert why_not(estimate(StepTime(compute=10.05), MemoryUse(weights=60e9)), BEST) == (
        "as fast within 1%, 10.0 GB more memory"
    )
    assert why_not(BEST, BEST) == why_not(BEST, None) == "fits"


def test_what_does_not_fit_says_what_is_too_large() -> None:
    large = estimate(StepTime(compute=1.0), MemoryUse(weights=50e9, optimizer=150e9))
    assert why_not(large, BEST) == why_unfit(large)
    assert why_unfit(large) == "does not fit: 200.0 GB of 80.0 GB (2.5 times); the optimizer's state 150.0 GB"
    near = estimate(StepTime(compute=1.0), MemoryUse(weights=78e9))
    assert why_unfit(near) == "is not sure to fit: 70.2 GB to 85.8 GB of 80.0 GB; weights 78.0 GB"
    assert why_unfit(replace(BEST, fault="rank 3 waits")) == "would fail: rank 3 waits"


def test_a_host_that_is_full_is_said() -> None:
    moved = replace(BEST, host_bytes=2e12, host_capacity_bytes=1e12)
    assert not moved.fits
    assert (
        why_unfit(moved)
        == "does not fit: 2.0 TB in a host's memory, which has 1.0 TB for what is moved there (80% of its 1.2 TB)"
    )


def test_a_host_that_is_too_small_is_a_refusal_with_its_numbers() -> None:
    moved = replace(BEST, host_bytes=2e12, host_capacity_bytes=1.6e12)
    refusal = refused_by_host(moved)
    assert refusal is not None and (refusal.rule, refusal.layout) == ("host_memory", str(BEST.choice.layout))
    assert refusal.because == (
        "the processes of a node keep 2.0 TB in a host's memory, which has 1.6 TB for what is moved there"
        " (80% of its 2.0 TB)"
    )
    assert refused_by_host(replace(moved, host_bytes=1.6e12)) is None
    full = estimate(StepTime(compute=1.0), MemoryUse(weights=90e9))
    assert refused_by_host(replace(full, host_bytes=2e12, host_capacity_bytes=1e12)) is None


def test_speed_is_in_tokens_where_samples_get_longer() -> None:
    usual = replace(BEST, samples_per_second=8.0, tokens_per_second=8.0 * 4096)
    longer = replace(usual, samples_per_second=0.9, tokens_per_second=0.9 * 32768)
    assert difference(longer, usual) == "+0 B, -10% tokens/s"
    assert difference(usual, replace(usual, samples_per_second=4.0, tokens_per_second=4.0 * 4096)).endswith("% speed")


def test_what_changes_nothing_is_said_in_words() -> None:
    assert difference(BEST, BEST) == "changes nothing here"
    seconds, rates = Span(1.0, 2.0, 3.0), (0.998 * BEST.samples_per_second, 0.998 * BEST.tokens_per_second)
    slower = replace(BEST, step_seconds=seconds, samples_per_second=rates[0], tokens_per_second=rates[1])
    assert difference(slower, BEST) == "changes no memory, and speed by less than 0.5%"


def test_a_change_is_a_difference_in_memory_and_speed() -> None:
    full = estimate(StepTime(compute=8.0, data=2.0, recompute=2.5), MemoryUse(weights=11e9))
    assert difference(full, BEST) == "-39.0 GB, -20% speed"
    assert difference(BEST, full) == "+39.0 GB, +25% speed"
    large = estimate(StepTime(compute=10.0), MemoryUse(weights=90e9))
    assert difference(large, BEST) == "+40.0 GB, +0% speed, then it does not fit"
    assert difference(BEST, large) == "-40.0 GB, +0% speed, then it fits"


def test_a_change_whose_fit_is_not_certain_says_so() -> None:
    unsure = estimate(StepTime(compute=10.0), MemoryUse(weights=78e9))
    large = estimate(StepTime(compute=10.0), MemoryUse(weights=90e9))
    assert unsure.may_fit and not unsure.fits
    assert difference(unsure, BEST).endswith(", then it is not sure to fit")
    assert difference(BEST, unsure).endswith(", then it fits")
    assert difference(large, unsure).endswith(", then it does not fit")
    assert difference(unsure, unsure) == "changes nothing here"
    for miss in ({"host_bytes": 2e12, "host_capacity_bytes": 1e12}, {"fault": "nothing can be sent"}):
        found = replace(unsure, **miss)
        assert not found.may_fit and difference(found, BEST).endswith(", then it does not fit")
    assert "in a host's memory" in why_unfit(replace(unsure, host_bytes=2e12, host_capacity_bytes=1e12))
