"""What moves in a rehearsed step."""

from allranks.rehearsed_messages import Message


def test_a_barrier_waits_and_brings_nothing() -> None:
    assert Message("dp", "all-reduce", 8, 2, "a.py:1 f").travels
    assert not Message("dp", "barrier", 0, 2, "a.py:1 f").travels
