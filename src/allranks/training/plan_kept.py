"""The plan that a run is started from, kept in its directory, so that the run can be compared with it."""

from pathlib import Path

from allranks.durable import refusing, replacing
from allranks.run import Run


def keep_plan(run: Run, toml: Path | None) -> None:
    """Copy the plan.json beside the config file `toml`, where `allranks plan --save` left both, into `run`.

    What it says may be another's: the report compares it with the run before it compares the figures.

    Raises:
        RunError: the directory cannot be written.
    """
    beside = None if toml is None else toml.parent / run.plan_path.name
    if beside is None or not beside.is_file():
        return
    try:
        text = beside.read_bytes()
    except OSError:  # a prediction that cannot be read is none, and no reason not to train
        return
    with refusing(run.path), replacing(run.plan_path) as temporary:
        temporary.write_bytes(text)
