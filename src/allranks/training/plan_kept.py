"""The plan that a run is started from, kept in its directory, so that the run can be compared with it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from allranks.durable import refusing, replacing
from allranks.ordinary_file import read_small
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


def write_plan(run: Run, document: Mapping[str, Any]) -> None:
    """Keep the plan that decided the layout. Raises RunError where the directory cannot be written."""
    with refusing(run.path), replacing(run.plan_path) as temporary:
        temporary.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def decided_overrides(run: Run) -> tuple[str, ...]:
    """What a plan put into the run's config at its first start, as `key.sub=value`; () where none did."""
    try:
        document = json.loads(read_small(run.plan_path).decode())
    except (OSError, ValueError, RecursionError):
        return ()
    decided = document.get("decided") if isinstance(document, dict) else None
    return tuple(word for word in decided if isinstance(word, str)) if isinstance(decided, list) else ()
