"""What every command prints in the same way: an error, and one JSON document."""

import json as json_format
import sys
from collections.abc import Sequence

from allranks.errors import AllranksError


def print_json(document: object) -> None:
    """One JSON document on standard output: strict JSON, so that every reader understands it."""
    print(json_format.dumps(document, indent=2, allow_nan=False))


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table without a frame; a line is as long as it has to be, so that nothing is cut and `grep` finds it."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    for cells in (headings, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())


def print_error(error: AllranksError, *, json: bool, exit_code: int | None = None) -> int:
    """One line on standard error, with `--json` also a document on standard output; returns the exit code.

    `exit_code` is the error's own where it is not given.
    """
    code = error.exit_code if exit_code is None else exit_code
    if json:
        print_json({"error": str(error), "kind": type(error).__name__, "exit_code": code})
    print(f"allranks: error: {error}", file=sys.stderr)
    return code
