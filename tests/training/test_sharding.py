"""From the deeds of all ranks to rows."""

import json

from allranks.parallel.step_record import Deed
from allranks.training.sharding import Row, merge, read_replies

GATHER, COMPUTE = Deed("forward", "gather", "a", 3), Deed("forward", "compute", "a")


def test_what_all_ranks_receive_is_added_up() -> None:
    assert merge([[GATHER, COMPUTE], [Deed("forward", "gather", "a", 5), COMPUTE]]) == [
        Row("forward", "gather", "a", 3, 8),
        Row("forward", "compute", "a", 0, 0),
    ]


def test_ranks_that_do_other_things_are_not() -> None:
    assert merge([[GATHER], [COMPUTE]]) == [Row("forward", "gather", "a", 3, None)]


def test_replies_are_json() -> None:
    replies = [json.dumps({"deeds": [GATHER.to_json()], "micro_steps": 2}).encode()] * 2
    assert read_replies(replies) == ([Row("forward", "gather", "a", 3, 6)], 2)
