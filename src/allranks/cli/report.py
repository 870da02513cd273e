"""`allranks report`: what a run directory says about itself."""

from pathlib import Path
from typing import Annotated

import typer

from allranks.cli.output import print_json


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run directory.")],
    json: Annotated[
        bool, typer.Option("--json", help="One JSON document on standard output, all else on standard error.")
    ] = False,
) -> int:
    """Say what a run learned, and where its time and memory went."""
    from allranks.reporting.report import report as report_on
    from allranks.reporting.text import render_text
    from allranks.run import Run

    found = report_on(Run.open(run))
    if json:
        print_json(found.to_json())
    else:
        print(render_text(found))
    return 0
