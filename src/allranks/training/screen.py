"""What rank 0 shows: a banner at the start, lines on the way, and the closing of a run."""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from typing import final

from rich.console import Console

from allranks.reporting.banner import StepShape, render_banner
from allranks.reporting.report import report
from allranks.reporting.text import render_text
from allranks.run import Run
from allranks.stepping.session import Session
from allranks.task import Task
from allranks.training.load import load
from allranks.training.remembered import remember_run
from allranks.training.trainer import Ending
from allranks.verdict import Decision


@final
class Screen:
    """The terminal of a run.

    Args:
        json: whether standard output is kept for the one JSON document that the command prints at the end.
    """

    def __init__(self, *, json: bool) -> None:
        self.console = Console(stderr=json, highlight=False, soft_wrap=True, markup=False, emoji=False)

    def say(self, line: str) -> None:
        """One line."""
        self.console.print(line)

    def warn(self, line: str) -> None:
        """One line that must not be missed."""
        self.console.print(f"warning: {line}", style="bold yellow")

    def open_run(self, run: Run, session: Session, decisions: Sequence[Decision]) -> None:
        """The banner: where the run lies, what was decided and why, what spreading changes and what it does not."""
        one, many = step_shape(session, 1), step_shape(session, session.processes.mesh.dp)
        many = replace(many, num_processes=session.processes.size)
        for line in render_banner(decisions, one, many):
            self.say(line)
        self.say(f"The run lies in {run.path}")

    def close_run(self, run: Run, task: Task, ending: Ending) -> None:
        """The end: what the Task has to say of the trained model, the report, and commands to copy."""
        if ending.reason == "done":
            self._summarise(run, task)
        found = report(run)
        self.say(render_text(found))
        for line in remember_run(run, found):
            self.say(line)

    def _summarise(self, run: Run, task: Task) -> None:
        if type(task).summary is Task.summary:
            return
        # From the disk, not from memory: what is shown is what was saved. The average, where validation measured that.
        model = load(run.path, task, ema=run.config().train.ema is not None)
        text = task.summary(model) if not isinstance(model, dict) else ""
        if text:
            self.say("\n" + text)


def step_shape(session: Session, num_ranks: int) -> StepShape:
    """One optimizer step as `num_ranks` data-parallel ranks cut it (law 1)."""
    cut = replace(session.stream.cut, num_ranks=num_ranks)
    whole, rest = divmod(cut.global_batch, num_ranks)
    per_epoch = session.stream.steps_per_epoch
    schedule, rate = session.schedule, session.config.optimizer.lr
    words = f"{schedule.name}, {rate:g} at the top"
    if schedule.warmup_samples:
        words += f", {schedule.warmup_samples} samples of warmup"
    if schedule.name != "constant":
        words += f", to {schedule.floor:g} of it at sample {schedule.total_samples}"
    return StepShape(
        num_processes=num_ranks,
        global_batch=cut.global_batch,
        steps_per_epoch=None if per_epoch is None else ceil(per_epoch),
        total_steps=session.stream.steps_total,
        schedule=words,
        device_batch=(whole, whole + (rest > 0)),
        micro_steps=cut.num_micro_steps(),
    )
