"""`allranks train --show-sharding`: one real step, unit by unit, as a table or a JSON document."""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from allranks.request import TrainRequest
from allranks.units import format_bytes

if TYPE_CHECKING:
    from allranks.layout import Layout
    from allranks.training.sharding import Row

RECORDER = "allranks.training.sharding:record_here"
NOTE = (
    "Bytes are what a rank receives, of an all-reduce 2 (n - 1) / n of its size (a ring); send sends them, drop frees "
    "them. Rows stand in the order in which rank 0 began them: what is gathered or reduced may go on while the next "
    "unit is computed."
)


def show_sharding(request: TrainRequest, layout: "Layout", num_processes: int) -> tuple[int, dict[str, Any] | None]:
    """Start the processes, make a step, print what it did, and stop; (exit code, what `--json` prints)."""
    from allranks.surviving.agent import run_workers

    with tempfile.TemporaryDirectory(prefix="allranks-") as folder:
        outcome = run_workers(
            RECORDER, (request,), nproc=num_processes, run_id="show-sharding", log_dir=Path(folder), replies=True
        )
        failure = outcome.first_failure
        if failure is not None:
            console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False, emoji=False)
            console.print(failure.render())
    if failure is not None or outcome.exit_code:
        return outcome.exit_code, None if failure is None else {
            "error": failure.message,
            "exit_code": outcome.exit_code,
        }
    from allranks.training.sharding import read_replies

    rows, micro_steps = read_replies([outcome.replies[rank] for rank in range(num_processes)])
    if request.json:
        return 0, {
            "layout": str(layout),
            "processes": num_processes,
            "micro_steps": micro_steps,
            "rows": [row.to_json() for row in rows],
        }
    print_rows(rows, str(layout), num_processes, micro_steps)
    return 0, None


def print_rows(rows: "Sequence[Row]", layout: str, num_processes: int, micro_steps: int) -> None:
    """The table, the sums of what travels, and what the bytes are."""
    which = "" if micro_steps == 1 else f", the last of {micro_steps} micro-steps"
    processes = "1 process" if num_processes == 1 else f"{num_processes} processes"
    table = Table(box=None, pad_edge=False)
    for heading in ("phase", "what", "unit"):
        table.add_column(heading, no_wrap=True)
    for heading in ("per rank", "all ranks"):
        table.add_column(heading, justify="right", no_wrap=True)
    before = ""
    for row in rows:
        sizes = [_cell(row.bytes_per_rank), "-" if row.bytes_total is None else _cell(row.bytes_total)]
        table.add_row("" if row.phase == before else row.phase, row.what, row.unit, *sizes)
        before = row.phase
    # As wide as it has to be: what is cut cannot be read, and is not found by grep.
    console = Console(file=sys.stdout, width=max(100, *(60 + len(row.unit) for row in rows)), highlight=False)
    console.print(f"One step under {layout} on {processes}{which}", soft_wrap=True)
    console.print(table)
    moved = [row for row in rows if row.what not in ("compute", "recompute", "drop", "send")]
    each, together = sum(row.bytes_per_rank for row in moved), [row.bytes_total for row in moved]
    known = [size for size in together if size is not None]
    everyone = f", all ranks {format_bytes(sum(known))}" if len(known) == len(together) else ""
    console.print(f"A rank receives {format_bytes(each)}{everyone}.", soft_wrap=True)
    console.print(NOTE, soft_wrap=True)


def _cell(num_bytes: int) -> str:
    return format_bytes(num_bytes) if num_bytes else ""
