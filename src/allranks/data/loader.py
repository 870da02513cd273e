"""From plans to batches, in order: in the loop's own thread (workers=0) or in worker processes of torch's
DataLoader.
"""

import os
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from types import TracebackType
from typing import Any, Final

import torch
import torch.utils.data
from torch.utils.data import default_collate
from torch.utils.data._utils.pin_memory import pin_memory

from allranks import fault_points
from allranks.data.micro_step import MicroPlan, MicroStep, StepBatch, StepPlan
from allranks.data.resuming import WHILE_RANKS_STAY
from allranks.data.stream import DataStream
from allranks.data.worker_process import (
    Collate,
    ItemFetcher,
    Request,
    collate_noted,
    guard,
    lost_connection,
    worker_death,
)
from allranks.errors import ProcessError
from allranks.recorded import note_device_error
from allranks.task import Task
from allranks.verdict import Decision

CountTargets = Callable[[Any], int]

_PREFETCH: Final = 2  # torch's own default: requests that wait at each worker process


class Loader:
    """The batches of a DataStream, one StepBatch a step, from the stream's position at the first `next()` on.

    It runs ahead of the loop by what it prefetches and never moves `stream.position`: the loop calls
    `stream.take(step)`.

    Args:
        stream: the order, and this rank's part of it.
        collate: list of samples -> batch. One that is not torch's may draw random numbers, seeded by the
            position of what it is given.
        workers: processes that load. An iterable dataset uses one at most, because several would each read all of it.
        count_targets: batch -> number of targets; None: nobody counts, and MicroStep.targets is None.
        draws: the dataset draws random numbers: python's, numpy's and torch's generators are seeded before each item
            (about 7 us). False for datasets that draw none; their `__getitems__` is then used where they have one.
        pin: batches in page-locked memory, for copies to a GPU that do not wait.

    Raises (from `next()`):
        ProcessError: a worker process died. An error of the dataset passes through, with a note that names sample and
        position.
    """

    def __init__(
        self,
        stream: DataStream,
        *,
        collate: Collate = default_collate,
        workers: int = 0,
        count_targets: CountTargets | None = None,
        draws: bool = True,
        pin: bool = False,
    ) -> None:
        self.stream, self.collate, self.count_targets, self.draws = stream, collate, count_targets, draws
        self.workers = workers if stream.order == "map" else min(workers, 1)
        self.decisions = _decisions(stream, workers)
        self._collate_seed = _collate_seed(stream, collate, draws)
        self._pin = pin and torch.cuda.is_available()
        self._steps: Iterator[StepBatch] | None = None
        self._processes: Any = None
        self._closed = False

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> StepBatch:
        """The next step's micro-steps, loaded and collated; StopIteration after the last step or `close()`."""
        if self._closed:
            raise StopIteration
        if self._steps is None:
            self._steps = self._map_steps() if self.stream.order == "map" else self._iterable_steps()
        try:
            return next(self._steps)
        except BaseException as error:
            note_device_error(error)  # met where batches are pinned
            processes = [] if self._processes is None else self._processes._workers
            death = worker_death(error) or lost_connection(error, processes)
            death = self._end() or death
            if death is None:
                raise
            raise death from error

    def __enter__(self) -> "Loader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the worker processes; harmless when repeated."""
        self._end()

    def _end(self) -> ProcessError | None:
        """The same; that one has died by itself, which torch tells from a signal handler, here as well."""
        self._closed, self._steps = True, None
        processes, self._processes = self._processes, None
        if processes is not None:
            # torch ends them when the iterator is garbage-collected; a traceback that still holds it must not keep them
            # alive.
            try:
                processes._shutdown_workers()
            except RuntimeError as error:
                death = worker_death(error)
                if death is None:
                    raise
                return death
        return None

    def _map_steps(self) -> Iterator[StepBatch]:
        stream = self.stream
        assert stream.num_samples is not None
        draw_seed = stream.seed if self.draws else None
        fetcher = ItemFetcher(stream.dataset, self.collate, draw_seed, stream.num_samples, self._collate_seed)
        if self.workers == 0:
            for plan in stream.steps():
                yield self._step(
                    plan, [self._pinned(fetcher[micro.first, micro.indices]) for micro in plan.micro_plans]
                )
            return
        planned: deque[StepPlan] = deque()
        batches = self._start(fetcher, self._requests(planned), stream.cut.num_micro_steps())
        for batch in batches:
            plan = planned.popleft()
            yield self._step(plan, [batch, *(next(batches) for _ in plan.micro_plans[1:])])
            fault_points.reach("data.worker")

    def _requests(self, planned: deque[StepPlan]) -> Iterator[Request]:
        """One request a micro-step, so that the worker processes share a step; the plans wait in `planned` for their
        batches.
        """
        for plan in self.stream.steps():
            planned.append(plan)
            for micro in plan.micro_plans:
                yield micro.first, micro.indices

    def _iterable_steps(self) -> Iterator[StepBatch]:
        reader = _StepReader(self.stream, self.collate, self.draws, self._collate_seed)
        if self.workers == 0:
            for plan, batches in reader:
                yield self._step(plan, [self._pinned(batch) for batch in batches])
            return
        for plan, batches in self._start(reader, None, 1):
            yield self._step(plan, batches)
            fault_points.reach("data.worker")

    def _start(self, dataset: Any, requests: Iterator[Request] | None, at_once: int) -> Iterator[Any]:
        """Starts the worker processes; `at_once` requests make a step."""
        loader = torch.utils.data.DataLoader(
            dataset,
            batch_size=None,
            sampler=requests,
            collate_fn=_unchanged,
            num_workers=self.workers,
            prefetch_factor=max(_PREFETCH, -(-at_once // self.workers)),
            pin_memory=self._pin,
            worker_init_fn=partial(guard, os.getpid(), threading.current_thread() is threading.main_thread()),
            # Ours are forked by the fork server, whose method multiprocessing hands on: the loaders would then be the
            # children of another server, and take this process for dead.
            multiprocessing_context="fork" if sys.platform == "linux" else None,
            generator=torch.Generator(),  # else it draws from the global one
        )
        self._processes = iter(loader)
        return iter(self._processes)

    def _pinned(self, batch: Any) -> Any:
        return pin_memory(batch, "cuda") if self._pin else batch

    def _step(self, plan: StepPlan, batches: list[Any]) -> StepBatch:
        micro_steps = tuple(map(self._micro_step, plan.micro_plans, batches))
        return StepBatch(plan.step, plan.position, plan.size, micro_steps, plan.exhausted, plan.left_out)

    def _micro_step(self, plan: MicroPlan, batch: Any) -> MicroStep:
        count = self.count_targets
        targets = None if count is None else count(batch) if plan.weight else 0
        return MicroStep(batch, plan.weight, targets, plan.random_key, plan.positions, plan.samples)


class _StepReader(torch.utils.data.IterableDataset[tuple[StepPlan, list[Any]]]):
    """An iterable stream as whole, collated steps, so that one worker process can make them."""

    def __init__(self, stream: DataStream, collate: Collate, draws: bool, collate_seed: int | None) -> None:
        self.stream, self.collate, self.draws, self.collate_seed = stream, collate, draws, collate_seed

    def __iter__(self) -> Iterator[tuple[StepPlan, list[Any]]]:
        for plan, items in self.stream.read(self.draws):
            yield (
                plan,
                [
                    collate_noted(self.collate, chosen, micro.first, self.collate_seed)
                    for micro, chosen in zip(plan.micro_plans, items, strict=True)
                ],
            )


def came_from_loader(error: BaseException) -> bool:
    """Whether a Loader raised it: of the samples or of what puts them together, not of what is computed of them."""
    return any(frame.f_code is Loader.__next__.__code__ for frame, _ in traceback.walk_tb(error.__traceback__))


def _collate_seed(stream: DataStream, collate: Collate, draws: bool) -> int | None:
    """The seed of what `collate` draws; None where it needs none.

    It needs none where it is torch's. Nor after a map-style item that was seeded: what that left is its very own. But
    an iterable's last item is the same one for the micro-steps of all ranks, which would draw alike.
    """
    is_torchs = collate is default_collate or getattr(collate, "__func__", None) is Task.collate
    return None if is_torchs or (draws and stream.order == "map") else stream.seed


def _decisions(stream: DataStream, workers: int) -> tuple[Decision, ...]:
    """What was decided, for the banner."""
    found = []
    if stream.order != "map" and workers > 1:
        what = f"1 process loads instead of data.workers({workers})"
        found.append(Decision(what, "each would read all of an iterable dataset"))
    if stream.order == "sharded":
        because = f'the dataset declares order="sharded"; covered only {WHILE_RANKS_STAY}'
        found.append(Decision("every sample is covered, but in no fixed order", because))
    return tuple(found)


def _unchanged(batch: Any) -> Any:
    return batch
