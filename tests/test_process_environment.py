"""The value itself; tests/launching/test_environment.py has how it is read."""

from dataclasses import FrozenInstanceError

import pytest

from allranks.process_environment import ALONE


def test_a_process_alone_is_rank_0_of_1_and_stays_so() -> None:
    assert (ALONE.launcher, ALONE.rank, ALONE.world_size, ALONE.num_nodes) == ("none", 0, 1, 1)
    with pytest.raises(FrozenInstanceError):
        ALONE.rank = 1  # type: ignore[misc]
