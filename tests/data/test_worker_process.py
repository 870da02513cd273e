import contextlib
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import psutil
import pytest
import torch.utils.data

from allranks.data.cut import Cut
from allranks.data.loader import Loader
from allranks.data.stream import DataStream
from allranks.data.worker_process import ItemFetcher, collate_noted, lost_connection, worker_death
from allranks.errors import DataError, ProcessError


class Rows(torch.utils.data.Dataset[int]):
    """i -> 10 * i, one at a time or several at once; it notes how it was asked."""

    def __init__(self) -> None:
        self.asked: list[object] = []

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        self.asked.append(index)
        if index == 13:
            raise KeyError("no such row")
        return 10 * index

    def __getitems__(self, indices: list[int]) -> list[int]:
        self.asked.append(list(indices))
        if 13 in indices:
            raise KeyError("no such row")
        return [10 * index for index in indices]


def test_several_at_once_where_nothing_is_drawn() -> None:
    rows = Rows()
    assert ItemFetcher(rows, sum, None, 20)[4, [3, 1, 2]] == 60
    assert rows.asked == [[3, 1, 2]]


def test_one_at_a_time_where_items_draw() -> None:
    rows = Rows()
    assert ItemFetcher(rows, sum, 0, 20)[4, [3, 1, 2]] == 60
    assert rows.asked == [3, 1, 2]


def test_an_items_numbers_depend_on_seed_epoch_and_position_alone() -> None:
    class Drawing(Rows):
        def __getitem__(self, index: int) -> float:  # type: ignore[override]
            return float(torch.rand(()))

    fetcher = ItemFetcher(Drawing(), list, 0, 20)
    together = fetcher[4, [3, 1, 2]]
    assert together == [*fetcher[4, [3]], *fetcher[5, [1, 2]]]
    assert len({*together, *fetcher[24, [3]], *ItemFetcher(Drawing(), list, 1, 20)[4, [3]]}) == 5


@pytest.mark.parametrize(
    ("draw_seed", "note"),
    [
        (0, "allranks: while loading sample 13 (position 5) of Rows"),
        (None, "allranks: while loading one of the samples 3, 13, 2 (positions 4 to 6) of Rows"),
    ],
)
def test_an_error_says_which_sample(draw_seed: int | None, note: str) -> None:
    with pytest.raises(KeyError, match="no such row") as caught:
        ItemFetcher(Rows(), sum, draw_seed, 20)[4, [3, 13, 2]]
    assert caught.value.__notes__ == [note]


