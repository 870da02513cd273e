"""Running the real commands of the examples, as a user would, in an empty folder."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from allranks.run import Run

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(*command: str, folder: Path) -> str:
    """What `python COMMAND` printed in `folder`; an exit code other than 0 fails the test with its whole output."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    ran = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, f"exit code {ran.returncode}\n{ran.stdout}\n{ran.stderr}"
    return ran.stdout + ran.stderr


def train(*arguments: str, folder: Path) -> list[dict[str, Any]]:
    """The journal of `allranks train ARGUMENTS`."""
    run("-m", "allranks", "train", *arguments, "--run", "run", folder=folder)
    return Run.open(folder / "run").events()


def last(events: list[dict[str, Any]], event: str) -> dict[str, Any]:
    """The last event of that name."""
    return [entry for entry in events if entry["event"] == event][-1]
