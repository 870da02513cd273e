"""What every command prints in the same way: an error, and one JSON document."""

import contextlib
import json as json_format
import os
import sys
from collections.abc import Callable, Iterator, Sequence

from allranks.errors import AllranksError
from allranks.printable import printable, printable_lines


def print_json(document: object) -> None:
    """One JSON document on standard output: strict JSON, so that every reader understands it."""
    print(json_format.dumps(document, indent=2, allow_nan=False))


@contextlib.contextmanager
def stdout_kept_free(wanted: bool) -> Iterator[None]:
    """Inside, what this process and those that it starts print goes to standard error: a document will stand alone."""
    if not wanted:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table without a frame; a line is as long as it has to be, so that nothing is cut and `grep` finds it.

    Cells are made `printable`.
    """
    lines = [[printable(cell) for cell in cells] for cells in (headings, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for cells in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())


def print_error(error: AllranksError, *, json: bool, exit_code: int | None = None) -> int:
    """One line on standard error, with `--json` also a document on standard output; returns the exit code.

    `exit_code` is the error's own where it is not given.
    """
    code = error.exit_code if exit_code is None else exit_code
    if json:
        print_json({"error": str(error), "kind": type(error).__name__, "exit_code": code})
    print(printable_lines(f"allranks: error: {error}"), file=sys.stderr)
    return code


def write_printed(write: Callable[[], None]) -> int:
    """Write what is also on the screen by now; 0, or the exit code of a refusal, which is one line.

    The one JSON document of `--json` is printed by then: the refusal is no second one.
    """
    try:
        write()
    except AllranksError as error:
        return print_error(error, json=False)
    return 0
