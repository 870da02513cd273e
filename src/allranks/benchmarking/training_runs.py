"""Runs of the real command, as a user types it, each in a process and a directory of its own."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from allranks.benchmarking.scaling import Point, Trained, read_trained
from allranks.config_sections import TrainConfig
from allranks.errors import AllranksError, ConfigError, ProcessError
from allranks.lifeline import die_with_parent
from allranks.process_environment import COMMAND
from allranks.run import Run
from allranks.units import format_seconds

REFUSED = AllranksError.exit_code
SECTION = "train."
LIMIT_SECONDS = 1800.0  # a first step that compiles, or an evaluation, writes no line for minutes
LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class Command:
    """What every run of a measurement has in common.

    Attributes:
        words: task, config file and keys, as they were typed.
        steps: of each run.
        device: as `--device` has it.
        threads: of each process; None: as `allranks train` decides.
        limit_seconds: how long a run may write no line into its journal before it is taken to hang.
    """

    words: tuple[str, ...]
    steps: int
    device: str
    threads: int | None
    limit_seconds: float = LIMIT_SECONDS

    def line(self, point: Point, directory: Path) -> list[str]:
        """The arguments of `allranks` for one run."""
        keys = [f"train.steps={self.steps}", f"train.global_batch={point.global_batch}"]
        spread = ["--layout", str(point.layout), "--nproc", str(point.layout.world_size), "--device", self.device]
        return ["train", *self.words, *keys, *point.keys, *spread, "--run", str(directory), "--json"]


def ask_config(words: Sequence[str], device: str) -> TrainConfig:
    """The task's resolved section `train`. Raises ConfigError with what `allranks train --show` says against it."""
    code, document, told = _allranks(["train", *words, "--device", device, "--show", "--json"], None)
    if code:
        raise ConfigError(_reason(document, told))
    config: Mapping[str, Any] = document["config"]
    section = {key.removeprefix(SECTION): value for key, value in config.items() if key.startswith(SECTION)}
    return TrainConfig.model_validate(section)


def measure_all(
    points: Sequence[Point],
    command: Command,
    repeats: int,
    *,
    tell: Callable[[int, Point, Trained], None] = lambda repeat, point, trained: None,
) -> list[dict[tuple[str, int], Trained]]:
    """Every run of `points` once a repeat, in turns: forth in one repeat, back in the next.

    Args:
        tell: told of each run when it is done.

    Returns:
        Of each repeat, what every run was.

    Raises:
        ConfigError: `allranks train` refused one before it started. ProcessError: one failed, or hung and was killed.
            Both name the run.
    """
    todo = list({point.run: point for point in points}.values())
    found: list[dict[tuple[str, int], Trained]] = []
    for repeat in range(repeats):
        found.append({})
        for point in todo[:: -1 if repeat % 2 else 1]:
            trained = found[-1][point.run] = train_once(point, command)
            tell(repeat, point, trained)
    return found


def train_once(point: Point, command: Command) -> Trained:
    """One run of the real command, to its end; its directory is gone afterwards. Raises as `measure_all` does."""
    with tempfile.TemporaryDirectory(prefix="allranks-scaling-") as folder:
        directory = Path(folder) / "run"
        journal = directory / "journal"
        try:
            code, document, told = _allranks(
                command.line(point, directory), command.threads, journal, command.limit_seconds
            )
        except TimeoutError:
            raise ProcessError(
                f"{point}: no line in its journal for {format_seconds(command.limit_seconds)}: taken to hang, and "
                "killed; a longer --limit waits longer"
            ) from None
        if code:
            kind = ConfigError if code == REFUSED else ProcessError
            raise kind(f"{point}: exit code {code}: {_reason(document, told)}")
        return read_trained(Run.open(directory))


def _allranks(
    arguments: Sequence[str], threads: int | None, journal: Path | None = None, limit_seconds: float = LIMIT_SECONDS
) -> tuple[int, dict[str, Any], str]:
    """`python -m allranks ARGUMENTS`: exit code, the document on its standard output, the rest of what it said.

    Raises TimeoutError, with the command killed, where nothing was written into `journal` for so long.
    """
    environment = os.environ if threads is None else os.environ | {"OMP_NUM_THREADS": str(threads)}
    with subprocess.Popen(
        [*COMMAND, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A benchmark that is killed leaves no training behind: the kernel's promise outlives exec.
        preexec_fn=partial(die_with_parent, os.getpid()) if sys.platform == "linux" else None,  # noqa: PLW1509
    ) as process:
        try:
            out, told = process.communicate() if journal is None else await_end(process, journal, limit_seconds)
        except BaseException:
            process.kill()  # its workers end with it
            raise
    try:
        document = json.loads(out)
    except ValueError:
        document = {}
    return process.returncode, document if isinstance(document, dict) else {}, told


def await_end(process: subprocess.Popen[str], journal: Path, limit_seconds: float) -> tuple[str, str]:
    """What the command said, once it has ended. Raises TimeoutError where `journal` has not grown for so long."""
    size, since = 0, time.monotonic()
    while True:
        try:
            return process.communicate(timeout=LOOK_SECONDS)
        except subprocess.TimeoutExpired:
            found = sum(path.stat().st_size for path in journal.glob("*.jsonl"))
            if found != size:
                size, since = found, time.monotonic()
            elif time.monotonic() - since > limit_seconds:
                raise TimeoutError from None


def _reason(document: Mapping[str, Any], told: str) -> str:
    """What went wrong in one line: the document's error, else the last line of what was said."""
    said = [line.strip() for line in str(document.get("error") or "").splitlines() if line.strip()]
    lines = said or [line.strip() for line in told.splitlines() if line.strip()]
    return lines[-1].removeprefix("allranks: error: ") if lines else "it said nothing"
