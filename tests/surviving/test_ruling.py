"""A ruling travels as JSON and is the same afterwards."""

import json

from allranks.config_guard import GuardConfig
from allranks.failure import Failure
from allranks.surviving.monitor import Alarm
from allranks.surviving.ruling import Ruling, what_follows
from allranks.verdict import Verdict
from tests.surviving.rows import row

VERDICT = Verdict("straggler", "rank 1 on b is busy", ("rank 0", "rank 1"), "look")
FAILURE = Failure(1, "b", 9, 2.5, 93, "rank 1 on b is busy", hung=True)


def test_it_is_the_same_on_another_host() -> None:
    for ruling in (
        Ruling(VERDICT, (1,), 7, {0: 5, 1: 2**60}, failure=FAILURE),
        Ruling(VERDICT, (0, 1), 7, slow="input"),
    ):
        assert Ruling.from_json(json.loads(json.dumps(ruling.to_json()))) == ruling


def test_how_long_it_has_been_so_makes_it_no_other() -> None:
    longer = Verdict(VERDICT.kind, "rank 1 on b is busy for 20 s", (), "look")
    assert Ruling(VERDICT, (1,), 7).about == Ruling(longer, (1,), 7, failure=FAILURE).about
    assert Ruling(VERDICT, (1,), 7).about != Ruling(VERDICT, (1,), 8).about


def test_it_is_outdated_once_who_was_late_or_any_step_has_gone_on() -> None:
    ruling = Ruling(VERDICT, (1,), 7, {1: 500})
    assert not ruling.is_outdated([(0, 7, 900), (1, 6, 500)]), "rank 0 was not late: what it does within a step is new"
    assert ruling.is_outdated([(1, 6, 501)]) and ruling.is_outdated([(0, 8, 900)])


def test_a_wait_that_was_told_of_is_over_when_who_was_late_does_something_else() -> None:
    disk = Verdict("disk", "rank 1 is waiting for a disk", (), "look")
    for told, phase, words in (
        (Ruling(VERDICT, (1,), 7, slow="input"), "input", "rank 1 has its data; it was slow and did not hang"),
        (Ruling(Verdict("data", "x", (), "y"), (1,), 7, failure=FAILURE), "input", "rank 1 has its data; "),
        (Ruling(disk, (1,), 7, slow="checkpoint"), "checkpoint", "rank 1 has its checkpoint behind it; it was slow "),
    ):
        lasts = [row(0, step=7, phase="step"), row(1, step=7, phase=phase)]
        assert told.goes_on(lasts) is None
        over = told.goes_on([lasts[0], row(1, step=7, phase="step")])
        assert over is not None and over.kind == "goes_on" and words in over.what
        assert told.goes_on([row(0, step=8, phase=phase)]) is not None, "of another host nothing else is seen"
    assert Ruling(disk, (1,), 7, failure=FAILURE).goes_on([row(1, step=9)]) is None, "it was not only told of"


def test_what_follows() -> None:
    guard = GuardConfig(hang="stop", checkpoint_seconds=90.0)
    assert "guard.hang=stop" in what_follows(Alarm("hung", (0,), 15.0, act=True), guard)
    slow = Alarm("slow", (0,), 30.0, act=False, phase="checkpoint")
    assert what_follows(slow, guard) == "nothing follows yet: a checkpoint may take 90 s (guard.checkpoint_seconds)"
    assert "data may take 600 s" in what_follows(Alarm("slow", (0,), 15.0, act=False), guard)
