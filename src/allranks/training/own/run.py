"""The Run directory of an own loop: opened by rank 0 for all, and written as that of a Task is."""

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from numbers import Real
from pathlib import Path
from typing import Any, final

import torch

from allranks import __version__, errors
from allranks.config import Config, changed_keys, is_resumable
from allranks.errors import AllranksError, RunError, TaskError
from allranks.observing.journal import Journal
from allranks.observing.memory import peak_memory_bytes
from allranks.observing.recorder import Recorder, StepRecord
from allranks.own_loops import OWN_LOOP, is_own_loop
from allranks.run import Run
from allranks.stepping.world import Processes
from allranks.training.logs import log_of_rank
from allranks.training.prepare import RUNS, config_digest
from allranks.training.saver import print_warning

# What the journal's line of a step has anyway.
WRITTEN = frozenset(
    (
        "t",
        "event",
        "step",
        "samples",
        "loss",
        "lr",
        "grad_norm",
        "ledger",
        "seconds",
        "tokens",
        "skipped",
        "memory_bytes",
    )
)


def open_own_run(processes: Processes, config: Config, directory: Path | None, change: Sequence[str]) -> Run:
    """The Run on every rank, with the lease at rank 0, begun once more; collective.

    Args:
        directory: a new one starts there, one that is there is continued; None: a new one below `runs/`.
        change: keys that may differ from those of the first start although they change what the run means.

    Raises:
        RunError: on every rank: the directory is no run of this script, was started with another configuration, is in
            use, or cannot be written.
    """
    found: dict[str, str] = {}
    run: Run | None = None
    if processes.rank == 0:
        try:
            run = _take(config, directory, change)
            found = {"path": str(run.path.resolve())}
        except AllranksError as error:
            found = {"error": str(error), "kind": type(error).__name__}
    found = processes.share(found)
    if "error" in found:
        raise getattr(errors, found["kind"])(found["error"])
    return run if run is not None else Run.open(Path(found["path"]))


def _take(config: Config, directory: Path | None, change: Sequence[str]) -> Run:
    script = script_file()
    if directory is not None and (directory / "run.json").exists():
        run = Run.open(directory)
        _check_same(run, script, config, change)
        run.acquire()
        run.write_config(config)
    else:
        facts: dict[str, Any] = {
            "task": OWN_LOOP if script is None else f"{script} {OWN_LOOP}",
            "allranks": __version__,
            "torch": torch.__version__,
            "argv": sys.argv,
            "config_digest": config_digest(config),
        }
        name = "own-loop" if script is None else script.stem
        run = Run.create(RUNS, name, config, facts, directory=directory)
        run.acquire()
    run.begin_attempt()
    return run


def _check_same(run: Run, script: Path | None, config: Config, change: Sequence[str]) -> None:
    mine = "" if script is None else script.name
    if not is_own_loop(run.task) or Path(run.task.removesuffix(OWN_LOOP).strip()).name != mine:
        raise RunError(f"{run.path} is a run of {run.task}, not of {mine or 'this program'}: name another directory")
    differing = {
        name: pair
        for name, pair in changed_keys(run.config(), config).items()
        if not is_resumable(name) and name not in change
    }
    if differing:
        told = ", ".join(f"{name} {before} -> {after}" for name, (before, after) in differing.items())
        raise RunError(
            f"{run.path} was started with another configuration: {told}; "
            f"keep it, or say join(..., change={sorted(differing)})"
        )


def script_file() -> Path | None:
    """The script that runs; None in a notebook, or where the function of a launch runs."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return None if file is None or "ALLRANKS_AGENT" in os.environ else Path(file).resolve()


@final
class Logbook:
    """What one rank writes while its own loop runs: journal and log, and rank 0 for all also TensorBoard."""

    def __init__(self, run: Run, processes: Processes, total_steps: int | None) -> None:
        self.run = run
        self._processes = processes
        self._recorder: Recorder | None = None
        with ExitStack() as stack:
            stack.callback(run.release)
            log_bytes = stack.enter_context(log_of_rank(run.log(processes.rank), rank=processes.rank))
            self._journal = Journal(run.journal(processes.rank), processes.rank, print_warning)
            stack.callback(self._journal.close)
            self._tell_start(total_steps, log_bytes)
            self._stack = stack.pop_all()

    def begin(self, step: int) -> None:
        """Steps come from here on, after `step` of earlier attempts."""
        if self._processes.rank == 0 and self._recorder is None:
            self._recorder = Recorder(
                self._journal,
                tensorboard=self.run.tensorboard,
                purge_from=step + 1 if self.run.attempts > 1 else None,
                memory=lambda: peak_memory_bytes(*self._processes.devices),
            )

    def record(self, record: StepRecord) -> None:
        """Rank 0: a step, to be written when its values are there."""
        if self._recorder is not None:
            self._recorder.record(record)

    def write(self, event: str, **fields: object) -> None:
        """Rank 0: any other event, after the steps that came before it."""
        if self._recorder is not None:
            self._recorder.write(event, **fields)
        elif self._processes.rank == 0:
            self._journal.write(event, t=None, **fields)

    def flush(self) -> None:
        """Wait until everything stands in the journal."""
        if self._recorder is not None:
            self._recorder.flush()

    def say(self, line: str) -> None:
        """Rank 0: one line on standard error."""
        if self._processes.rank == 0:
            print(line, file=sys.stderr, flush=True)

    def close(self, reason: str, error: BaseException | None, seconds: dict[str, float]) -> None:
        """The last line of the journal, and everything as it was before."""
        with self._stack:
            try:
                if self._recorder is not None:
                    self._recorder.close()
            finally:
                text = None if error is None else f"{type(error).__name__}: {error}"
                memory = peak_memory_bytes(*self._processes.devices)
                self._journal.write("end", reason=reason, seconds=seconds, memory_bytes=memory, error=text)
                if error is None:
                    self._journal.flush()

    def _tell_start(self, total_steps: int | None, log_bytes: int) -> None:
        processes, run = self._processes, self.run
        self._journal.write(
            "start",
            rank=processes.rank,
            local_rank=processes.environment.local_rank,
            world_size=processes.size,
            pid=os.getpid(),
            host=socket.gethostname(),
            device=str(processes.device),
            layout=str(processes.mesh.layout),
            attempt=run.attempts,
            total_steps=total_steps,
            log_bytes=log_bytes,
        )


def check_numbers(values: Mapping[str, object]) -> dict[str, float | torch.Tensor]:
    """Those that `world.log` adds to a step's line. Raises TaskError for anything but a number."""
    return {name: _check_number(name, value) for name, value in values.items() if name not in WRITTEN}


def _check_number(name: str, value: object) -> float | torch.Tensor:
    """What `world.log` may tell under `name`; a tensor is copied. Raises TaskError for anything but a number."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.detach().clone()  # read later, on another thread
    if isinstance(value, Real):  # numpy's, too
        return float(value)
    raise TaskError(f"world.log({name}=...): expected a number, not a {type(value).__name__}")
