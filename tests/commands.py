"""The real command in real processes, as tests start it and look at what it leaves."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from allranks.run import Run

PROGRAMS = Path(__file__).parent / "programs"
POINTS = str(PROGRAMS / "points.py")
LEFT_IN_MEMORY = re.compile(r"note: \S+ stays in the memory of this host: ")
LIMIT_SECONDS = 300.0  # a machine under load is slow; a hang is endless


def environment() -> dict[str, str]:
    """A user's environment, without what a test machine may have set."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("GLOO_", "OMP_", "RANK", "WORLD"))
    }
    return kept | {"PYTHONDONTWRITEBYTECODE": "1"}


def allranks(
    *arguments: str,
    folder: Path,
    check: int | None = 0,
    launcher: Sequence[str] = (),
    limit: float = LIMIT_SECONDS,
) -> subprocess.CompletedProcess[str]:
    """`LAUNCHER python -m allranks ARGUMENTS` in `folder`, to its end; its exit code has to be `check` (None: any)."""
    command = [*launcher, sys.executable, "-m", "allranks", *arguments]
    ran = subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=limit, check=False
    )
    ran.stderr = own_words(ran.stderr, folder)
    assert check is None or ran.returncode == check, f"exit code {ran.returncode}\n{ran.stdout}\n{ran.stderr}"
    broken = any(word.startswith(("task.fault=", "--kills", "--points")) for word in arguments)
    assert broken or "no progress for" not in ran.stderr, f"a hang that is none\n{ran.stderr}"
    return ran


def own_words(text: str, folder: Path) -> str:
    """What a command says, without its notes on what runs outside `folder` have left in this host's memory: tests that
    kill runs go on beside this one.
    """
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if str(folder) in line or not LEFT_IN_MEMORY.match(line))


@contextmanager
def running(*arguments: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """The same command, running in a process group of its own; killed with all its workers on leaving."""
    process = subprocess.Popen(
        [sys.executable, "-m", "allranks", *arguments],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def wait_for(condition: Callable[[], Any], what: str, seconds: float = LIMIT_SECONDS) -> Any:
    """The first true value of `condition`; an AssertionError naming `what` when it stays away."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.02)
    raise AssertionError(f"{what} did not happen within {seconds:.0f} s")


def seconds_of_restarts(directory: Path) -> list[float]:
    """From a finished step to the next one, for each time that an attempt began between them."""
    found, before, began = list[float](), None, False
    for event in Run.open(directory).events():
        if event["event"] == "start":
            began = True
        elif event["event"] == "step":
            if began and before is not None:
                found.append(round(event["t"] - before, 2))
            before, began = event["t"], False
    return found


def restart_seconds(directory: Path) -> float:
    """The longest of these times."""
    return max(seconds_of_restarts(directory))


def steps(directory: Path) -> dict[int, dict[str, Any]]:
    """Step number -> its newest journal line; {} before the run has one."""
    if not (directory / "run.json").is_file():
        return {}
    return {event["step"]: event for event in Run.open(directory).steps()}


def worker_pids(directory: Path) -> list[int]:
    """The processes that said `start` in the journals of a run."""
    run = Run.open(directory)
    return [event["pid"] for rank in run.ranks() for event in run.events(rank) if event["event"] == "start"]


def alive(pid: int) -> bool:
    """Whether a process still runs (a zombie does not)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def tensor_digests(directory: Path, step: int) -> dict[str, str]:
    """Name -> digest of every tensor in a checkpoint."""
    manifest = json.loads((directory / "checkpoints" / f"step-{step:08d}" / "manifest.json").read_text())
    return {name: record["digest"] for name, record in manifest["tensors"].items()}
