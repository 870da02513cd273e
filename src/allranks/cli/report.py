"""`allranks report`: what a run directory says about itself, and where the runs of several part."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from allranks.cli.output import print_json

if TYPE_CHECKING:
    from allranks.run import Run


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN [RUN ...]", help="A run directory; of several the first is compared.")
    ],
    json: Annotated[
        bool, typer.Option("--json", help="One JSON document on standard output, all else on standard error.")
    ] = False,
) -> int:
    """Say what a run learned, and where its time and memory went.

    Of several runs: from which step on the losses and the samples of each are not those of the first, and which keys
    of their configs differ.
    """
    from allranks.reporting.report import report as report_on
    from allranks.reporting.text import render_text
    from allranks.run import Run

    opened = [Run.open(run) for run in runs]
    if len(opened) > 1:
        return _compare(opened, json=json)
    found = report_on(opened[0])
    if json:
        print_json(found.to_json())
    else:
        print(render_text(found))
    return 0


def _compare(runs: "list[Run]", *, json: bool) -> int:
    from allranks.reporting.compared import compare_runs

    found = [compare_runs(runs[0], other) for other in runs[1:]]
    if json:
        print_json({"compared": [one.to_json() for one in found]})
    else:
        print("\n\n".join(one.render() for one in found))
    return 0
