"""What plan_local.py makes of its measurements: the rows with their predictions, the choices, the stored document."""

import statistics
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from local_cases import choice_of, chosen_cases
from local_steps import PRECISION, Case, task_of

from allranks.benchmarking.machine import source_commit
from allranks.cluster import Cluster
from allranks.model_profile import ModelProfile
from allranks.plan import StepTime
from allranks.planning.cluster_file import read_cluster, render_cluster
from allranks.planning.estimate import estimate
from allranks.process_environment import num_cores
from allranks.stepping.profile import trace_task

GOALS = {"error": 0.15, "slower": 0.05}
"""At most: |predicted / measured - 1| of a step on average, and by how much the chosen layout is slower than the best
measured one, less one."""
Chosen = Mapping[tuple[int, str], Case]
"""(Processes, model) -> what the planner's search chooses."""


@dataclass(frozen=True, slots=True)
class Row:
    """One layout of one model on a number of processes.

    Attributes:
        micro_batch: samples of a forward.
        turns_ms: of each turn, of the slowest process by the clock; measured_ms: their median.
        busy_ms: the median of the processor's time, of the process that had the most; shared_busy_ms: that where every
            process has a core, the longer the more of them share one.
        error: predicted by measured, less one.
    """

    processes: int
    model: str
    layout: str
    context: str
    micro_batch: int
    predicted_ms: float
    measured_ms: float
    error: float
    busy_ms: float
    shared_busy_ms: float
    turns_ms: tuple[float, ...]
    parts_ms: Mapping[str, float]

    @property
    def case(self) -> tuple[str, str, int]:
        """What makes it another one than the others of its model."""
        return self.layout, self.context, self.micro_batch

    @property
    def fastest_ms(self) -> float:
        """Of all turns."""
        return min(self.turns_ms)

    def with_prediction(self, time: StepTime) -> "Row":
        """The same beside what is predicted now."""
        predicted = time.total * 1e3
        parts = {name: seconds * 1e3 for name, seconds in asdict(time).items() if seconds}
        return replace(self, predicted_ms=predicted, error=predicted / self.measured_ms - 1, parts_ms=parts)


def profiles_of(models: Iterable[str]) -> dict[str, ModelProfile]:
    """By model: its trace."""
    return {model: trace_task(task_of(model), PRECISION) for model in dict.fromkeys(models)}


def predict(case: Case, nproc: int, profile: ModelProfile, cluster: Cluster) -> StepTime:
    """A step of a case."""
    return estimate(profile, cluster, choice_of(case, nproc)).time


def measured_row(case: Case, nproc: int, seconds: Sequence[Sequence[float]], busy: Sequence[Sequence[float]]) -> Row:
    """The row of a case without a prediction.

    Args:
        seconds, busy: of each process, of each turn.
    """
    turns = tuple(round(max(turn) * 1e3, 3) for turn in zip(*seconds, strict=True))
    worked = max(statistics.median(process) for process in busy) * 1e3
    shared = worked * max(1.0, nproc / num_cores())
    what = (nproc, case.model, case.layout, case.context, case.micro_batch)
    return Row(*what, 0.0, statistics.median(turns), -1.0, worked, shared, turns, {})


def choices(rows: Sequence[Row], chosen: Chosen) -> list[dict[str, object]]:
    """Of each number of processes and model: the layout that the planner's search chooses, the one of the shortest
    measured step, and how much slower the first is than the second; None where the first was not measured."""
    found: list[dict[str, object]] = []
    for (processes, model), case in chosen.items():
        own = [row for row in rows if (row.processes, row.model) == (processes, model)]
        if not own:
            continue
        best = min(own, key=lambda row: row.measured_ms)
        wanted = (case.layout, case.context, case.micro_batch)
        taken = next((row for row in own if row.case == wanted), None)
        found.append(
            {
                "processes": processes,
                "model": model,
                "chosen": {"layout": case.layout, "context": case.context, "micro_batch": case.micro_batch},
                "best": {"layout": best.layout, "context": best.context, "micro_batch": best.micro_batch},
                "slower": taken and taken.measured_ms / best.measured_ms - 1,
                "slower_by_fastest": taken and taken.fastest_ms / min(row.fastest_ms for row in own) - 1,
                "busier": taken and taken.busy_ms / min(row.busy_ms for row in own) - 1,
            }
        )
    return found


def judged(rows: Sequence[Row], chosen: Chosen) -> dict[str, object]:
    """What follows from the rows and the choices, as it stands in the document."""
    sizes = dict.fromkeys(row.processes for row in rows)
    errors = {str(size): [abs(row.error) for row in rows if row.processes == size] for size in sizes}
    busy = {
        str(size): [abs(row.predicted_ms / row.shared_busy_ms - 1) for row in rows if row.processes == size]
        for size in sizes
    }
    return {
        "predicted": {"date": datetime.now().astimezone().isoformat(timespec="minutes"), "commit": source_commit()},
        "goals": GOALS,
        "mean_error": {size: statistics.mean(found) for size, found in errors.items()},
        "mean_busy_error": {size: statistics.mean(found) for size, found in busy.items()},
        "choices": choices(rows, chosen),
        "rows": [asdict(row) for row in rows],
    }


def store_cluster(cluster: Cluster) -> str:
    """A Cluster as it stands in the document: the text of its file."""
    return render_cluster(cluster)


def stored_cluster(text: str) -> Cluster:
    """That Cluster again."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "local.toml"
        path.write_text(text, encoding="utf-8")
        return read_cluster(path)


def repredict(document: Mapping[str, Any]) -> dict[str, Any]:
    """A stored document with what the planner of today predicts and chooses, from the same figures; what was measured
    stays."""
    before = [Row(**{**row, "turns_ms": tuple(row["turns_ms"])}) for row in document["rows"]]
    profiles = profiles_of(row.model for row in before)
    rows: list[Row] = []
    chosen: dict[tuple[int, str], Case] = {}
    for number, text in document["clusters"].items():
        cluster, nproc = stored_cluster(text), int(number)
        own = [row for row in before if row.processes == nproc]
        models = dict.fromkeys(row.model for row in own)
        found = chosen_cases({model: profiles[model] for model in models}, cluster)
        chosen |= {(nproc, model): case for model, case in found.items()}
        for row in own:
            case = Case(row.model, row.layout, found[row.model].global_batch, row.micro_batch, row.context)
            rows.append(row.with_prediction(predict(case, nproc, profiles[row.model], cluster)))
    return {**document, **judged(rows, chosen)}
