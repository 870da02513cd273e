"""The process group of an own loop: the program may not start or end one, and no rank is waited for without end."""

import pytest

from allranks.errors import ProcessError
from allranks.surviving.launch import launch

pytestmark = pytest.mark.distributed


def test_the_programs_own_start_and_end_do_nothing() -> None:
    def begin_again() -> tuple[int, int, float]:
        import torch
        import torch.distributed as dist

        from allranks.verifying.own_group import process_group

        with process_group() as (rank, size):
            dist.init_process_group("nccl")
            dist.destroy_process_group()
            value = torch.tensor(rank + 1.0)
            dist.all_reduce(value)
        assert not dist.is_initialized()
        return rank, size, float(value)

    assert launch(begin_again, nproc=2) == [(0, 2, 3.0), (1, 2, 3.0)]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_stands_still_ends_the_others(late: int) -> None:
    def come_late() -> None:
        import time
        from datetime import timedelta

        from allranks.verifying import own_group

        own_group.LATEST = timedelta(seconds=1)
        with own_group.process_group() as (rank, _):
            time.sleep(1000 if rank == late else 0)

    with pytest.raises(ProcessError, match=f"rank {1 - late} came to its end, and 1.0 s later rank {late} had not"):
        launch(come_late, nproc=2)


def test_a_rank_may_work_alone_at_the_end() -> None:
    """For longer than what it sends may take."""

    def work_alone() -> int:
        import time
        from datetime import timedelta

        from allranks.verifying import own_group

        own_group.TIMEOUT = timedelta(seconds=1)
        with own_group.process_group() as (rank, _):
            time.sleep(0 if rank else 3)
        return rank

    assert launch(work_alone, nproc=2) == [0, 1]
