"""The programs of a folder that are Tasks, trained as users train them: which sentinel catches what, in which step.

Each is trained by `allranks train` with the words with which it is verified. Sentinels warn here and nothing ends, so
that a second finding shows, too. Then it is trained once more in processes in which a stopwatch stands around the calls
of the sentinels. Of a program that is not trained it is said why.
"""

import ast
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, final

from allranks.errors import AllranksError
from allranks.layout import num_processes
from allranks.process_environment import COMMAND, NO_GPUS, changed_environment
from allranks.request import TrainRequest
from allranks.run import Run
from allranks.surviving.launch import launch_without_gpus
from allranks.training.prepare import prepare
from allranks.verdict import FINDINGS
from allranks.verifying.corpus import CLEAN, Entry, read_run
from allranks.verifying.sentinel_costs import costs_of_rank, share
from allranks.verifying.sentinel_kinds import kinds_named

STEPS, EVERY = 24, 4
LIMIT_SECONDS = 600.0
DEFAULT_PROCESSES = 2
FIXED = (f"guard.digest_every={EVERY}", "guard.on_finding=warn", "evaluate.every=0", f"checkpoint.every={2 * EVERY}")
CAUGHT, REFUSED, MISSED, SILENT, FALSE_ALARM = "caught", "refused", "missed", "clean", "false alarm"
FAILED, NOT_WATCHED = "failed", "not watched"
OUTCOMES = (CAUGHT, REFUSED, MISSED, SILENT, FALSE_ALARM, FAILED, NOT_WATCHED)
RAW_LOOP = "a loop of its own, in which nothing of allranks runs: sentinels watch Tasks, and loops by allranks.join"
JOINED_LOOP = "a loop by allranks.join, which says itself when ranks are compared: run it, and its sentinels tell"


@final
@dataclass(frozen=True)
class Watched:
    """What sentinels said of one run of one program.

    Attributes:
        name: of the program.
        kind: its truth: "S1" to "S40", or "clean".
        run: the words with which it was trained.
        exit_code: of `allranks train`; None where it is not trained.
        sentinels: that found something, in their order.
        step: of the first finding; None where there is none.
        said: the first finding in words, how the run failed, or why there was none.
        seconds: that it took.
        what: is wrong with it, or what it is.
        kinds: that the findings name, in their order, the likeliest first.
        cost: of the sentinels in a step, as a part of its time, with rounds as rare as they are by default; None where
            that was not measured. Steps of small programs are short, so that it is a larger part of them.
        refused_for_it: whether it was not trained for its mistake, in the words of the program's docstring.
    """

    name: str
    kind: str
    run: str
    exit_code: int | None
    sentinels: tuple[str, ...] = ()
    step: int | None = None
    said: str = ""
    seconds: float = 0.0
    what: str = ""
    kinds: tuple[str, ...] = ()
    cost: float | None = None
    refused_for_it: bool = False

    @property
    def outcome(self) -> str:
        """caught, refused, missed; clean, false alarm; not watched.

        failed: it ended without a word of a sentinel; refused: so it did, and for its mistake, of which training tells.
        """
        if self.exit_code is None:
            return NOT_WATCHED
        clean = self.kind == CLEAN
        if self.sentinels:
            return FALSE_ALARM if clean else CAUGHT
        if self.exit_code:
            return REFUSED if self.refused_for_it and not clean else FAILED
        return SILENT if clean else MISSED

    @property
    def named(self) -> bool:
        """Whether a finding names the program's kind."""
        return self.outcome == CAUGHT and self.kind in self.kinds

    @property
    def named_first(self) -> bool:
        """Whether the first finding names it as the likeliest."""
        return self.outcome == CAUGHT and self.kinds[:1] == (self.kind,)

    def to_json(self) -> dict[str, Any]:
        """The fields, and what follows from them."""
        return asdict(self) | {"outcome": self.outcome, "named_first": self.named_first, "named": self.named}


