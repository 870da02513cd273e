"""A Report as text, for a terminal of 96 columns, a log or a mail."""

import shutil
import sys
from collections.abc import Iterable, Sequence
from math import isfinite
from pathlib import Path
from statistics import median

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from allranks.own_loops import export_command, is_own_loop, start_again
from allranks.printable import printable_lines
from allranks.reporting.as_text import as_text
from allranks.reporting.history import LossCurve
from allranks.reporting.predicted import Prediction
from allranks.reporting.report import KeptCheckpoint, Report
from allranks.units import format_bytes, format_count, format_moment, format_seconds

WIDTH = 96
INDENT = "  "
HEIGHTS = "▁▂▃▄▅▆▇█"
BAR_CELLS = 30
LISTED_RANKS = 8


def render_text(report: Report, *, width: int = WIDTH) -> str:
    """The whole report, at most `width` columns wide except for paths and commands, which are never broken."""
    parts: list[RenderableType] = [_headline(report), _facts(report)]
    for title, body in (
        ("Loss", _loss(report)),
        ("Where the time went", _time(report)),
        ("Peak memory", _memory(report)),
        ("Predicted and measured", _predicted(report.predicted)),
        ("Checkpoints", _checkpoints(report.checkpoints)),
        ("Decisions", _bullets(map(str, report.decisions))),
        ("Verdicts", _bullets(map(str, report.verdicts))),
        ("Error", _bullets([report.error] if report.error else [])),
    ):
        if body is not None:
            parts += [Text(), Text(title), body]
    return printable_lines("\n".join([as_text(parts, width), "", render_next(report)]))


def render_next(report: Report) -> str:
    """What to do with this run, as commands to copy."""
    allranks = _program("allranks")
    commands = [f"{allranks} report {report.path}"]
    if report.step > 0:
        commands.append(f"{_program('tensorboard')} --logdir {report.path}/tensorboard")
    lines = ["Next"]
    saved = any(checkpoint.committed for checkpoint in report.checkpoints)
    if saved and is_own_loop(report.task):
        commands.append(export_command(report.path, allranks))
        lines += [INDENT + line for line in (*commands, start_again(report.task, report.path))]
    elif saved:
        longer = f" train.steps={2 * report.step}" if report.state == "done" else ""
        if (
            longer and report.rate_spent
        ):  # the schedule of the first start has ended: more steps alone would learn nothing
            longer += f" schedule.steps={2 * report.step} --change schedule.steps"
        commands.append(f"{allranks} train --resume {report.path}{longer}")
        lines += [INDENT + command for command in commands]
        lines += [
            f"{INDENT}python:  import allranks",
            f'{INDENT}         model = allranks.load("{report.path}")',
            f"{INDENT}         prediction = model(inputs)",
        ]
    else:
        lines += [INDENT + command for command in commands]
        none = "no checkpoint was committed, so there is nothing to resume: start again"
        lines.append(INDENT + ("no checkpoint is committed yet" if report.state == "running" else none))
    return "\n".join(lines) + "\n"


def _program(name: str) -> str:
    """How the shell finds it: by its name, or where it stands beside this Python and is not on PATH."""
    beside = Path(sys.executable).parent / name
    if shutil.which(name) is not None or not beside.exists():
        return name
    here = Path.cwd()
    return str(beside.relative_to(here)) if beside.is_relative_to(here) else str(beside)


def _headline(report: Report) -> Text:
    return Text(f"{report.name} {report.id[:4]}: {report.state}, {report.because}", overflow="fold")


def _facts(report: Report) -> RenderableType:
    rows = [("run", report.path), ("task", report.task)]
    if report.attempts:
        newest = report.attempts[-1]
        started = format_moment(report.attempts[0].started)
        spent = sum(attempt.ended - attempt.started for attempt in report.attempts)
        rows.append(("started", f"{started}, {format_seconds(spent)} in {_count(len(report.attempts), 'attempt')}"))
        processes = _count(newest.world_size, "process", "processes")
        rows.append(("layout", f"{newest.layout}: {processes} on {newest.device}, {newest.host}"))
    if report.step == 0:
        none = "none yet" if report.state == "running" else "none: it ended before the first step"
        rows.append(("steps", none))
    else:
        total = f" of {report.total_steps}" if report.total_steps and report.total_steps >= report.step else ""
        rows.append(("steps", f"{report.step}{total}, {format_count(report.samples)} samples"))
    if report.step_seconds is not None and report.samples_per_second is not None:
        rate = f"{format_count(report.samples_per_second)} samples/s"
        rows.append(("pace", f"{format_seconds(report.step_seconds)} a step, {rate} (medians)"))
    return _grid([Text(name), Text(value, overflow="fold")] for name, value in rows)


