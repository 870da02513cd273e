"""Seeds of the generators that a process has one of: what python and numpy are seeded with, and a part's own seed."""

import random
from typing import Final

_GOLDEN: Final = 0x9E3779B97F4A7C15
_POSITIVE: Final = (1 << 63) - 1
_WORD: Final = (1 << 32) - 1


def seed_plain(key: int) -> None:
    """Seed python's and numpy's global generators; numpy takes 32 bits, in which all of the key's count."""
    import numpy as np

    random.seed(key)
    np.random.seed((key ^ (key >> 32)) & _WORD)


def part_key(key: int, part: int) -> int:
    """The key of one of the parts into which what is seeded with `key` falls: other ones for each; of part 0 `key`."""
    return (key ^ (part * _GOLDEN)) & _POSITIVE
