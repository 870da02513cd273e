"""The next save of an own loop is in place of the one that other ranks may still read.

In a real run a restart lies between the two. Here ranks wait, by files beside the folder of saves: a collective that
the program does not have could put right what is wrong with it.
"""

import time
from pathlib import Path

LOADING_SECONDS = 30.0  # of waiting, at most: a rank whose data ended sooner has made no save, and loads none
LOOK_SECONDS = 0.01


def note_loaded(folder: str, save: int, rank: int) -> None:
    """A rank has loaded what was saved before step `save`."""
    _mark(folder, save, rank).touch()


def await_loaded(folder: str, save: int, size: int) -> None:
    """Until each of `size` ranks has loaded it, or has had the time to."""
    ends = time.monotonic() + LOADING_SECONDS
    while time.monotonic() < ends and not all(_mark(folder, save, rank).exists() for rank in range(size)):
        time.sleep(LOOK_SECONDS)


def _mark(folder: str, save: int, rank: int) -> Path:
    return Path(f"{folder}-{save}-loaded-by-{rank}")
