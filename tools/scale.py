"""The table of docs/explanation/scale.md, and its extrapolations, from what bench/results/scale.json measured.

`python bench/scale.py --json > bench/results/scale.json` measures anew, `make fix` writes the page.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from allranks.checkpointing.manifest import CHUNK_BYTES, MANIFEST_BYTES_CAP
from allranks.units import format_bytes, format_seconds

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results" / "scale.json"
TEMPLATE = ROOT / "tools" / "scale.md"
BYTES_PER_PARAMETER = 12
BYTES_PER_CHUNK = 85
"""Of a manifest: the line of one chunk, offset, length and SHA-256 in hexadecimal digits."""


def render_scale(note: str) -> str:
    """The page: its words from tools/scale.md, its figures from the stored run."""
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]
    page = TEMPLATE.read_text(encoding="utf-8")
    title, _, rest = page.partition("\n")
    figures = {"table": "\n".join(table(rows)), **extrapolate(rows)}
    return f"{title}\n\n{note.rstrip()}\n" + rest.format(**figures)


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """One line a measurement."""
    yield "| part | size | processor time | bytes |"
    yield "|---|--:|--:|--:|"
    for row in rows:
        took = "" if row["microseconds"] is None else format_seconds(row["microseconds"] / 1e6)
        size = "" if row["size_bytes"] is None else format_bytes(row["size_bytes"])
        if row["microseconds"] is not None and row["microseconds"] < 10:
            took = f"{row['microseconds']:.1f} us"
        yield f"| {row['part']} | {row['number']:,} {row['of']} | {took} | {size} |"


def extrapolate(rows: list[dict[str, Any]]) -> dict[str, str]:
    """What the largest measurement of a save says of one of 405 billion parameters on 16,384 ranks, and its limits."""
    last = [row for row in rows if "gathered and merged" in row["part"]][-1]
    measured = int(last["part"].split()[1])
    tensors = 3 * 1138  # of Llama 3 405B: 126 blocks of 9, embedding, norm, head and their two moments
    times = 16384 / last["number"] * tensors / measured
    met = [row for row in rows if row["part"].startswith("rendezvous")]
    most = met[-1] if met else {"number": 0, "size_bytes": 0}
    told = [row for row in rows if row["part"].startswith("digests")]
    digest = told[-1] if told else {"number": 0, "size_bytes": 0, "microseconds": 0.0}
    limit = MANIFEST_BYTES_CAP / BYTES_PER_CHUNK * CHUNK_BYTES
    return {
        "measured_ranks": f"{last['number']:,}",
        "measured_tensors": str(measured),
        "gather_seconds": format_seconds(last["microseconds"] * times / 1e6),
        "gather_bytes": format_bytes(last["size_bytes"] * times),
        "meeting_hosts": f"{most['number']:,}",
        "meeting_bytes": format_bytes(most["size_bytes"]),
        "meeting_rate": format_bytes(2 * most["number"] * most["size_bytes"]),
        "digest_ranks": f"{digest['number']:,}",
        "digest_bytes": format_bytes(digest["size_bytes"]),
        "digest_seconds": format_seconds(digest["microseconds"] / 1e6),
        "manifest_cap": format_bytes(MANIFEST_BYTES_CAP),
        "limit_bytes": format_bytes(limit),
        "limit_parameters": f"{limit / BYTES_PER_PARAMETER / 1e12:.0f}",
        "ten_trillion": format_bytes(10e12 * BYTES_PER_PARAMETER),
    }
