"""The memory that workers and their agent share."""

import os
import sys

from allranks.observing.heartbeat import ASKED, NUM_FIELDS, STEP, Heartbeat
from allranks.surviving.beats import SharedBeats


def test_the_memory_is_shared_by_its_path_and_leaves_nothing() -> None:
    beats = SharedBeats(2)
    with open(beats.path, "r+b") as file:
        file.seek(8 * (NUM_FIELDS + STEP))
        file.write((41).to_bytes(8, sys.byteorder))
    assert beats.steps() == [0, 41]
    beats.ask()
    assert not beats.answered(0) and beats.slot(0)[ASKED] == 1
    beats.ask(stacks=True)
    assert not beats.answered(0) and beats.slot(0)[ASKED] == -2
    beats.ask()
    assert beats.slot(0)[ASKED] == 3
    beats.close()
    beats.close()
    assert not os.path.exists(beats.path)


def test_an_end_counts_only_with_the_code_that_was_said() -> None:
    beats = SharedBeats(2)
    Heartbeat(beats.slot(1)).finish(75)
    assert [beats.has_finished(*one) for one in ((1, 75), (1, 0), (0, 0))] == [True, False, False]
    assert [beats.said(place) for place in (0, 1)] == [None, 75]
    beats.clear()
    assert beats.said(1) is None and not beats.has_finished(1, 75)
    beats.close()
