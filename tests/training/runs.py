"""Whole runs in the test's own process: the real worker, as the only one of its world, without a command around it."""

import json
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from allranks.errors import AllranksError
from allranks.request import TrainRequest
from allranks.run import Run
from allranks.surviving.aside import call_spawned
from allranks.training.prepare import open_run, prepare
from allranks.training.stop import SIGNALS
from allranks.training.worker import Assignment, work
from tests.distributed.pool import Pools

TASKS = "tests.training.tasks"
QUICK = ("train.global_batch=10", "optimizer.lr=0.05", "track.tensorboard=false")


def train(
    task: str | None,
    *overrides: str,
    run: Path | None = None,
    resume: Path | None = None,
    change: Sequence[str] = (),
    memory: Path | None = None,
    first_attempt: int | None = None,
) -> int:
    """What `allranks train` and its one worker do; the exit code.

    `task`: the name of a class in tests.training.tasks, or a spec. `memory`: a directory for copies of the state;
    `first_attempt`: the command's.
    """
    spec = spec_of(task)
    request = TrainRequest(task_spec=spec, overrides=overrides, run=run, resume=resume, change=tuple(change))
    prepared = prepare(request)
    opened = open_run(prepared, request)
    opened.begin_attempt()
    try:
        with signals_kept():
            return work(Assignment(request, opened.path.resolve(), memory=memory, first_attempt=first_attempt))
    finally:
        opened.release()


def spec_of(task: str | None) -> str | None:
    """Of the name of a class in tests.training.tasks; a spec is one already."""
    return f"{TASKS}:{task}" if task is not None and task.isidentifier() else task


def start(task: str, run: Path, *overrides: str, memory: Path | None = None, first_attempt: int | None = None) -> int:
    """A new run with small settings; the exit code."""
    return train(task, *QUICK, *overrides, run=run, memory=memory, first_attempt=first_attempt)


def train_outside(
    pool: Pools,
    world_size: int,
    task: str | None,
    *overrides: str,
    run: Path | None = None,
    resume: Path | None = None,
    layout: str | None = None,
    memory: Path | None = None,
    plans: bool = False,
) -> list[int | str]:
    """The same as the ranks of an outside launcher, each in a process of its own: exit codes, or errors of ours.

    `plans`: as the command has it, rank 0 plans the layout of a run that names none; else it is ddp.
    """
    spec = spec_of(task)
    request = TrainRequest(task_spec=spec, overrides=overrides, run=run, resume=resume, layout=layout)
    found: list[int | str] = pool(world_size).run_alone(_work_outside, request, memory, plans, timeout=120.0)
    return found


def _work_outside(request: TrainRequest, memory: Path | None, plans: bool) -> int | str:
    try:
        return work(Assignment(request, memory=memory, aside=call_spawned if plans else None))
    except AllranksError as error:
        return f"{type(error).__name__}: {error}"


@contextmanager
def signals_kept() -> Iterator[None]:
    """Put back what the worker does with signals and with torch's switches: a process of its own would have ended."""
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        torch.use_deterministic_algorithms(deterministic)


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    """Rank 0's events of one kind."""
    return [event for event in Run.open(run).events() if event["event"] == kind]


def losses(run: Path) -> dict[int, tuple[float, float, str]]:
    """Step -> (loss, gradient norm, ledger)."""
    return {event["step"]: (event["loss"], event["grad_norm"], event["ledger"]) for event in Run.open(run).steps()}


def manifest(run: Path, step: int) -> dict[str, Any]:
    """The manifest of a run's checkpoint."""
    path = run / "checkpoints" / f"step-{step:08d}" / "manifest.json"
    read: dict[str, Any] = json.loads(path.read_text())
    return read


def digests(run: Path, step: int) -> dict[str, str]:
    """Name -> digest of every tensor in a run's checkpoint."""
    return {name: record["digest"] for name, record in manifest(run, step)["tensors"].items()}


def saved(run: Path) -> list[int]:
    """The steps of a run's checkpoints."""
    return sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-????????"))


def same_run(left: Path, right: Path, step: int) -> None:
    """Two runs are bitwise the same in every step, and in their checkpoints of `step`."""
    assert losses(left) == losses(right) and losses(left)
    assert digests(left, step) == digests(right, step)


def damage(run: Path, step: int) -> Path:
    """Change a byte in the middle of a checkpoint's tensors; its directory."""
    checkpoint = run / "checkpoints" / f"step-{step:08d}"
    flip_a_byte(checkpoint)
    return checkpoint


def flip_a_byte(checkpoint: Path, name: str = "*.safetensors") -> None:
    """Change a byte in the middle of its tensors, in the first file of that name."""
    file = next(iter(sorted(checkpoint.glob(name))))
    content = bytearray(file.read_bytes())
    content[-5] ^= 0xFF
    file.write_bytes(content)
