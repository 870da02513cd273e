"""The real `allranks train`, as a trial runs it: with the fault points armed, and again until it is done.

A fault that ends the run instead of an attempt (an error of the program, a full disk) is followed by what its user
would do: `allranks train --resume`.
"""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

import psutil

from allranks.fault_points import VARIABLE, read_fired
from allranks.process_environment import COMMAND

GONE_SECONDS = 2.0  # law 15
LOOK_SECONDS = 0.05
CACHES = ("torchinductor_",)  # torch's own folder of compiled kernels, one for each user, which is to stay


@final
@dataclass(frozen=True, slots=True)
class Command:
    """One `allranks train`: when it began and ended (Unix seconds), its exit code, and the file with all it printed."""

    began: float
    ended: float
    code: int
    log: Path

    def lines(self) -> list[str]:
        """What it printed."""
        return self.log.read_text(encoding="utf-8", errors="replace").splitlines()


@final
@dataclass(frozen=True, slots=True)
class Left:
    """What commands have left behind: processes, and names in their temporary folder."""

    processes: tuple[str, ...] = ()
    temporary: tuple[str, ...] = ()


def run_until_done(
    first: Sequence[str], again: Sequence[str], points: Path, logs: Path, name: str
) -> tuple[list[Command], Left]:
    """Run `allranks FIRST`, and `allranks AGAIN` after every end that a new fault has brought about; all of them.

    Args:
        points: the trial's folder (fault_points.py).
        logs: gets NAME-1.log, NAME-2.log ...
    """
    # Short: sockets are made in it, whose names may have 107 letters.
    temporary = Path(tempfile.mkdtemp(prefix="allranks-chaos-"))
    commands: list[Command] = []
    try:
        while True:
            fired = len(read_fired(points))
            log = logs / f"{name}-{len(commands) + 1}.log"
            commands.append(_run(again if commands else first, points, temporary, log))
            if commands[-1].code == 0 or len(read_fired(points)) == fired:
                names = sorted(path.name for path in temporary.iterdir() if not path.name.startswith(CACHES))
                return commands, Left(_living(points), tuple(names))
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _run(arguments: Sequence[str], points: Path, temporary: Path, log: Path) -> Command:
    environ = os.environ | {VARIABLE: str(points), "TMPDIR": str(temporary)}
    began = time.time()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*COMMAND, *arguments],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            code = process.wait()
        finally:
            if process.poll() is None:
                process.kill()  # its workers die with it
                process.wait()
    return Command(began, time.time(), code, log)


def _living(points: Path) -> tuple[str, ...]:
    """The processes that these commands started and that are there after the time they have to go."""
    deadline = time.monotonic() + GONE_SECONDS
    while found := _started_for(points):
        if time.monotonic() >= deadline:
            return tuple(found)
        time.sleep(LOOK_SECONDS)
    return ()


def _started_for(points: Path) -> list[str]:
    """Every descendant has the variable of the trial in its environment, whoever is its parent by now."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(VARIABLE) == str(points) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{process.pid} {' '.join(process.cmdline())[:80]}")
    return found
