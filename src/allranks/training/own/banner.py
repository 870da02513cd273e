"""What an own loop says when it starts, as the start of a Task's run does."""

from dataclasses import replace
from math import ceil

from allranks.data.stream import DataStream
from allranks.reporting.banner import StepShape, render_banner
from allranks.training.own.ground import Ground
from allranks.training.own.run import Logbook


def introduce(logbook: Logbook, ground: Ground, order: DataStream) -> None:
    """Rank 0: every decision with its because, and what the number of processes changes."""
    processes = ground.processes
    if processes.rank != 0:
        return
    for decision in ground.decisions:
        logbook.write("decision", what=decision.what, because=decision.because)
    many = replace(_shape(order, processes.mesh.dp), num_processes=processes.size)
    for line in render_banner(ground.decisions, _shape(order, 1), many):
        logbook.say(line)
    logbook.say(f"The run lies in {logbook.run.path}")


def _shape(order: DataStream, num_ranks: int) -> StepShape:
    cut = replace(order.cut, num_ranks=num_ranks)
    whole, rest = divmod(cut.global_batch, num_ranks)
    return StepShape(
        num_processes=num_ranks,
        global_batch=cut.global_batch,
        steps_per_epoch=None if order.steps_per_epoch is None else ceil(order.steps_per_epoch),
        total_steps=order.steps_total,
        schedule="as the loop sets it",
        device_batch=(whole, whole + (rest > 0)),
        micro_steps=cut.num_micro_steps(),
    )
