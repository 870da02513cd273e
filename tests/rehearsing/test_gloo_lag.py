"""No operator begins while a thread of gloo has still to run: threads that are played, and one of gloo itself."""

import os
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from allranks.rehearsing import gloo_lag
from allranks.rehearsing.gloo_lag import GlooAtRest
from tests.distributed.pool import Pools


def thread(folder: Path, name: str, state: str) -> Path:
    stat = folder / str(len(list(folder.iterdir()))) / "stat"
    stat.parent.mkdir()
    stat.write_text(f"17 ({name}) {state} 1 1")
    return stat


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(gloo_lag, "TASKS", tmp_path)
    return tmp_path


def test_an_operator_waits_until_gloo_sleeps(tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    thread(tasks, "python", "R")
    busy = [thread(tasks, name, "R") for name in ("pt_gloo_runloop", "gloo_tcp_loop")]
    yielded = []

    def give_way() -> None:
        yielded.append(len(busy))
        busy.pop().write_text("18 (pt_gloo_runloop) S 1 1")

    monkeypatch.setattr(os, "sched_yield", give_way)
    with GlooAtRest():
        assert torch.ones(2).sum() == 2
    assert yielded == [2, 1]


def test_a_thread_that_works_on_is_not_waited_for_for_ever(tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    thread(tasks, "pt_gloo_runloop", "R")
    monkeypatch.setattr(gloo_lag, "LIMIT_SECONDS", 0.01)
    with GlooAtRest():
        assert torch.ones(2).sum() == 2


def test_a_thread_that_has_ended_rests(tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it is asked for its name, before its file is opened, and while that is open."""
    (tasks / "0").mkdir()
    ended, lasting = (thread(tasks, "pt_gloo_runloop", "R") for _ in range(2))
    rest = GlooAtRest()
    ended.unlink()

    def read(stat: int, size: int, offset: int) -> bytes:
        raise ProcessLookupError(3, "No such process")

    monkeypatch.setattr(os, "pread", read)
    with rest:
        assert len(rest._stats) == 1 and lasting.exists()
        assert torch.ones(2).sum() == 2


def test_where_there_is_no_proc_nothing_is_waited_for(tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo_lag, "TASKS", tasks / "none")
    monkeypatch.setattr(os, "sched_yield", lambda: pytest.fail("it waited"))
    with GlooAtRest():
        assert torch.ones(2).sum() == 2


def test_a_thread_that_inherits_the_mode_does_not_wait_for_itself(tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HSDP's reductions end in gloo's thread, which copies there: each copy cost the whole limit."""
    stat = thread(tasks, "pt_gloo_runloop", "S")
    waited: list[int] = []
    monkeypatch.setattr(GlooAtRest, "wait", lambda rest: waited.append(threading.get_ident()))
    with GlooAtRest() as rest:
        torch.ones(2)
        other = threading.Thread(target=rest.__torch_dispatch__, args=(torch.ones, (), (2,)))
        other.start()
        other.join()
    assert stat.exists() and set(waited) == {threading.get_ident()}


def test_gloos_threads_are_found(pool: Pools) -> None:
    def found() -> tuple[int, float]:
        dist.barrier()
        with GlooAtRest() as rest:
            tensor = torch.ones(8)
            dist.all_reduce(tensor)
            return len(rest._stats), tensor.sum().item()

    for number, total in pool(2).run(found):
        assert number > 0 and total == 16.0