class Ending(torch.utils.data.Dataset[int]):
    """Its sample 13 asks an iterator for more than it has."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        return next(iter(())) if index == 13 else index


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("draws", [False, True])
def test_an_items_stop_iteration_is_no_end(workers: int, draws: bool) -> None:
    """The sample was missing in its batch, or the data ended there."""
    stream = DataStream(Ending(), cut=Cut(4), epochs=1, shuffle=False)
    with Loader(stream, workers=workers, draws=draws) as loader:
        for _ in range(3):
            next(loader)
        with pytest.raises(RuntimeError, match="StopIteration was raised") as caught:
            next(loader)
    told = str(caught.value) + " ".join(getattr(caught.value, "__notes__", []))
    assert "while loading sample 13 (position 13) of Ending" in told


def test_a_collates_stop_iteration_is_no_end() -> None:
    def collate(items: list[int]) -> int:
        return next(iter(items[:0]))

    with pytest.raises(RuntimeError, match="StopIteration was raised") as caught:
        collate_noted(collate, [1, 2], 7)
    assert caught.value.__notes__ == ["allranks: while collating 2 samples (positions 7 to 8)"]


def test_fewer_items_than_were_asked_for_are_refused() -> None:
    class Filtered(Rows):
        def __getitems__(self, indices: list[int]) -> list[int]:
            return [index for index in indices if index != 2]

    with pytest.raises(DataError, match=r"^Filtered.__getitems__ returned 2 items for 3 indices$"):
        ItemFetcher(Filtered(), list, None, 20)[4, [3, 1, 2]]


@pytest.mark.parametrize("first", [4, 24])
def test_a_collates_numbers_depend_on_seed_and_position_alone(first: int) -> None:
    """Positions count on over the epochs, so an epoch's batches differ from the last one's."""

    def draw(items: list[int]) -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    def drawn(seed: int, first: int) -> list[float]:
        return list(ItemFetcher(Rows(), draw, None, 20, collate_seed=seed)[first, [3, 1]])

    found = drawn(0, first)
    assert found == drawn(0, first)
    assert all(a != b for other in (drawn(1, first), drawn(0, 5)) for a, b in zip(found, other, strict=True))


def test_an_error_in_collate_says_where() -> None:
    with pytest.raises(TypeError) as caught:
        collate_noted(sum, ["a", "b"], 7)
    assert caught.value.__notes__ == ["allranks: while collating 2 samples (positions 7 to 8)"]


def test_a_death_is_told_from_other_errors() -> None:
    death = worker_death(RuntimeError("DataLoader worker (pid 12) is killed by signal: Killed. "))
    assert "DataLoader worker (pid 12) is killed" in str(death) and "lower data.workers" in str(death)
    assert worker_death(RuntimeError("DataLoader worker (pid(s) 1, 2) exited unexpectedly")) is not None
    assert worker_death(RuntimeError("Caught RuntimeError in DataLoader worker process 0.")) is None
    assert worker_death(ValueError("DataLoader worker (pid 12)")) is None


@pytest.fixture
def foreground() -> Iterator[None]:
    """Signals as they are in a terminal: what runs in a shell's background ignores Ctrl-C, and its children do; SIGHUP
    is ignored under nohup.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler), signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGINT, before[0])
    signal.signal(signal.SIGHUP, before[1])


@pytest.mark.usefixtures("foreground")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_signals_to_the_process_group_leave_the_workers_to_the_loop(number: signal.Signals) -> None:
    """Ctrl-C and a scheduler's SIGTERM reach every process, and the loop still has a step to finish and to save."""
    with Loader(DataStream(list(range(60)), cut=Cut(4), epochs=1), workers=1) as loader:
        next(loader)
        (worker,) = multiprocessing.active_children()
        assert worker.pid is not None
        # Sent by another process: the parent's own SIGTERM is what ends a worker.
        subprocess.run(["sh", "-c", f"kill -{int(number)} {worker.pid}"], check=True)
        assert len(list(loader)) == 14


def test_the_parents_own_sigterm_ends_a_worker() -> None:
    loader = Loader(DataStream(list(range(60)), cut=Cut(4), epochs=1), workers=1)
    next(loader)
    (worker,) = multiprocessing.active_children()
    worker.terminate()
    worker.join(30)
    assert worker.exitcode == 0
    loader.close()


ORPHANS = """
import ctypes, multiprocessing, os, time
from allranks.data.cut import Cut
from allranks.data.loader import Loader
from allranks.data.stream import DataStream

class Slow(list):
    def __getitem__(self, index):
        if index > 3:
            time.sleep(1)  # what was loaded before is sent by a thread
            os.write(1, b"in it\\n")  # at once: three processes write here
            PAUSE(1000)
        return index

loader = Loader(DataStream(Slow(range(100)), cut=Cut(2), epochs=1, shuffle=False), workers=2)
next(loader)
pids = " ".join(str(worker.pid) for worker in multiprocessing.active_children())
os.write(1, f"{pids}\\n".encode())
time.sleep(1000)
"""


