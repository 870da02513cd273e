"""Findings as values: every kind has a name and a next move, and the JSON object the keys that are frozen."""

import math
from pathlib import Path

from allranks.verifying.findings import KINDS, OTHER, found


def test_all_forty_kinds_are_there() -> None:
    assert [*KINDS] == [*(f"S{number}" for number in range(1, 41)), OTHER]
    assert all(kind.name and kind.next for kind in KINDS.values())


def test_the_keys_of_the_json_object() -> None:
    finding = found("S9", "every gradient differs", "by 2", tensor="a.b", axis="dp", factor="data ranks = 2", step=3)
    document = finding.to_json()
    frozen = {key: document[key] for key in ("kind", "tensor", "axis", "factor", "evidence", "next")}
    assert frozen == {
        "kind": "S9",
        "tensor": "a.b",
        "axis": "dp",
        "factor": "data ranks = 2",
        "evidence": ["by 2"],
        "next": KINDS["S9"].next,
    }
    assert str(finding.verdict).splitlines()[0] == f"every gradient differs (S9: {KINDS['S9'].name})"


def test_an_error_that_is_no_number_is_left_out() -> None:
    assert [found("S9", "x", error=error).error for error in (0.5, math.inf, math.nan, None)] == [0.5, None, None, None]


def test_the_page_lists_the_kinds_as_they_are() -> None:
    page = (Path(__file__).parents[2] / "docs" / "explanation" / "verify.md").read_text()
    rows = [f"| {number} | {kind.name} | {kind.next} |" for number, kind in KINDS.items() if number != OTHER]
    found = [line for line in page.splitlines() if line.startswith("| S")]
    assert [line for line in found if not line.split(" | ")[1].startswith("`")] == rows  # those of the score name files
