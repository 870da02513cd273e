"""The value itself; tests/launching/test_environment.py has how it is read."""

import os
import sys
from dataclasses import FrozenInstanceError

import pytest

from allranks.process_environment import ALONE, NO_GPUS, changed_environment, num_cores


def test_a_process_alone_is_rank_0_of_1_and_stays_so() -> None:
    assert (ALONE.launcher, ALONE.rank, ALONE.world_size, ALONE.num_nodes) == ("none", 0, 1, 1)
    with pytest.raises(FrozenInstanceError):
        ALONE.rank = 1  # type: ignore[misc]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process cannot be bound to cores")
def test_cores_are_those_that_this_process_may_use() -> None:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert num_cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)
    assert num_cores() == len(allowed)


def test_changed_variables_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.delenv("HIP_VISIBLE_DEVICES", raising=False)
    before = dict(os.environ)
    with pytest.raises(KeyError), changed_environment(NO_GPUS):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == os.environ["HIP_VISIBLE_DEVICES"] == ""
        raise KeyError
    assert dict(os.environ) == before
