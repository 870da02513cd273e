"""A worker process from its first line to its last: parent's death, environment, threads, the entry, the exit code."""

import faulthandler
import importlib
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, final

from allranks import fault_points
from allranks.failure import DONE, AgreedStop, log_file
from allranks.lifeline import die_with_parent
from allranks.observing import heartbeat
from allranks.process_end import end_process
from allranks.process_environment import HOSTS
from allranks.recorded import run_recorded
from allranks.surviving import preload

HELD_BACK = (signal.SIGTERM, signal.SIGUSR1)  # by the fork server; a closed terminal (SIGHUP) is the command's to hear
Entry = str | Callable[..., int | None]


@final
@dataclass(frozen=True, slots=True)
class WorkerStart:
    """What a worker is told; pickled by the agent into the worker's own pipe.

    Attributes:
        rank: its global rank.
        agent_pid: the process that runs the agent.
        environ: its environment, all of it: a fork server may have been started under another.
        folder: the agent's working directory.
        log_dir: where it records its failure.
        num_threads: threads for computing.
        entry: the function to run, or its name as "package.module:function", which spares the agent the import.
        args: the entry's arguments.
        beats: the memory in which it shows itself (monitor.py); "": nobody looks.
        slot: its part of that.
    """

    rank: int
    agent_pid: int
    environ: Mapping[str, str]
    folder: Path
    log_dir: Path
    num_threads: int
    entry: Entry
    args: tuple[Any, ...]
    beats: str = ""
    slot: int = 0


def run_worker(start: WorkerStart, reply: Connection | None) -> None:
    """Be one worker: call the entry (with `reply` as its last argument, if there is one) and exit with its code."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_BACK)
    die_with_parent(preload.REPORT.pid if preload.REPORT is not None else start.agent_pid)
    os.environ.clear()
    os.environ.update(start.environ)
    os.environ["OMP_NUM_THREADS"] = str(start.num_threads)  # read by whatever is imported from here on
    os.chdir(start.folder)
    faulthandler.enable()
    fault_points.join(os.environ, start.rank)
    if start.beats:
        log = log_file(start.log_dir, start.rank)
        heartbeat.join(start.beats, start.slot, log)
        if hosts := os.environ.pop(HOSTS, ""):  # nothing for processes that the user's code starts
            from allranks.observing.bad_links import watch_links

            watch_links(hosts.split(","), log)
    if "torch" in sys.modules:
        import torch

        torch.set_num_threads(start.num_threads)
    args = start.args if reply is None else (*start.args, reply)
    heart = heartbeat.current()
    step = (lambda: heart.step) if start.beats else (lambda: None)
    code = run_recorded(_call, (start.entry, args), rank=start.rank, folder=start.log_dir, step=step)
    end_process(code)


def _call(entry: Entry, args: tuple[Any, ...]) -> int:
    """The entry's exit code, of which the agent is told that the entry gave it."""
    if isinstance(entry, str):
        module, _, name = entry.partition(":")
        entry = getattr(importlib.import_module(module), name)
    assert callable(entry)
    try:
        code = entry(*args) or DONE
    except AgreedStop as stop:
        code = int(stop.code or DONE)
    heartbeat.current().finish(code)
    return code
