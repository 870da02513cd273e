"""A ruling travels as JSON and is the same afterwards."""

import json

from allranks.failure import Failure
from allranks.surviving.ruling import Ruling
from allranks.verdict import Verdict

VERDICT = Verdict("straggler", "rank 1 on b is busy", ("rank 0", "rank 1"), "look")
FAILURE = Failure(1, "b", 9, 2.5, 93, "rank 1 on b is busy", hung=True)


def test_it_is_the_same_on_another_host() -> None:
    for ruling in (Ruling(VERDICT, (1,), 7, {0: 5, 1: 2**60}, failure=FAILURE), Ruling(VERDICT, (0, 1), 7, slow=True)):
        assert Ruling.from_json(json.loads(json.dumps(ruling.to_json()))) == ruling


def test_how_long_it_has_been_so_makes_it_no_other() -> None:
    longer = Verdict(VERDICT.kind, "rank 1 on b is busy for 20 s", (), "look")
    assert Ruling(VERDICT, (1,), 7).about == Ruling(longer, (1,), 7, failure=FAILURE).about
    assert Ruling(VERDICT, (1,), 7).about != Ruling(VERDICT, (1,), 8).about


def test_it_is_outdated_once_who_was_late_or_any_step_has_gone_on() -> None:
    ruling = Ruling(VERDICT, (1,), 7, {1: 500})
    assert not ruling.is_outdated([(0, 7, 900), (1, 6, 500)]), "rank 0 was not late: what it does within a step is new"
    assert ruling.is_outdated([(1, 6, 501)]) and ruling.is_outdated([(0, 8, 900)])
