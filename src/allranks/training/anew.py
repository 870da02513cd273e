"""A Run directory in which nothing was done: an attempt that was refused before its first step does not bind the next.

It holds no checkpoint, and no journal in it has a step. So another configuration, or another task, may begin anew
there.
"""

from collections.abc import Mapping
from typing import Any

from allranks.config import Config, changed_keys
from allranks.durable import refusing
from allranks.errors import RunError
from allranks.run import Run
from allranks.verdict import Decision

# What an attempt leaves before its first step; anything else in the directory is not ours to delete.
LEFT = (
    "plan.json",
    "journal/rank-*.jsonl",
    "logs/rank-*.log",
    "logs/failure-*.json",
    "tensorboard/events.out.tfevents.*",
)


def holds_nothing(run: Run) -> bool:
    """Whether there is nothing to protect: no step in any journal, nothing in checkpoints/, good or bad."""
    try:
        if run.checkpoints.exists() and any(run.checkpoints.iterdir()):
            return False
        return not any(event["event"] == "step" for rank in run.ranks() for event in run.events(rank))
    except (OSError, RunError):
        return False  # what cannot be read may hold anything


def explain_anew(run: Run, asked: str, config: Config) -> Decision:
    """Say that `asked` with `config` begins anew in `run`, and what it has otherwise."""
    changes = [f"{name} {before} -> {after}" for name, (before, after) in changed_keys(run.config(), config).items()]
    if asked != run.task:
        changes.insert(0, f"task {run.task} -> {asked}")
    because = f"the attempt before made no step and left no checkpoint; what differs: {', '.join(changes)}"
    return Decision(f"the run begins anew in {run.path}", because)


def begin_anew(run: Run, name: str, config: Config, run_json: Mapping[str, Any]) -> None:
    """Make `run` a new one under its path, and take its lease: journals and logs go first, then who it is, then how.

    After a crash in between it still holds nothing, and can begin anew again.

    Raises:
        RunError: somebody trains there, or has since it was looked at; or it cannot be written.
    """
    before = run.id
    run.acquire()
    try:
        if Run.open(run.path).id != before or not holds_nothing(run):
            raise RunError(f"{run.path} was used by another process meanwhile: start again, or name another directory")
        with refusing(run.path):
            for pattern in LEFT:
                for path in run.path.glob(pattern):
                    path.unlink(missing_ok=True)
        run.replace_identity(name, run_json)
        run.write_config(config)
    except BaseException:
        run.release()
        raise
