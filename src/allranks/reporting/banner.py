"""What is said once, before the first step: what was decided, and what spreading the run changes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from allranks.verdict import Decision

INDENT = "  "


@final
@dataclass(frozen=True, slots=True)
class StepShape:
    """One optimizer step as a number of processes cuts it.

    Attributes:
        num_processes: of the whole world.
        global_batch: samples per step over the world.
        steps_per_epoch: None where the dataset does not know its length.
        total_steps: None where nobody knows it.
        schedule: of the learning rate, in words ("cosine from 0.001 over 1000 steps, warmup 100").
        device_batch: the fewest and the most samples that one device sees in a step.
        micro_steps: forwards per step.
    """

    num_processes: int
    global_batch: int
    steps_per_epoch: int | None
    total_steps: int | None
    schedule: str
    device_batch: tuple[int, int]
    micro_steps: int


def render_banner(decisions: Sequence[Decision], one: StepShape, many: StepShape) -> list[str]:
    """The lines of the banner.

    Args:
        decisions: each becomes a line with its because.
        one: the step on one process.
        many: the step on as many as there are now.
    """
    lines = [f"{INDENT}- {decision}" for decision in decisions]
    if lines:
        lines.insert(0, "Decided:")
    return lines + _render_table(one, many)


def _render_table(one: StepShape, many: StepShape) -> list[str]:
    if many.num_processes == 1:
        return ["On one process:", *_align([[name, value] for name, value in _rows(many)])]
    rows = [["", "1 process", f"{many.num_processes} processes"]]
    for (name, before), (_, after) in zip(_rows(one), _rows(many), strict=True):
        rows.append([name, before, "the same" if before == after else after])
    return [f"What {many.num_processes} processes change, and what not:", *_align(rows)]


def _rows(shape: StepShape) -> list[tuple[str, str]]:
    fewest, most = shape.device_batch
    return [
        ("global batch (samples per step)", str(shape.global_batch)),
        ("steps per epoch", _known(shape.steps_per_epoch)),
        ("steps in all", _known(shape.total_steps)),
        ("learning rate", shape.schedule),
        ("samples per device and step", str(most) if fewest == most else f"{fewest} to {most}"),
        ("micro-steps (forwards per step)", str(shape.micro_steps)),
    ]


def _known(number: int | None) -> str:
    return "not known" if number is None else str(number)


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        (INDENT + INDENT.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip()
        for row in rows
    ]
