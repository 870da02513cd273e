"""`allranks bench`: how fast is it beside the same thing written by hand and on more processes; what verify finds."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from allranks.cli.bench_scaling import scaling
from allranks.cli.bench_verify import verify
from allranks.cli.output import print_error, print_json, stdout_kept_free
from allranks.errors import ProcessError
from allranks.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from allranks.benchmarking.strategies import Row

TURNS, QUICK_TURNS = 12, 3
QUICK_NPROC = "2"
DIFFERS, UNDETERMINED = 1, 3

app = typer.Typer(invoke_without_command=True, rich_markup_mode=None)
app.command("scaling")(scaling)
app.command("verify")(verify)


@app.callback()
def start(context: typer.Context) -> None:
    """Measure what strategies cost beside raw torch, what more processes save, and what verify finds."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command("strategies")
def strategies(
    nproc: Annotated[
        str | None,
        typer.Option(metavar="N,N", help="Numbers of processes; not given: 2,4, and 1 for single.", show_default=False),
    ] = None,
    layouts: Annotated[
        str | None, typer.Option(metavar="L;L", help="Layouts to measure; not given: all that fit.", show_default=False)
    ] = None,
    turns: Annotated[int, typer.Option(metavar="N", min=2, help="Turns of each side, of two steps.")] = TURNS,
    quick: Annotated[
        bool, typer.Option("--quick", help="Three turns, on two processes where nothing else is said.")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="One JSON document on standard output, all else on standard error.")
    ] = False,
) -> int:
    """Time and memory of each strategy beside the same one written by hand in torch.

    Both train a Transformer of 10M parameters, by turns in the same processes. Exit code 1: their losses differ.
    """
    from allranks.benchmarking.strategies import plan_cases, read_layouts, read_numbers, summarise

    numbers = read_numbers(nproc or QUICK_NPROC) if nproc or (quick and layouts is None) else None
    cases = plan_cases(None if layouts is None else read_layouts(layouts), numbers)
    failure: ProcessError | None = None
    with stdout_kept_free(json):
        from allranks.benchmarking.machine import describe_machine, machine_load
        from allranks.benchmarking.processes import measure_all

        about = describe_machine()
        try:
            found = measure_all(
                cases,
                min(turns, QUICK_TURNS) if quick else turns,
                tell=lambda case: print(f"{case.strategy} on {case.layout.world_size}: measured", file=sys.stderr),
            )
        except ProcessError as error:
            found, failure = [], error
    if failure is not None:
        return print_error(failure, json=json, exit_code=UNDETERMINED)
    rows = summarise(found)
    if json:
        command = render_command(nproc, layouts, turns, quick=quick)
        about["load_after"] = machine_load()
        print_json(
            {"command": command, "machine": about, "rows": [row.to_json() for row in rows], "targets": targets()}
        )
    else:
        print_rows(rows)
    return DIFFERS if any("loss" in row.misses for row in rows) else 0


def render_command(nproc: str | None, layouts: str | None, turns: int, *, quick: bool) -> str:
    """The command line that measures this again."""
    words = ["allranks bench strategies"]
    words += [f"--nproc {nproc}"] if nproc else []
    words += [f'--layouts "{layouts}"'] if layouts else []
    words += [f"--turns {turns}"] if turns != TURNS else []
    return " ".join(words + (["--quick"] if quick else []))


def targets() -> dict[str, float]:
    """What the figures should not be above."""
    from allranks.benchmarking.strategies import FSDP_OF_DDP_TARGET, MEMORY_TARGET, TIME_TARGET

    return {"time": TIME_TARGET, "memory": MEMORY_TARGET, "of_ddp": FSDP_OF_DDP_TARGET}


def print_rows(rows: "Sequence[Row]") -> None:
    """The table, with the targets in its headings; what misses one is marked."""
    from rich.console import Console
    from rich.table import Table

    limits = targets()
    table = Table(box=None, pad_edge=False)
    times = ("raw", "ours", f"ratio (<= {limits['time']})", "quartiles")
    peaks = ("raw peak", "ours peak", f"ratio (<= {limits['memory']})")
    for heading in ("strategy", "processes", *times, *peaks, f"of ddp (<= {limits['of_ddp']})"):
        table.add_column(heading, justify="left" if heading == "strategy" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*_cells(row))
    # As wide as it has to be: what is cut cannot be read, and is not found by grep.
    console = Console(file=sys.stdout, width=220, highlight=False)
    console.print(table)
    console.print("Milliseconds are medians of a step, peaks are of the fullest process; ! misses its target.")


def _cells(row: "Row") -> tuple[str, ...]:
    def mark(name: str, text: str) -> str:
        return f"{text} !" if name in row.misses else text

    if row.ratio is None:
        return (row.strategy, str(row.processes), f"the first losses differ by {row.loss_difference:.1e}: not timed")
    return (
        row.strategy,
        str(row.processes),
        format_seconds(row.raw_ms / 1e3),
        format_seconds(row.ours_ms / 1e3),
        mark("time", f"{row.ratio:.3f}"),
        f"{row.ratio_q1:.3f}-{row.ratio_q3:.3f}",
        format_bytes(row.raw_bytes),
        format_bytes(row.ours_bytes),
        mark("memory", "-" if row.memory_ratio is None else f"{row.memory_ratio:.3f}"),
        mark("of_ddp", "-" if row.of_ddp is None else f"{row.of_ddp:.2f}"),
    )
