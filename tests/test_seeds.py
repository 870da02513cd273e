"""What python and numpy are seeded with, and the keys of parts."""

import random

import numpy as np

from allranks.data.random_keys import generators_kept
from allranks.seeds import part_key, seed_plain


def drawn(key: int) -> tuple[float, float]:
    with generators_kept():
        seed_plain(key)
        return random.random(), float(np.random.random())


def test_python_and_numpy_draw_other_numbers_for_every_key() -> None:
    keys = (0, 1, 7, 2 << 32, (1 << 32) + 7, (1 << 63) - 1)
    assert len({number for key in keys for number in drawn(key)}) == 2 * len(keys)
    with generators_kept():
        random.seed(7)
        np.random.seed(7)
        expected = random.random(), float(np.random.random())
    assert drawn(7) == expected == drawn(7), "small keys are the seeds that a user would give"


def test_parts_have_keys_of_their_own() -> None:
    keys = {part_key(key, part) for key in (5, 6) for part in range(100)}
    assert len(keys) == 200 and all(0 <= key < 1 << 63 for key in keys)
    assert part_key(5, 0) == 5
