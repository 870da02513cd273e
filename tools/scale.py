"""The table of docs/explanation/scale.md, and its extrapolations, from what bench/results/scale.json measured.

`python bench/scale.py --json > bench/results/scale.json` measures anew, `make fix` writes the page.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allranks.checkpointing.manifest import CHUNK_BYTES, MANIFEST_BYTES_CAP
from allranks.config_guard import GuardConfig
from allranks.surviving.hosts.handler import BEAT_SECONDS, BEATS
from allranks.units import format_bytes, format_seconds
from tools.measured_on import render_origin

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results" / "scale.json"
TEMPLATE = ROOT / "tools" / "scale.md"
BYTES_PER_PARAMETER = 12
BEAT = GuardConfig().host_seconds / max(BEATS, int(GuardConfig().host_seconds / BEAT_SECONDS))
"""Seconds between two signs of life of a host."""
LARGE_RANKS, LARGE_PARAMETERS, LARGE_PARTS = 100_000, 10e12, 50_000
"""The largest run that the page reckons: its ranks, its parameters, and of each tensor the parts."""
LLAMA_TENSORS = 3 * 1138
"""Of Llama 3 405B: 126 blocks of 9, embedding, norm, head and their two moments."""


@dataclass(frozen=True, slots=True)
class Growth:
    """Bytes of what a save gathers, or writes as its manifest, besides a start that a large one has forgotten.

    Attributes:
        rank: for each rank's file with one chunk; chunk: for each chunk more.
        tensor: for each tensor, where it is gathered from each rank for each of its parts.
    """

    rank: float
    tensor: float
    chunk: float

    @classmethod
    def of(cls, rows: list[dict[str, Any]], name: str) -> "Growth":
        """From the rows of `growth` in bench/scale.py that end with `name`."""
        found: dict[tuple[int, int], float] = {}
        ranks = 0
        for row in rows:
            words = row["part"].split(" ")
            if row["part"].endswith(f": {name}") and "files" in words:
                found[int(words[1]), int(words[words.index("of") + 1])] = row["size_bytes"]
                ranks = row["number"]
        (few, one), (many, _) = min(found), max(found)
        tensor = (found[many, one] - found[few, one]) / (many - few)
        (usual, chunks) = max(found, key=lambda size: size[1])
        chunk = (found[usual, chunks] - found[usual, one]) / ((chunks - one) * ranks)
        per_rank = (found[few, one] - few * tensor) / ranks
        return cls(per_rank, tensor / ranks if name.startswith("gathered") else tensor, chunk)

    def of_large(self, parts: int) -> float:
        """Bytes in the largest run; of each tensor so many parts are told."""
        chunks = LARGE_PARAMETERS * BYTES_PER_PARAMETER / CHUNK_BYTES - LARGE_RANKS
        return LARGE_RANKS * self.rank + LLAMA_TENSORS * parts * self.tensor + chunks * self.chunk


def render_scale(note: str) -> str:
    """The page: its words from tools/scale.md, its figures from the stored run."""
    document = json.loads(RESULTS.read_text(encoding="utf-8"))
    rows = document["rows"]
    page = TEMPLATE.read_text(encoding="utf-8")
    title, _, rest = page.partition("\n")
    origin = document.get("measured") or render_origin(document)
    figures = {"table": "\n".join(table(rows)), "origin": origin, **extrapolate(rows)}
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
        mark = " (*reckoned*)" if row.get("reckoned") else ""
        yield f"| {row['part']}{mark} | {row['number']:,} {row['of']} | {took} | {size} |"


def vectors(rows: list[dict[str, Any]]) -> dict[str, str]:
    """Bytes of a step's vector, and what each stage of a pipeline adds to them."""
    found = {row["part"]: row["size_bytes"] for row in rows if row["part"].startswith("agreement")}
    alone = next((size for part, size in found.items() if " stages" not in part), 0)
    each = [(size - alone) // int(part.split()[-2]) for part, size in found.items() if part.endswith(" stages")]
    return {"vector_bytes": str(alone), "stage_bytes": str(each[-1] if each else 0)}


def extrapolate(rows: list[dict[str, Any]]) -> dict[str, str]:
    """What the largest measurement of a save says of one of 405 billion parameters on 16,384 ranks, and its limits."""
    last = [row for row in rows if "gathered and merged" in row["part"]][-1]
    measured = int(last["part"].split()[1])
    times = 16384 / last["number"] * LLAMA_TENSORS / measured
    met = [row for row in rows if row["part"].startswith("rendezvous")]
    most = met[-1] if met else {"number": 0, "size_bytes": 0}
    told = [row for row in rows if row["part"].startswith("digests")]
    resumed = [row for row in rows if row["part"].startswith("resuming")]
    boxes = resumed[-1] if resumed else {"number": 0, "size_bytes": 0}
    digest = told[-1] if told else {"number": 0, "size_bytes": 0, "microseconds": 0.0}
    gathered, manifest = (Growth.of(rows, name) for name in ("gathered by the first rank", "the manifest"))
    limit = MANIFEST_BYTES_CAP / manifest.chunk * CHUNK_BYTES
    return {
        **vectors(rows),
        "measured_ranks": f"{last['number']:,}",
        "measured_tensors": str(measured),
        "gather_seconds": format_seconds(last["microseconds"] * times / 1e6),
        "gather_bytes": format_bytes(last["size_bytes"] * times),
        "meeting_hosts": f"{most['number']:,}",
        "meeting_bytes": format_bytes(most["size_bytes"]),
        "meeting_rate": format_bytes(2 * most["number"] * most["size_bytes"] / BEAT),
        "beat_seconds": f"{BEAT:.2g}",
        "resume_ranks": f"{boxes['number']:,}",
        "resume_bytes": format_bytes(boxes["size_bytes"]),
        "digest_ranks": f"{digest['number']:,}",
        "digest_bytes": format_bytes(digest["size_bytes"]),
        "digest_seconds": format_seconds(digest["microseconds"] / 1e6),
        "manifest_cap": format_bytes(MANIFEST_BYTES_CAP),
        "limit_bytes": format_bytes(limit),
        "limit_parameters": f"{limit / BYTES_PER_PARAMETER / 1e12:.0f}",
        "ten_trillion": format_bytes(LARGE_PARAMETERS * BYTES_PER_PARAMETER),
        "large_ranks": f"{LARGE_RANKS:,}",
        "large_parts": f"{LARGE_PARTS:,}",
        "large_tensors": f"{LLAMA_TENSORS:,}",
        "large_gathered": format_bytes(gathered.of_large(LARGE_PARTS)),
        "large_manifest": format_bytes(manifest.of_large(1)),
    }
