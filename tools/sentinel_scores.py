"""The table of what sentinels catch, from the run of corpus/watched that is stored in bench/results/watched.json.

`allranks bench verify corpus/watched --sentinels --json > bench/results/watched.json` trains them anew, `make fix`
writes the table.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tools.marked import replace_marked
from tools.measured_on import render_origin

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results" / "watched.json"
PAGE = ROOT / "docs" / "how-to" / "sentinels.md"
BEGIN, END = "<!-- begin of the score -->\n", "<!-- end of the score -->\n"
Row = Mapping[str, Any]


def render_sentinels() -> str:
    """The page with what stands between its markers replaced."""
    return replace_marked(PAGE, BEGIN, END, render_watched(json.loads(RESULTS.read_text())))


def render_watched(document: Mapping[str, Any]) -> str:
    """The counts, and a line a run."""
    score = ", ".join(f"{name}: {number}" for name, number in document["score"].items())
    lines = [
        render_origin(document),
        "",
        f"On the CPU: {score}.",
        "",
        "| program | what it is | trained with | sentinel | kinds named | cost per step |",
        "|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *_rows(document)]) + "\n"


def _rows(document: Mapping[str, Any]) -> Iterator[str]:
    for row in document["results"]:
        what = row["what"].removesuffix(".").replace("|", "\\|")
        words = f"`{row['run']}`" if row["run"] else "-"
        yield f"| `{row['name']}` | {what} | {words} | {_said(row)} | {_kinds(row)} | {_cost(row)} |"


def _said(row: Row) -> str:
    if row["outcome"] == "not watched":
        return f"not watched: {row['said']}".replace("|", "\\|")
    caught = f"{' '.join(f'`{name}`' for name in row['sentinels'])}, step {row['step']}"
    return caught if row["outcome"] == "caught" else str(row["outcome"])


def _kinds(row: Row) -> str:
    """A run that is older than these columns has neither."""
    kinds = " ".join(row.get("kinds") or ()) or "-"
    return f"{kinds} (not {row['kind']})" if row["outcome"] == "caught" and row.get("named") is False else kinds


def _cost(row: Row) -> str:
    cost = row.get("cost")
    return "-" if cost is None else f"{cost:.2%}"
