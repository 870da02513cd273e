"""The rows of `allranks bench scaling`: as a table, in words, and as a picture."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from allranks.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from allranks.benchmarking.scaling import Row


def print_rows(rows: "Sequence[Row]") -> None:
    """The table, a part for each mode, and what its words mean."""
    from rich.console import Console
    from rich.table import Table

    # As wide as it has to be: what is cut cannot be read, and is not found by grep.
    console = Console(file=sys.stdout, width=200, highlight=False)
    for mode in dict.fromkeys(row.mode for row in rows):
        mine = [row for row in rows if row.mode == mode]
        table = Table(box=None, pad_edge=False)
        headings = ("batch", "step", "samples/s", "speed-up", "quartiles", "efficiency", "time saved", "peak memory")
        for heading in (f"{mode} scaling", "processes", *headings, "loss", "difference", "validation"):
            table.add_column(heading, justify="left" if heading.endswith("scaling") else "right", no_wrap=True)
        for row in mine:
            table.add_row(*_cells(row))
        console.print(table)
        console.print(explain(mine))


def explain(rows: "Sequence[Row]") -> str:
    """What the rows of one mode are compared with, which one is fastest, and what their losses say."""
    first, best = rows[0], max(rows, key=lambda row: row.speedup)
    lines = [f"Beside {first.layout} on {_processes(first)}, {format_seconds(first.step_ms / 1e3)} a step."]
    if best is first:
        lines.append(
            "Nothing was faster: what processes say to each other takes longer than what sharing a step saves."
        )
        lines.append("A larger batch or model leaves more to share: try train.global_batch.")
    else:
        lines.append(
            f"Fastest: {best.layout} on {_processes(best)}, {best.time_saved:.0%} less time for as many samples."
        )
    if first.mode == "weak":
        lines.append("The batch grows with the processes, so that a step learns from more samples: another training.")
    elif other := [row.layout for row in rows if not row.same_samples]:
        lines.append(f"Steps saw other samples under {', '.join(other)}: is this a dataset that shards itself?")
    else:
        most = max(row.loss_difference for row in rows)
        lines.append(f"Every step saw the same samples; the losses reached differ by {most:.1e} of themselves at most.")
    return "\n".join([*lines, ""])


def _processes(row: "Row") -> str:
    return f"{row.processes} process{'' if row.processes == 1 else 'es'}"


def _cells(row: "Row") -> tuple[str, ...]:
    return (
        row.layout,
        str(row.processes),
        str(row.global_batch),
        format_seconds(row.step_ms / 1e3),
        format_count(row.samples_per_second),
        f"{row.speedup:.2f}",
        f"{row.speedup_q1:.2f}-{row.speedup_q3:.2f}" if row.repeats > 1 else "-",
        f"{row.efficiency:.0%}",
        f"{row.time_saved:.0%}",
        format_bytes(row.memory_bytes),
        f"{row.loss:.4f}",
        f"{row.loss_difference:.1e}",
        f"{row.validation['loss']:.4f}" if "loss" in row.validation else "-",
    )


def render_plot(rows: "Sequence[Row]") -> str:
    """Speed-up, efficiency and memory per process over the processes, a line for each strategy, as an HTML page."""
    from allranks.reporting.charts import Panel, render_page

    several = len({row.mode for row in rows}) > 1
    lines: dict[str, list[Row]] = {}
    for mode in dict.fromkeys(row.mode for row in rows):
        first, *others = (row for row in rows if row.mode == mode)
        for row in others:
            name = f"{row.strategy}, {row.mode}" if several else row.strategy
            lines.setdefault(name, [first] if first.processes < row.processes else []).append(row)
    sizes = sorted({row.processes for row in rows})
    ideal = [(float(size), size / sizes[0]) for size in sizes]
    whole = [(float(size), 1.0) for size in sizes]

    def series(value: str, scale: float = 1.0) -> dict[str, list[tuple[float, float]]]:
        return {name: [(row.processes, getattr(row, value) * scale) for row in mine] for name, mine in lines.items()}

    x = "processes"
    return render_page(
        "What more processes do",
        [
            Panel("speed-up", x, "times", series("speedup"), ideal),
            Panel("efficiency", x, "", series("efficiency"), whole, percent=True),
            Panel("peak memory per process", x, "MB", series("memory_bytes", 1e-6)),
        ],
    )