def _loss(report: Report) -> RenderableType | None:
    curve = report.loss
    if curve is None:
        return None
    rows = [
        [Text("training"), Text(_sparkline(curve))],
        [Text(), Text(f"{curve.first:.4f} -> {curve.last:.4f}, lowest {curve.lowest:.4f} at step {curve.lowest_step}")],
    ]
    if curve.num_not_finite:
        steps = _count(curve.num_not_finite, "step")
        rows.append([Text(), Text(f"{steps} with a loss that is no finite number")])
    if report.validation:
        metrics = "  ".join(f"{name} {value:.4f}" for name, value in report.validation.items())
        rows.append([Text("validation"), Text(f"{metrics}  (step {report.validation_step})")])
    return _grid(rows)


def _sparkline(curve: LossCurve) -> str:
    finite = [loss for _, loss in curve.points if isfinite(loss)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(HEIGHTS) - 1) / (high - low) if high > low else 0.0
    return "".join(HEIGHTS[round((loss - low) * scale)] if isfinite(loss) else "x" for _, loss in curve.points)


def _time(report: Report) -> RenderableType | None:
    causes = sorted(report.seconds_by_cause.items(), key=lambda item: -item[1])
    rows = [(name.replace("_", " + "), seconds) for name, seconds in causes if seconds > 0]
    if report.seconds_unsplit > 0:
        rows.append(("steps, not split", report.seconds_unsplit))
    total = sum(seconds for _, seconds in rows)
    if total <= 0:
        return None
    return _grid(
        [
            Text(name),
            Text(format_seconds(seconds), justify="right"),
            Text(f"{100 * seconds / total:.0f}%", justify="right"),
            Text("━" * round(BAR_CELLS * seconds / total)),
        ]
        for name, seconds in rows
    )


def _memory(report: Report) -> RenderableType | None:
    peaks = report.memory_bytes
    if not peaks:
        return None
    if len(peaks) <= LISTED_RANKS:
        return _grid([Text(f"rank {rank}"), Text(format_bytes(peak), justify="right")] for rank, peak in peaks.items())
    fullest = max(peaks, key=lambda rank: peaks[rank])
    middle = format_bytes(median(peaks.values()))
    return _grid(
        [[Text(f"{len(peaks)} ranks"), Text(f"median {middle}, most {format_bytes(peaks[fullest])} (rank {fullest})")]]
    )


def _predicted(prediction: Prediction | None) -> RenderableType | None:
    if prediction is None:
        return None
    if prediction.differs:
        return _bullets([f"the run is not as planned, so nothing is compared: {prediction.differs}"])
    named = (("step", prediction.step_seconds, format_seconds), ("peak memory", prediction.peak_bytes, format_bytes))
    rows = [
        [
            Text(name),
            Text(f"{write(figure.expected)} ({write(figure.low)} to {write(figure.high)})"),
            Text("not measured" if figure.measured is None else write(figure.measured)),
            Text("" if figure.ratio is None else f"{figure.ratio:.2f} of the prediction"),
        ]
        for name, figure, write in named
        if figure is not None
    ]
    return _grid(rows) if rows else _bullets([f"nothing was predicted: {prediction.because}"])


def _checkpoints(checkpoints: Sequence[KeptCheckpoint]) -> RenderableType | None:
    if not checkpoints:
        return None
    return _grid(
        [
            Text(kept.name),
            Text(format_bytes(kept.num_bytes), justify="right"),
            Text("" if kept.committed else "not committed: the save was cut off"),
        ]
        for kept in checkpoints
    )


def _bullets(lines: Iterable[str]) -> RenderableType | None:
    rows = [[Text("-"), Text(line, overflow="fold")] for line in lines]
    return _grid(rows, gap=1) if rows else None


def _grid(rows: Iterable[Sequence[RenderableType]], *, gap: int = 2) -> Table:
    table = Table.grid(padding=(0, gap, 0, 0))
    for row in rows:
        table.add_row(Text(" " * (len(INDENT) - gap)), *row)
    return table


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