def watch_all(entries: Sequence[Entry], steps: int = STEPS) -> Iterator[Watched]:
    """Every run of every Task among the programs, trained for `steps` steps; of each other program why it is not."""
    for entry in entries:
        because = not_watched(entry)
        if because:
            yield Watched(entry.name, entry.kind, "", None, said=because, what=entry.what)
        for words in () if because else entry.runs:
            yield watch(entry, words, steps)


def not_watched(entry: Entry) -> str:
    """Why no sentinel is asked about a program; "" of one that is trained."""
    if entry.unseen:
        return entry.unseen
    if is_task(entry.path):
        return ""
    return JOINED_LOOP if "allranks.join" in entry.path.read_text(encoding="utf-8") else RAW_LOOP


def is_task(path: Path) -> bool:
    """Whether a program defines a Task."""
    classes = (node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.ClassDef))
    bases = (base for one in classes for base in one.bases)
    return any((base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")) == "Task" for base in bases)


@changed_environment(NO_GPUS)  # the user's modules are imported in this process, too
def watch(entry: Entry, words: str, steps: int) -> Watched:
    """Train one program in one way, and once more to see what the sentinels cost."""
    request, _ = read_run(entry, words)
    command = [*COMMAND, "train", str(entry.path.resolve()), "--device", "cpu"]
    command += ["--layout", request.layout] if request.layout is not None else []
    command += ["--nproc", str(request.nproc)] if request.nproc is not None else []
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="allranks-watched-") as folder:
        run = Path(folder) / "run"
        settings = (f"train.steps={steps}", *FIXED, *request.overrides)
        words_of_run = (*settings, "--run", str(run))
        done = subprocess.run(
            [*command, *words_of_run], check=False, capture_output=True, text=True, timeout=LIMIT_SECONDS, cwd=folder
        )
        found = list(_findings(run))
    seconds = round(time.monotonic() - begun, 1)
    cost = None if done.returncode else cost_of(replace(request, overrides=(*settings, "track.tensorboard=false")))
    last = (done.stderr.strip().splitlines() or [""])[-1] if done.returncode else ""
    return Watched(
        name=entry.name,
        kind=entry.kind,
        run=words,
        exit_code=done.returncode,
        sentinels=tuple(dict.fromkeys(FINDINGS[event["kind"]] for event in found)),
        step=found[0]["step"] if found else None,
        said=found[0]["what"] if found else last,
        seconds=seconds,
        what=entry.what,
        kinds=tuple(dict.fromkeys(kind for event in found for kind in kinds_named(event["kind"], event["what"]))),
        cost=cost,
        refused_for_it=bool(done.returncode and entry.refused and entry.refused in done.stderr),
    )


def cost_of(request: TrainRequest) -> float | None:
    """What the sentinels take of a step of this training, as a part of it; None where it cannot be measured."""
    try:
        nproc = request.nproc or num_processes(prepare(request).config.layout, DEFAULT_PROCESSES)
        row = launch_without_gpus(costs_of_rank, request, nproc=nproc)[0]
    except Exception:  # the user's code may raise anything; that the run itself went well is said elsewhere
        return None
    return None if row is None else round(share(row), 6)


def _findings(run: Path) -> Iterator[dict[str, Any]]:
    try:
        yield from (event for event in Run.open(run).events() if event.get("kind") in FINDINGS)
    except AllranksError:
        return  # it was refused before there was a run


def count(watched: Iterable[Watched]) -> dict[str, float]:
    """How many runs had each outcome, the latest step of a first finding, how many are named rightly, the median cost.

    The cost is a part of a step, in percent; it is left out where none was measured.
    """
    every = list(watched)
    found: dict[str, float] = {name: sum(one.outcome == name for one in every) for name in OUTCOMES}
    found["latest step"] = max((one.step for one in every if one.outcome == CAUGHT and one.step), default=0)
    found["named rightly"] = sum(one.named for one in every)
    found["of them first"] = sum(one.named_first for one in every)
    costs = [one.cost for one in every if one.cost is not None]
    return found | ({"median cost in % of a step": round(100 * statistics.median(costs), 2)} if costs else {})
