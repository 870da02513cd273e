"""Runs of loops of one's own: how run.json tells them, and what goes on with one, since no command can start it."""

from pathlib import Path

from allranks.errors import TaskError

OWN_LOOP = "(own loop)"  # ends the `task` of run.json: no spec, so that nobody imports the script to find a Task in it


def is_own_loop(task: str) -> bool:
    """Whether `task`, as run.json has it, is a loop of one's own."""
    return task.endswith(OWN_LOOP)


def start_again(task: str, run: Path | str) -> str:
    """What continues a run, in words: its command, or of an own loop its script."""
    if not is_own_loop(task):
        return f"`allranks train --resume {run}`"
    return f'start {task.removesuffix(OWN_LOOP).strip() or "its program"} again with join(run="{run}")'


def export_command(run: Path | str, program: str = "allranks") -> str:
    """The command that writes a run's model to a file, whoever trained it."""
    return f"{program} checkpoint export {run} model.safetensors"


def refuse_own_loop(task: str, run: Path) -> None:
    """Raise TaskError for the run of an own loop, which has no Task to make a model with."""
    if is_own_loop(task):
        raise TaskError(
            f"{run} is the run of a loop of your own, {task!r}, and names no Task: to go on, "
            f"{start_again(task, run)}; its model: `{export_command(run)}`, or "
            "allranks.load(..., task='file.py:Name') with a Task that makes the same"
        )