@pytest.mark.sample(2)
@pytest.mark.parametrize("pause", ["time.sleep", "ctypes.PyDLL(None).sleep"])
def test_workers_die_with_their_parent_even_in_the_middle_of_an_item(pause: str, tmp_path: Path) -> None:
    """Also in one whose code is C and keeps Python's lock, so that no thread of the worker can look at its parent."""
    if sys.platform != "linux" and "PyDLL" in pause:
        pytest.skip("only Linux' kernel ends a process with its parent")
    script = tmp_path / "orphans.py"
    script.write_text(ORPHANS.replace("PAUSE", pause))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        try:
            told = {parent.stdout.readline() for _ in range(3)} - {"in it\n"}
            workers = [psutil.Process(int(pid)) for pid in " ".join(told).split()]
            assert len(workers) == 2
        finally:
            parent.kill()
        parent.wait()
        deadline = time.monotonic() + 60
        while any(alive(worker) for worker in workers) and time.monotonic() < deadline:
            time.sleep(0.05)
        left = [worker for worker in workers if alive(worker)]
        for worker in left:
            worker.kill()
        assert not left


class Descriptors(torch.utils.data.Dataset[int]):
    """How many descriptors of files whose paths begin so the process has that loads."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        open_here = 0
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # another thread of this process has closed it by now
                open_here += os.readlink(f"/proc/self/fd/{name}").startswith(self.prefix)
        return open_here


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows a process its descriptors")
@pytest.mark.parametrize(("used", "kept"), [(True, 0), (False, 2)])
def test_a_worker_lets_go_of_its_parents_gpus(
    used: bool, kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the parent has used CUDA; else they may be what the worker's own CUDA begins with."""
    prefix = str(tmp_path / "nvidia")
    monkeypatch.setattr("allranks.data.worker_process._GPUS", prefix)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: used)
    with Path(f"{prefix}0").open("w") as one, Path(f"{prefix}ctl").open("w") as other:
        stream = DataStream(Descriptors(prefix), cut=Cut(2), epochs=1)
        with Loader(stream, workers=1) as loader:
            assert [step.micro_steps[0].batch.tolist() for step in loader] == [[kept] * 2] * 2
        assert Descriptors(prefix)[0] == 2
        assert not one.closed and not other.closed


def test_workers_outlive_the_thread_that_starts_them() -> None:
    """A loop of one's own may take its first batch in a thread."""
    with Loader(DataStream(list(range(60)), cut=Cut(4), epochs=1), workers=1) as loader:
        thread = threading.Thread(target=next, args=(loader,))
        thread.start()
        thread.join()
        assert len(list(loader)) == 14


def alive(process: psutil.Process) -> bool:
    """Whether it runs; an orphan that nobody has reaped yet does not."""
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def test_a_tensor_that_is_not_received_is_the_death_of_its_sender() -> None:
    """torch hands each over by a connection to the process that made it."""
    context = multiprocessing.get_context("spawn")
    one, other = (context.Process(target=time.sleep, args=(600,), daemon=True) for _ in range(2))
    one.start()
    other.start()
    reset = ConnectionResetError(104, "Connection reset by peer")
    try:
        assert lost_connection(ValueError("the user's own"), [one]) is None and lost_connection(reset, []) is None
        assert lost_connection(EOFError(), [one]) is None, "it lives: the error is another's"
        other.kill()
        death = lost_connection(reset, [one, other])
        assert death is not None and f"data died (DataLoader worker (pid {other.pid}) has gone)" in str(death)
    finally:
        for process in (one, other):
            process.kill()
            process.join()


@pytest.mark.parametrize("told", ["DataLoader worker (pid 3) is killed by signal: Killed.", "another error"])
def test_a_death_that_is_told_while_all_are_ended_ends_nothing_else(told: str) -> None:
    class Ending:
        _workers: ClassVar[list[Any]] = []

        def _shutdown_workers(self) -> None:
            raise RuntimeError(told)

    def lost() -> Any:
        raise ConnectionResetError(104, "Connection reset by peer")

    for in_the_middle in (False, True):
        loader = Loader(DataStream(Rows(), cut=Cut(4), epochs=1), workers=1)
        loader._processes, loader._steps = Ending(), (lost() for _ in range(1))
        if "pid" in told and not in_the_middle:
            loader.close()
            continue
        with pytest.raises(ProcessError if "pid" in told else RuntimeError, match=r"data died|another error"):
            next(loader) if in_the_middle else loader.close()
