"""The memory that workers and their agent share."""

import os
import sys

from allranks.observing.heartbeat import NUM_FIELDS, STEP
from allranks.surviving.beats import SharedBeats


def test_the_memory_is_shared_by_its_path_and_leaves_nothing() -> None:
    beats = SharedBeats(2)
    with open(beats.path, "r+b") as file:
        file.seek(8 * (NUM_FIELDS + STEP))
        file.write((41).to_bytes(8, sys.byteorder))
    assert beats.steps() == [0, 41]
    beats.ask()
    assert not beats.answered(0)
    beats.close()
    beats.close()
    assert not os.path.exists(beats.path)
