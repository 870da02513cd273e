"""What a run took goes to its machine's corrections, for the machine's next plan."""

import json
from collections.abc import Mapping
from typing import Any

from allranks import __version__
from allranks.errors import AllranksError, ConfigError
from allranks.layout import Layout
from allranks.layout_string import parse_layout
from allranks.ordinary_file import read_small
from allranks.planning.corrections import MIN_STEPS, Row, family_of, remember
from allranks.planning.this_machine import corrections_path, look, machine_slug
from allranks.reporting.predicted import Figure
from allranks.reporting.report import Report
from allranks.run import Run


def remember_run(run: Run, found: Report) -> tuple[str, ...]:
    """Keep a run that went as it was planned for this very machine; the lines that say so, () where nothing is kept.

    A run that was planned for another machine, that was changed, or that was short says nothing of the next one.
    """
    row = _row(run, found)
    if row is None:
        return ()
    try:
        path = corrections_path()
    except ConfigError as error:
        return (f"the next plan does not learn from this run, because {error}",)
    try:
        lost = remember(path, row)
    except OSError as error:
        return (f"the next plan does not learn from this run, because {path} cannot be written: {error.strerror}",)
    said = (
        f"The next plan for this machine knows that {row.family} took {row.seconds_ratio:.2f}x the calculated step"
        f" (kept in {path})"
    )
    return (lost, said) if lost else (said,)


def _row(run: Run, found: Report) -> Row | None:
    predicted = found.predicted
    if predicted is None or predicted.differs or predicted.step_seconds is None or not found.attempts:
        return None
    if predicted.step_seconds.ratio is None or found.step < MIN_STEPS or not _alike(found):
        return None
    document = _document(run)
    machine, best = document.get("machine"), document.get("best")
    if not isinstance(machine, str) or not isinstance(best, dict):
        return None
    if machine.partition("/")[0] != machine_slug(look()):
        return None
    ratio = _work_ratio(run, found, predicted.step_seconds, best)
    if ratio is None:
        return None
    try:
        layout = Layout.resolve(parse_layout(predicted.layout), found.attempts[-1].world_size)
    except AllranksError:
        return None
    return Row(
        run=found.id,
        machine=machine,
        version=__version__,
        family=family_of(layout),
        seconds_ratio=ratio * _number(best.get("correction"), 1.0),
        context_bytes=_context_bytes(found, best),
    )


def _work_ratio(run: Run, found: Report, step: Figure, best: Mapping[str, Any]) -> float | None:
    """The measured work over the expected; None where the step says nothing of it, because it waits for samples.

    A wait beside the work is as long as the work is short. The loop's own thread on a processor loads before it works:
    what it loads is taken off.
    """
    causes = best.get("seconds_by_cause")
    waits = _number(causes.get("input"), 0.0) if isinstance(causes, dict) else 0.0
    if not waits:
        return step.ratio
    loads_first = found.attempts[-1].device == "cpu" and not run.config().data.workers
    if not loads_first or step.measured is None or min(step.measured, step.expected) <= waits:
        return None
    return (step.measured - waits) / (step.expected - waits)


def _alike(found: Report) -> bool:
    """Whether the median step is of one layout on as many processes."""
    return len({(attempt.layout, attempt.world_size, attempt.device) for attempt in found.attempts}) == 1


def _context_bytes(found: Report, best: Mapping[str, Any]) -> float | None:
    peak = found.predicted.peak_bytes if found.predicted is not None else None
    parts = best.get("bytes_by_category")
    if found.attempts[-1].device != "cpu" or peak is None or peak.measured is None or not isinstance(parts, dict):
        return None
    return peak.measured - peak.expected + _number(parts.get("framework"), 0.0)


def _document(run: Run) -> Mapping[str, Any]:
    try:
        document = json.loads(read_small(run.plan_path).decode())
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _number(value: object, otherwise: float) -> float:
    return float(value) if isinstance(value, int | float) and value > 0 else otherwise
