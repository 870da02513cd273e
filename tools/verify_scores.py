"""The table of what verify catches, from the run of the corpus that is stored in bench/results/verify.json.

`allranks bench verify --json > bench/results/verify.json` scores anew, `make fix` writes the table.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from allranks.verifying.findings import KINDS
from tools.law_mistakes import BEGIN as LAWS_BEGIN
from tools.law_mistakes import END as LAWS_END
from tools.law_mistakes import render_laws
from tools.marked import replace_between, replace_marked
from tools.measured_on import render_origin

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results" / "verify.json"
PAGE = ROOT / "docs" / "explanation" / "verify.md"
BEGIN, END = "<!-- begin of the score -->\n", "<!-- end of the score -->\n"
CLEAN = "clean"
Row = Mapping[str, Any]


def render_verify() -> str:
    """The page with what stands between its markers replaced."""
    scored = replace_marked(PAGE, BEGIN, END, render_scores(json.loads(RESULTS.read_text())))
    return replace_between(scored, LAWS_BEGIN, LAWS_END, render_laws(), PAGE.name)


def render_scores(document: Mapping[str, Any]) -> str:
    """The counts, a table of the wrong programs by kind, and one of the clean ones."""
    rows: Sequence[Row] = document["results"]
    wrong, clean = [row for row in rows if row["kind"] != CLEAN], [row for row in rows if row["kind"] == CLEAN]
    lines = [
        render_origin(document),
        "",
        *_counts(document["score"]),
        "",
        "| kind | program | what is wrong | findings |",
        "|---|---|---|---|",
    ]
    lines += [_wrong(row) for row in wrong]
    lines += ["", "| clean program | what it is | verified | said |", "|---|---|---|---|"]
    lines += [_clean(row) for row in clean]
    return "\n".join(lines) + "\n"


def _counts(score: Mapping[str, Any]) -> Iterator[str]:
    refused = f"{score['refused']} refused for it before they ran"
    yield f"- caught: {score['caught']} of {score['wrong']} wrong programs ({refused})"
    yield f"- kinds of which every program is caught: {score['kinds_caught']} of {score['kinds']}"
    yield f"- named rightly: {score['named_first']} by the first finding, {score['named']} by any"
    yield f"- false alarms: {score['false_alarms']} of {score['clean']} runs of clean programs"
    yield f"- not verified: {score['unverified']}; not to be seen on one machine: {score['unseen']}"


def _wrong(row: Row) -> str:
    said = " ".join(row["kinds"]) if row["outcome"] == "caught" else f"**{row['outcome']}**"
    mark = "" if row["named_first"] or row["outcome"] != "caught" else " (another name)"
    return f"| {row['kind']} | `{row['name']}` | {_cell(row['what'])} | {said}{mark} |"


def _clean(row: Row) -> str:
    said = "equal" if row["outcome"] == CLEAN else f"**{row['outcome']}** {' '.join(row['kinds'])}".strip()
    return f"| `{row['name']}` | {_cell(row['what'])} | `{row['run']}` | {said} |"


def _cell(text: str) -> str:
    return text.removesuffix(".").replace("|", "\\|")


def missing_kinds(document: Mapping[str, Any]) -> list[str]:
    """Kinds of which the stored run has no program."""
    there = {row["kind"] for row in document["results"]}
    return [kind for kind in KINDS if kind.startswith("S") and kind not in there]
