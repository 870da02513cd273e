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
        "| program | what it is | trained with | sentinel |",
        "|---|---|---|---|",
    ]
    return "\n".join([*lines, *_rows(document)]) + "\n"


def _rows(document: Mapping[str, Any]) -> Iterator[str]:
    for row in document["results"]:
        what = row["what"].removesuffix(".").replace("|", "\\|")
        caught = f"{' '.join(f'`{name}`' for name in row['sentinels'])}, step {row['step']}"
        said = caught if row["outcome"] == "caught" else row["outcome"]
        yield f"| `{row['name']}` | {what} | `{row['run']}` | {said} |"
