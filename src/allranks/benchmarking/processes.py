"""The processes of a measurement: spawned, watched, and ended whatever happens."""

import contextlib
import json
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import (
    ProcessContext,
    ProcessExitedException,
    ProcessRaisedException,
    start_processes,
)

from allranks.benchmarking.measure import Side, num_steps, take_turns, warm_up
from allranks.benchmarking.ours import our_steps
from allranks.benchmarking.raw import raw_steps
from allranks.benchmarking.strategies import LOSS_TOLERANCE, Case, Measured, is_beside_ddp, loss_difference
from allranks.benchmarking.subject import make_config
from allranks.errors import ProcessError
from allranks.layout import Layout
from allranks.lifeline import die_with_parent
from allranks.observing.journal import Journal
from allranks.observing.memory import peak_memory_bytes
from allranks.observing.recorder import Recorder
from allranks.parallel.backend import DeviceChoice, choose_device, start, stop
from allranks.process_environment import LOOPBACK, ProcessEnvironment

CASE_SECONDS = 300.0
"""After which a case that has not ended is given up, and a collective that a peer does not join."""

LOOK_SECONDS = 0.2
TINY = "tiny"


def measure_all(
    cases: Sequence[Case], turns: int, size: str = "10m", *, tell: Callable[[Case], None] = lambda case: None
) -> list[tuple[Case, Measured]]:
    """Measure `cases`, those with as many processes in the same ones.

    Args:
        cases: in the order of their world sizes.
        turns: of each side.
        tell: told of each case when it is done.

    Raises:
        ProcessError: a process ended, or the limit of time was reached; names the case.
    """
    found: list[tuple[Case, Measured]] = []
    for world_size, together in groupby(cases, key=lambda case: case.layout.world_size):
        for case, measured in _measure_together(list(together), world_size, turns, size):
            tell(case)
            found.append((case, measured))
    return found


def _measure_together(cases: list[Case], world_size: int, turns: int, size: str) -> Iterator[tuple[Case, Measured]]:
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder)
        arguments = (os.getpid(), world_size, cases, turns, size, _free_port(), results)
        spawned = start_processes(_work, arguments, world_size, join=False, daemon=True, start_method="spawn")
        try:
            for index, case in enumerate(cases):
                yield case, _wait_for(results / f"{index}.json", case, spawned)
            _join(spawned, time.monotonic() + CASE_SECONDS, cases[-1])
        finally:
            for process in spawned.processes:
                process.kill()
                process.join()


def _wait_for(path: Path, case: Case, spawned: ProcessContext) -> Measured:
    deadline = time.monotonic() + CASE_SECONDS
    while not path.exists():
        _join(spawned, deadline, case, once=True)
    document = json.loads(path.read_text())
    turns, beside = ([(first, second) for first, second in document[name]] for name in ("turns", "beside_ddp"))
    return Measured(turns, tuple(document["memory"]), tuple(document["losses"]), beside)


def _join(spawned: ProcessContext, deadline: float, case: Case, *, once: bool = False) -> None:
    """Wait for the end of the processes, or look once. Raises ProcessError when one failed or time is over."""
    what = f"{case.strategy} on {case.layout.world_size} processes"
    while True:
        try:
            ended = spawned.join(timeout=LOOK_SECONDS)
        except (ProcessRaisedException, ProcessExitedException) as error:
            reason = str(error).strip().splitlines()[-1]
            raise ProcessError(f"{what} could not be measured: {reason}") from error
        if time.monotonic() > deadline:
            raise ProcessError(f"{what} could not be measured: no end after {CASE_SECONDS:.0f} s; try fewer --turns")
        if ended or once:
            return


def _work(
    rank: int, parent: int, world_size: int, cases: list[Case], turns: int, size: str, port: int, results: Path
) -> None:
    """One process: every case in turn; rank 0 writes what was found."""
    die_with_parent(parent)
    torch.set_num_threads(max(1, (psutil.cpu_count(logical=False) or 1) // world_size))
    environment = ProcessEnvironment(
        "environment", rank, rank, world_size, world_size, master_addr=LOOPBACK, master_port=port
    )
    choice = choose_device(environment, "auto", "auto")
    choice = start(environment, choice, CASE_SECONDS)
    for index, case in enumerate(cases):
        measured = measure(case, turns, size, environment, choice)
        if rank == 0:
            draft = results / f"{index}.draft"
            draft.write_text(json.dumps(asdict(measured)))
            draft.rename(results / f"{index}.json")
    stop()


def measure(case: Case, turns: int, size: str, environment: ProcessEnvironment, choice: DeviceChoice) -> Measured:
    """Both sides of one case in this process; collective. Not timed where the first losses differ.

    What is sharded over all processes takes turns with our ddp, too, once its memory has been measured.
    """
    layout, device, beside_ddp = case.layout, choice.device, is_beside_ddp(case.layout)
    steps = num_steps(turns, 2 if beside_ddp else 1)
    seed = make_config(layout, steps).train.seed

    def barrier() -> None:
        if environment.world_size > 1:
            dist.barrier()

    with _recorder(environment.rank, device) as recorder:

        def finish() -> None:
            if recorder is not None:
                recorder.flush()
            if device.type == "cuda":
                torch.cuda.synchronize()

        def raw_side(size: str) -> Side:
            return warm_up(lambda: raw_steps(layout, size, steps, seed, device), device)

        def our_side(size: str, layout: Layout = layout) -> Side:
            return warm_up(lambda: our_steps(layout, size, steps, environment, choice, recorder), device)

        for side in (raw_side, our_side):
            side(TINY)  # what torch imports on the way is in nobody's memory
        first = raw_side(size).peak_bytes, our_side(size).peak_bytes
        raw, ours = raw_side(size), our_side(size)
        # The least of two: tables of the interpreter that grow meanwhile (its strings': by 3.8 MB) are nobody's.
        least = list(map(min, first, (raw.peak_bytes, ours.peak_bytes)))
        peaks = torch.tensor(least, device=device)
        if environment.world_size > 1:
            dist.all_reduce(peaks, dist.ReduceOp.MAX)
        raw_bytes, our_bytes = peaks.tolist()
        untimed = Measured([], (raw_bytes, our_bytes), (raw.first_loss, ours.first_loss))
        if loss_difference(untimed) > LOSS_TOLERANCE:
            return untimed
        pairs = take_turns(raw.steps, ours.steps, turns, barrier=barrier, finish=finish)
        if not beside_ddp:
            return replace(untimed, turns=pairs)
        ddp = our_side(size, Layout(dp_replicate=layout.dp))
        beside = take_turns(ddp.steps, ours.steps, turns, barrier=barrier, finish=finish)
    return replace(untimed, turns=pairs, beside_ddp=beside)


@contextlib.contextmanager
def _recorder(rank: int, device: torch.device) -> Iterator[Recorder | None]:
    if rank != 0:
        yield None
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        journal = Journal(folder / "journal.jsonl", 0)
        board = folder / "tensorboard"
        inline = device.type == "cpu"
        recorder = Recorder(journal, tensorboard=board, memory=lambda: peak_memory_bytes(device), inline=inline)
        try:
            yield recorder
        finally:
            recorder.close()
            journal.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])
