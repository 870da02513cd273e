"""A save that would outlast what is left after a request to stop is told of once, with what helps."""

import math

from allranks.training.grace import Grace


def test_what_fits_is_not_mentioned_and_what_does_not_is_told_once() -> None:
    grace = Grace(60.0, beside=False, in_memory=False)
    assert grace.judge(50.0, 10.0) is None
    verdict = grace.judge(75.0, 4.0)
    assert verdict is not None and verdict.kind == "checkpoint"
    took = "a last checkpoint takes 1 min 15 s here, after a step of up to 4.0 s: more than the 60 s after which"
    assert verdict.what.startswith(took)
    assert "guard.stop_seconds=87 or more" in verdict.next and "checkpoint.memory_every" in verdict.next
    assert grace.judge(99.0, 4.0) is None, "it was said"


def test_one_that_is_under_way_when_the_request_comes_counts_too() -> None:
    assert Grace(60.0, beside=True, in_memory=False).judge(29.0, 1.0) is None
    verdict = Grace(60.0, beside=True, in_memory=False).judge(31.0, 1.0)
    assert verdict is not None and "a last checkpoint takes 1 min 02 s here" in verdict.what


def test_copies_in_memory_are_not_proposed_where_they_are() -> None:
    verdict = Grace(1.0, beside=False, in_memory=True).judge(2.0, 0.0)
    assert verdict is not None and "memory_every" not in verdict.next and "guard.stop_seconds=3 " in verdict.next


def test_where_nobody_kills_nothing_is_too_long() -> None:
    assert Grace(math.inf, beside=True, in_memory=False).judge(1e9, 1e9) is None
