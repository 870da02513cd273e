"""How a run that this command started has ended: on the screen, and as the document of `--json`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from allranks.errors import WORKER_REFUSED
from allranks.run import Run

if TYPE_CHECKING:
    from allranks.surviving.outcome import Outcome

REASONS = {0: "done", 130: "interrupted", 75: "terminated"}

Document = dict[str, Any]


def tell_end(run: Run, outcome: "Outcome") -> tuple[int, Document]:
    """Print what failed, last on the screen; the exit code and the document."""
    failure = outcome.first_failure
    if failure is not None:
        console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False, emoji=False)
        if outcome.exit_code != WORKER_REFUSED and any(run.checkpoints.glob("step-*[0-9]")):
            # Before the traceback, which is the last on the screen.
            console.print(f"The run lies in {run.path}; `--resume {run.path}` goes on from its newest checkpoint.")
        if outcome.others and outcome.exit_code != WORKER_REFUSED:  # of a refusal one line says all
            names = ", ".join(map(str, outcome.others))
            console.print(f"After it failed rank {names}: what they say is in {run.log().parent}")
        console.print(failure.render())
    return outcome.exit_code, document(run.path, outcome.exit_code, None if failure is None else failure.message)


def document(path: Path, exit_code: int, error: str | None = None) -> Document:
    """How a run ended, from its directory alone."""
    from allranks.reporting.report import report

    found = report(Run.open(path)).to_json()
    return {
        "run": str(path.resolve()),
        "exit_code": exit_code,
        "reason": REASONS.get(exit_code, "failed"),
        "step": found["step"],
        "validation": found["validation"],
        "error": error or found["error"],
    }
