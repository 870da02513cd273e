"""The programs of a folder that are Tasks, trained as users train them: which sentinel catches what, in which step.

Each is trained by `allranks train` with the words with which it is verified. Sentinels warn here and nothing ends, so
that a second finding shows, too. A program with a loop of its own is left out: those of the corpus are raw torch, which
nothing watches (sentinels watch a loop that calls `world.step`).
"""

import ast
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from allranks.errors import AllranksError
from allranks.run import Run
from allranks.verdict import FINDINGS
from allranks.verifying.corpus import Entry, read_run

STEPS, EVERY = 24, 4
LIMIT_SECONDS = 600.0
FIXED = (f"guard.digest_every={EVERY}", "guard.on_finding=warn", "evaluate.every=0", f"checkpoint.every={2 * EVERY}")
CAUGHT, MISSED, SILENT, FALSE_ALARM, FAILED = "caught", "missed", "clean", "false alarm", "failed"


@final
@dataclass(frozen=True)
class Watched:
    """What sentinels said of one run of one program.

    Attributes:
        name: of the program.
        kind: its truth: "S1" to "S40", or "clean".
        run: the words with which it was trained.
        exit_code: of `allranks train`.
        sentinels: that found something, in their order.
        step: of the first finding; None where there is none.
        said: the first finding in words, or how the run failed.
        seconds: that it took.
        what: is wrong with it, or what it is.
    """

    name: str
    kind: str
    run: str
    exit_code: int
    sentinels: tuple[str, ...] = ()
    step: int | None = None
    said: str = ""
    seconds: float = 0.0
    what: str = ""

    @property
    def outcome(self) -> str:
        """caught, missed; clean, false alarm; failed: it ended without a word of a sentinel."""
        clean = self.kind == "clean"
        if self.sentinels:
            return FALSE_ALARM if clean else CAUGHT
        if self.exit_code:
            return FAILED
        return SILENT if clean else MISSED

    def to_json(self) -> dict[str, Any]:
        """The fields, and the outcome."""
        return asdict(self) | {"outcome": self.outcome}


def watch_all(entries: Sequence[Entry], steps: int = STEPS) -> Iterator[Watched]:
    """Every run of every Task among the programs, trained for `steps` steps, in their order."""
    for entry in entries:
        for words in entry.runs if is_task(entry.path) else ():
            yield watch(entry, words, steps)


def is_task(path: Path) -> bool:
    """Whether a program defines a Task."""
    classes = (node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.ClassDef))
    bases = (base for one in classes for base in one.bases)
    return any((base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")) == "Task" for base in bases)


def watch(entry: Entry, words: str, steps: int) -> Watched:
    """Train one program in one way."""
    request, _ = read_run(entry, words)
    command = [sys.executable, "-m", "allranks", "train", str(entry.path.resolve()), "--device", "cpu"]
    command += ["--layout", request.layout] if request.layout is not None else []
    command += ["--nproc", str(request.nproc)] if request.nproc is not None else []
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="allranks-watched-") as folder:
        run = Path(folder) / "run"
        words_of_run = (f"train.steps={steps}", *FIXED, *request.overrides, "--run", str(run))
        done = subprocess.run(
            [*command, *words_of_run], check=False, capture_output=True, text=True, timeout=LIMIT_SECONDS, cwd=folder
        )
        found = list(_findings(run))
    last = (done.stderr.strip().splitlines() or [""])[-1] if done.returncode else ""
    return Watched(
        name=entry.name,
        kind=entry.kind,
        run=words,
        exit_code=done.returncode,
        sentinels=tuple(dict.fromkeys(FINDINGS[event["kind"]] for event in found)),
        step=found[0]["step"] if found else None,
        said=found[0]["what"] if found else last,
        seconds=round(time.monotonic() - begun, 1),
        what=entry.what,
    )


def _findings(run: Path) -> Iterator[dict[str, Any]]:
    try:
        yield from (event for event in Run.open(run).events() if event.get("kind") in FINDINGS)
    except AllranksError:
        return  # it was refused before there was a run


def count(watched: Iterable[Watched]) -> dict[str, int]:
    """How many runs had each outcome, and the latest step of a first finding."""
    every = list(watched)
    outcomes = {
        name: sum(one.outcome == name for one in every) for name in (CAUGHT, MISSED, SILENT, FALSE_ALARM, FAILED)
    }
    steps = [one.step for one in every if one.outcome == CAUGHT and one.step is not None]
    return outcomes | {"latest step": max(steps, default=0)}
