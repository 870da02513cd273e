"""What runs in a worker process that loads data, and what its death means to the loop."""

import contextlib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from allranks.data.plain_batch import plain_batch
from allranks.data.random_keys import collate_key, item_key, seed_all
from allranks.errors import DataError, ProcessError
from allranks.lifeline import die_with_parent

_DEATH = re.compile(r"DataLoader worker \(pid")
_WATCH_SECONDS = 0.5
_DEATH_SECONDS = 2.0  # from the end of a connection to that of the process that had it
_GPUS = "/dev/nvidia"

Collate = Callable[[list[Any]], Any]
Request = tuple[int, list[int]]


class ItemFetcher:
    """Loads and collates the items of one micro-step: in a worker process, or in the loop's own thread.

    A request is (global position of the first item, dataset indices of it and those that follow). With `draw_seed` the
    generators are seeded before each item, which therefore is asked for alone; without it a dataset's own
    `__getitems__` gets them all. `collate_seed` as in `collate_noted`.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Collate,
        draw_seed: int | None,
        num_samples: int,
        collate_seed: int | None = None,
    ) -> None:
        self.dataset, self.collate, self.draw_seed, self.num_samples = dataset, collate, draw_seed, num_samples
        self.collate_seed = collate_seed
        self._items_at_once = getattr(dataset, "__getitems__", None) if draw_seed is None else None

    def __getitem__(self, request: Request) -> Any:
        """The collated batch. An error of the user's code passes through, with a note on sample and position."""
        first, indices = request
        items: list[Any] = []
        try:
            if self.draw_seed is not None:
                for position, index in enumerate(indices, first):
                    seed_all(item_key(self.draw_seed, position // self.num_samples, position))
                    items.append(self.dataset[index])
            elif self._items_at_once is not None:
                items = self._items_at_once(indices)
            else:
                for index in indices:  # no map(), which takes an item's StopIteration for its own end
                    items.append(self.dataset[index])
        except StopIteration as error:
            raise _no_end(f"while loading {self._which(first, indices, len(items))}") from error
        except Exception as error:
            error.add_note(f"allranks: while loading {self._which(first, indices, len(items))}")
            raise
        if len(items) != len(indices):
            name = type(self.dataset).__name__
            raise DataError(f"{name}.__getitems__ returned {len(items)} items for {len(indices)} indices")
        return collate_noted(self.collate, items, first, self.collate_seed)

    def _which(self, first: int, indices: list[int], place: int) -> str:
        name = type(self.dataset).__name__
        if self._items_at_once is not None and len(indices) > 1:
            return f"one of the samples {_few(indices)} (positions {first} to {first + len(indices) - 1}) of {name}"
        return f"sample {indices[place]} (position {first + place}) of {name}"


def collate_noted(collate: Collate, items: list[Any], first: int, collate_seed: int | None = None) -> Any:
    """`collate(items)`; its errors carry the positions that it was given.

    With `collate_seed` the generators are seeded before it, from that and the position `first` of the first item alone.
    """
    if collate_seed is not None:
        seed_all(collate_key(collate_seed, first))
    try:
        return plain_batch(collate(items))
    except Exception as error:
        where = f"while collating {len(items)} samples (positions {first} to {first + len(items) - 1})"
        if isinstance(error, StopIteration):
            raise _no_end(where) from error
        error.add_note(f"allranks: {where}")
        raise


def _no_end(where: str) -> RuntimeError:
    """What StopIteration becomes, as in a generator (PEP 479): a loop over batches would take it for the data's end."""
    error = RuntimeError("StopIteration was raised, as by next() of an iterator that has no more")
    error.add_note(f"allranks: {where}")
    return error


def _few(indices: list[int]) -> str:
    return ", ".join(map(str, indices[:8])) + (", ..." if len(indices) > 8 else "")


def guard(parent: int, tied: bool, _worker: int) -> None:
    """Makes a worker process live exactly as long as its parent needs it (torch calls this first in each).

    Ctrl-C, a closed terminal, and a SIGTERM or SIGUSR1 sent to the whole process group are the loop's to answer: it
    finishes its step and saves, for which it needs its workers. So a worker ends by SIGTERM only if its parent sent it;
    and when its parent is gone.

    Args:
        parent: its process.
        tied: whether the parent's main thread starts the workers. Then the kernel ends this one with the parent,
            whatever it is in; else it looks for its parent twice a second, and would be ended with a mere thread of it.
    """
    _release_gpus()
    if tied and sys.platform == "linux":
        die_with_parent(parent)
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # Not on macOS: there a worker dies of any SIGTERM.
    who = getattr(signal, "sigtimedwait", None)
    if who is not None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_watch, args=(parent, who), name="allranks-data-guard", daemon=True).start()


def _release_gpus() -> None:
    """Close the descriptors of GPUs that a parent with CUDA has left to this process, which can do nothing with them.

    The driver keeps the parent's memory on a GPU for as long as anybody has them, also when the parent is gone.
    (Megatron-LM's data loaders do the same: github.com/NVIDIA/Megatron-LM/pull/3684.)
    """
    if sys.platform != "linux" or not torch.cuda._is_in_bad_fork():
        return
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one by which the folder was read
            if os.readlink(f"/proc/self/fd/{name}").startswith(_GPUS):
                os.close(int(name))


def _watch(parent: int, take: Callable[[set[int], float], Any] | None) -> None:
    while os.getppid() == parent:
        if take is None:
            time.sleep(_WATCH_SECONDS)
            continue
        received = take({signal.SIGTERM}, _WATCH_SECONDS)
        if received is not None and received.si_pid == parent:
            break
    os._exit(0)


def lost_connection(error: BaseException, processes: Sequence[BaseProcess]) -> ProcessError | None:
    """As `worker_death`, of an error that torch leaves as it is: a tensor was not received, because its sender died."""
    if not isinstance(error, ConnectionError | EOFError) or not processes:
        return None
    try:
        ended = wait([process.sentinel for process in processes], _DEATH_SECONDS)
    except RuntimeError as told:  # by torch's signal handler, in the meantime
        return worker_death(told)
    dead = next((process for process in processes if process.sentinel in ended), None)
    return None if dead is None else worker_death(RuntimeError(f"DataLoader worker (pid {dead.pid}) has gone"))


def worker_death(error: BaseException) -> ProcessError | None:
    """The one line for a data worker process that died, or None if `error` is something else.

    torch raises it from a signal handler too, so it can surface anywhere in the loop's own thread, not only in the
    loader.
    """
    if not isinstance(error, RuntimeError) or _DEATH.match(str(error)) is None:
        return None
    return ProcessError(
        f"a process that loads data died ({str(error).splitlines()[0]}): if the machine ran out of memory, lower "
        "data.workers; data.workers=0 loads in the training process itself and shows the cause"
    )
