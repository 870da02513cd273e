"""A ruling travels as JSON and is the same afterwards."""

import json

from allranks.failure import Failure
from allranks.surviving.ruling import Ruling
from allranks.verdict import Verdict

VERDICT = Verdict("straggler", "rank 1 on b is busy", ("rank 0", "rank 1"), "look")
FAILURE = Failure(1, "b", 9, 2.5, 93, "rank 1 on b is busy", hung=True)


def test_it_is_the_same_on_another_host() -> None:
    for ruling in (Ruling(VERDICT, (1,), 7, failure=FAILURE), Ruling(VERDICT, (0, 1), 7, slow=True)):
        assert Ruling.from_json(json.loads(json.dumps(ruling.to_json()))) == ruling


def test_how_long_it_has_been_so_makes_it_no_other() -> None:
    longer = Verdict(VERDICT.kind, "rank 1 on b is busy for 20 s", (), "look")
    assert Ruling(VERDICT, (1,), 7).about == Ruling(longer, (1,), 7, failure=FAILURE).about
    assert Ruling(VERDICT, (1,), 7).about != Ruling(VERDICT, (1,), 8).about
