"""The pool itself: what it promises to every test that stands on it."""

import os
import signal
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from allranks.errors import LayoutError
from tests.commands import wait_for
from tests.distributed.pool import Pools

pytestmark = pytest.mark.distributed

OFFSET = 10


def summed(value: int) -> float:
    """The sum over ranks of value + rank + a global of this module."""
    tensor = torch.full((), float(value + dist.get_rank() + OFFSET), dtype=torch.float64)
    dist.all_reduce(tensor)
    return tensor.item()


def raise_on(rank: int) -> None:
    """Raise on one rank while the others wait for it in a collective."""
    if dist.get_rank() == rank:
        raise LayoutError("tp(3) does not divide")
    dist.barrier()


def hang_on(rank: int) -> None:
    """Hang on one rank, far longer than the test waits."""
    if dist.get_rank() == rank:
        time.sleep(1000)


def gone(pid: int) -> bool:
    """Whether a process has ended; one that was just killed gets a moment."""
    for _ in range(100):
        if not psutil.pid_exists(pid):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_results_come_by_rank(pool: Pools, world_size: int) -> None:
    def who() -> tuple[int, int]:
        return dist.get_rank(), dist.get_world_size()

    assert pool(world_size).run(who) == [(rank, world_size) for rank in range(world_size)]
    expected = sum(5 + OFFSET + rank for rank in range(world_size))
    assert pool(world_size).run(summed, 5) == [expected] * world_size


def test_a_pool_is_kept(pool: Pools) -> None:
    pool(2).close()  # else its crew may be due to be replaced just now
    assert pool(2).run(os.getpid) == pool(2).run(os.getpid)


def test_a_crew_that_holds_many_threads_is_replaced(pool: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_groups(count: int) -> int:
        for _ in range(count):
            dist.new_group([0, 1])
        return os.getpid()

    pool(2).close()
    monkeypatch.setattr("tests.distributed.pool.THREADS_PER_CREW", 40)
    first, second, third = (pool(2).run(with_groups, count) for count in (0, 10, 0))
    assert first == second != third


def test_between_two_cases_nothing_runs(pool: Pools) -> None:
    workers = [psutil.Process(pid) for pid in pool(2).run(os.getpid)]
    wait_for(lambda: {worker.status() for worker in workers} == {psutil.STATUS_STOPPED}, "that all stand still")
    assert pool(2).run(summed, 0) == [2 * OFFSET + 1] * 2


def test_the_failing_rank_is_raised_and_the_next_case_is_good(pool: Pools) -> None:
    pool(2).close()
    before = pool(2).run(os.getpid)
    with pytest.raises(LayoutError, match="does not divide") as raised:
        pool(2).run(raise_on, 1)
    note = "".join(raised.value.__notes__)
    assert note.startswith("rank 1 of 2")
    assert "in raise_on" in note
    assert pool(2).run(summed, 0) == [2 * OFFSET + 1] * 2
    assert not set(before) & set(pool(2).run(os.getpid))


def test_a_hanging_rank_is_named_with_its_stack(pool: Pools) -> None:
    pids = pool(2).run(os.getpid)
    with pytest.raises(TimeoutError, match=r"no answer from ranks \[1\]") as raised:
        pool(2).run(hang_on, 1, timeout=0.5)
    assert "in hang_on" in str(raised.value)
    assert pool(2).run(summed, 0) == [2 * OFFSET + 1] * 2
    assert all(gone(pid) for pid in pids)


def test_a_dying_rank_is_named(pool: Pools) -> None:
    def die() -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    with pytest.raises((ChildProcessError, RuntimeError)):
        pool(2).run(die)
    assert pool(2).run(summed, 0) == [2 * OFFSET + 1] * 2


def test_a_case_leaves_nothing_behind(pool: Pools) -> None:
    def spoil() -> None:
        os.environ["LEFT_BEHIND"] = "1"
        torch.set_default_dtype(torch.float64)
        torch.rand(3)

    def look() -> tuple[bool, torch.dtype, float]:
        return "LEFT_BEHIND" in os.environ, torch.get_default_dtype(), torch.rand(1).item()

    pool(1).run(int)
    clean = pool(1).run(look)
    pool(1).run(spoil)
    assert pool(1).run(look) == clean
    assert clean[0][:2] == (False, torch.float32)


def test_warnings_are_errors_in_a_worker_too(pool: Pools) -> None:
    def warn() -> None:
        import warnings

        warnings.warn("careless", stacklevel=1)

    with pytest.raises(UserWarning, match="careless"):
        pool(1).run(warn)


def test_alone_is_torchruns_environment_without_a_group(pool: Pools) -> None:
    def start() -> tuple[bool, str, float]:
        before = dist.is_initialized()
        dist.init_process_group("gloo")
        total = summed(0)
        return before, os.environ["LOCAL_RANK"], total

    assert pool(2).run_alone(start) == [(False, "0", 2 * OFFSET + 1), (False, "1", 2 * OFFSET + 1)]
    assert all(gone(pid) for pid in pool(2).run_alone(os.getpid))


def test_an_error_that_cannot_travel_still_shows_its_traceback(pool: Pools) -> None:
    def fail() -> None:
        class Stubborn(Exception):
            def __reduce__(self) -> str:
                raise TypeError("stays here")

        raise Stubborn("a word")

    with pytest.raises(RuntimeError, match="cannot be pickled") as raised:
        pool(1).run(fail)
    assert "a word" in "".join(raised.value.__notes__)


def test_everything_ends_with_the_session() -> None:
    with Pools() as pools:
        (pid,) = pools(1).run(os.getpid)
        (host,) = pools.pids
    assert not psutil.pid_exists(host)
    assert not psutil.pid_exists(pid)
