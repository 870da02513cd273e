"""`allranks explain`: why a run died or hung."""

from pathlib import Path
from typing import Annotated

import typer

from allranks.cli.output import print_json
from allranks.printable import printable_lines

UNKNOWN = 3


def explain(
    path: Annotated[Path, typer.Argument(metavar="RUN|LOG", help="A run directory, or the log of any program.")],
    json: Annotated[
        bool, typer.Option("--json", help="One JSON document on standard output, all else on standard error.")
    ] = False,
) -> int:
    """Say why a run died or hung, and what to do; of other programs' logs too. Exit code 3: nothing was recognised."""
    from allranks.reporting.explain import explain as explain_path
    from allranks.reporting.explain import explain_silence

    found = explain_path(path)
    if json:
        print_json({"path": str(path), "verdicts": [verdict.to_json() for verdict in found]})
    elif not found:
        print(printable_lines(explain_silence(path)))
    else:
        print(printable_lines("\n\n".join(f"{verdict.kind}: {verdict}" for verdict in found)))
    return 0 if found else UNKNOWN
