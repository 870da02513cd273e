"""`allranks chaos`: break a training on purpose, and prove that nothing was lost."""

import secrets
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from allranks.cli.output import print_json, stdout_kept_free
from allranks.cli.train import RUN_NAMES, read_arguments

if TYPE_CHECKING:
    from allranks.surviving.chaos import Answer

COLUMNS = ("", "point", "kind", "rank", "step", "recovery", "from step", "redone", "seconds")


def chaos(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TASK|RUN.toml|KEY=VALUE",
            help="What to train, as for `allranks train` (none: the built-in demo).",
            show_default=False,
        ),
    ] = None,
    kills: Annotated[int, typer.Option(metavar="N", help="How many faults.")] = 10,
    seed: Annotated[int, typer.Option(metavar="S", help="Draws where and when they happen.")] = 0,
    points: Annotated[
        str | None,
        typer.Option(
            metavar="POINT[:KIND],...",
            help="Which faults: a point or * and kill, stop, segfault, exit, raise, enospc, eio, disconnect or *; "
            "by default a kill at every point that the program passes.",
            show_default=False,
        ),
    ] = None,
    layout: Annotated[str | None, typer.Option(metavar="L", help="How to spread it, as for `allranks train`.")] = None,
    nproc: Annotated[int | None, typer.Option(metavar="N", min=1, help="Processes on this machine.")] = None,
    run: Annotated[
        Path | None, typer.Option(*RUN_NAMES, metavar="DIR", help="A new directory for both runs and the evidence.")
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="One JSON document on standard output, all else on standard error.")
    ] = False,
) -> int:
    """Train once undisturbed and once under faults, and compare: is anything lost, twice, or left behind?

    Exit code 0: nothing is; 1: something is; 2: refused; 3: it could not be determined.
    """
    read_arguments(arguments or ())  # refused here, before anything starts
    options = [*(["--layout", layout] if layout is not None else []), *(["--nproc", str(nproc)] if nproc else [])]
    folder = run or Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-chaos-{secrets.token_hex(2)}"
    with stdout_kept_free(json):
        from allranks.surviving.chaos import Trial, break_on_purpose

        trial = Trial(tuple(arguments or ()), tuple(options), kills, seed, points, folder)
        answer = break_on_purpose(trial, lambda line: print(line, file=sys.stderr, flush=True))
    if json:
        print_json(answer.to_json())
    else:
        _print(answer)
    return answer.exit_code


def _print(answer: "Answer") -> None:
    """The verdict, the invariants, the incidents, and where the evidence lies."""
    from rich.console import Console
    from rich.table import Table

    print(answer.what)
    words = {True: "holds", False: "DOES NOT HOLD", None: "undetermined"}
    for one in answer.invariants:
        print(f"  {one.name} {words[one.holds]}: {one.what}")
    table = Table(box=None, pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("point", "kind", "recovery") else "right", no_wrap=True)
    for incident in answer.incidents:
        fault = incident.fault
        resumed = "" if incident.resumed_step is None else str(incident.resumed_step)
        seconds = "" if incident.seconds is None else f"{incident.seconds:.2f}"
        place = (str(fault.number), fault.point, fault.kind, str(fault.rank), str(fault.step))
        table.add_row(*place, incident.recovery, resumed, str(incident.redone), seconds)
    if answer.incidents:
        Console(file=sys.stdout, width=120, highlight=False).print(table)
    for decision in answer.decisions:
        print(f"- {decision}")
    print(f"The two runs, the schedule and all that was printed lie in {answer.folder}")
