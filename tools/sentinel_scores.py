"""The tables of what sentinels catch, from the runs of corpus/watched and of the Tasks of corpus/ that are stored.

`allranks bench verify corpus/watched --sentinels --json > bench/results/watched.json` and `allranks bench verify corpus
--sentinels --json > bench/results/watched_tasks.json` train them anew, `make fix` writes the tables.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tools.marked import replace_marked
from tools.measured_on import render_origin

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results" / "watched.json"
TASKS = ROOT / "bench" / "results" / "watched_tasks.json"
VERIFIED = ROOT / "bench" / "results" / "verify.json"
PAGE = ROOT / "docs" / "how-to" / "sentinels.md"
BEGIN, END = "<!-- begin of the score -->\n", "<!-- end of the score -->\n"
CLEAN, NOT_WATCHED = "clean", "not watched"
Row = Mapping[str, Any]


def render_sentinels() -> str:
    """The page with what stands between its markers replaced."""
    watched, tasks, verified = (json.loads(path.read_text()) for path in (RESULTS, TASKS, VERIFIED))
    text = f"{render_watched(watched)}\nThe Tasks of `corpus/`, which verify is scored on:\n\n"
    return replace_marked(PAGE, BEGIN, END, text + render_tasks(tasks, verified))


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


def render_tasks(document: Mapping[str, Any], verified: Mapping[str, Any]) -> str:
    """Of each wrong Task what sentinels say beside what verify found; how many runs of clean ones were accused.

    Args:
        document: what was watched; loops, which are not, are left out.
        verified: verify's results on the same folder.
    """
    rows = [row for row in document["results"] if row["outcome"] != NOT_WATCHED]
    clean = [row for row in rows if row["kind"] == CLEAN]
    silent = sum(row["outcome"] == CLEAN for row in clean)
    found = {(row["name"], row["run"]): row for row in verified["results"]}
    of_all = f"{silent} of {len(clean)} runs of {len({row['name'] for row in clean})} clean Tasks"
    lines = [
        render_origin(document),
        "",
        f"- wrong Tasks: {_count(row['outcome'] for row in rows if row['kind'] != CLEAN)}",
        f"- no sentinel found anything in {of_all}",
        "",
        "| kind | program | what is wrong | trained with | verify | sentinels |",
        "|---|---|---|---|---|---|",
    ]
    lines += [_beside(row, found.get((row["name"], row["run"]))) for row in rows if row["kind"] != CLEAN]
    lines += ["", "| clean Task | trained with | sentinels |", "|---|---|---|"]
    lines += [f"| `{row['name']}` | `{row['run']}` | {_said(row)} |" for row in clean]
    return "\n".join(lines) + "\n"


def _count(outcomes: Iterator[str]) -> str:
    every = list(outcomes)
    return ", ".join(f"{every.count(outcome)} {outcome}" for outcome in sorted(set(every)))


def _beside(row: Row, found: Row | None) -> str:
    verify = "-" if found is None else " ".join(found["kinds"]) or found["outcome"]
    return f"| {row['kind']} | `{row['name']}` | {_cell(row['what'])} | `{row['run']}` | {verify} | {_said(row)} |"


def _rows(document: Mapping[str, Any]) -> Iterator[str]:
    for row in document["results"]:
        words = f"`{row['run']}`" if row["run"] else "-"
        yield f"| `{row['name']}` | {_cell(row['what'])} | {words} | {_said(row)} | {_kinds(row)} | {_cost(row)} |"


def _cell(text: str) -> str:
    return text.removesuffix(".").replace("|", "\\|")


def _said(row: Row) -> str:
    if row["outcome"] == NOT_WATCHED:
        return f"not watched: {row['said']}".replace("|", "\\|")
    names = f"{' '.join(f'`{name}`' for name in row['sentinels'])}, step {row['step']}"
    if row["outcome"] == "false alarm":
        return f"**false alarm**: {names}"
    return names if row["outcome"] == "caught" else str(row["outcome"])


def _kinds(row: Row) -> str:
    """A run that is older than these columns has neither."""
    kinds = " ".join(row.get("kinds") or ()) or "-"
    return f"{kinds} (not {row['kind']})" if row["outcome"] == "caught" and row.get("named") is False else kinds


def _cost(row: Row) -> str:
    cost = row.get("cost")
    return "-" if cost is None else f"{cost:.2%}"
