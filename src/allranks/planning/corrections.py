"""What runs on this machine took beside what was calculated for them: kept for its next plan, and for no other's.

A file for each machine lies beside its calibrations. A row is one run; it counts for plans that are made of the same
figures alone, so that a new calibration starts anew. Of the last runs of a family of layouts the median counts, within
limits; a family that nobody ran takes the median of the others, because most of what figures miss is the machine's.
"""

import hashlib
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from allranks import __version__
from allranks.cluster import Cluster, Correction
from allranks.durable import replacing
from allranks.layout import Layout

LAST_RUNS = 8
"""Of a family, whose median counts: what the machine was like long ago is not asked."""
MOST = 4.0
"""A factor is at most this, and at least its inverse: beyond, a run was disturbed, or the figures are another's."""
MIN_STEPS = 20
"""Of a run that counts. The report leaves out its first step; of the others it takes the median."""
KEPT_ROWS = 200
OTHERS = ""
"""The family of what nobody ran yet."""

Finite = Annotated[float, Field(allow_inf_nan=False)]


@final
class Row(BaseModel):
    """One run.

    Attributes:
        machine: `Cluster.machine` of its plan, the digest of the figures in it; version: of allranks.
        seconds_ratio: the measured step over what was calculated without any correction.
        context_bytes: of the measured peak what no other category of the estimate explains; None on a GPU, where a
            run measures its tensors alone.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: str
    machine: str
    version: str
    family: str
    seconds_ratio: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    context_bytes: Finite | None = None


@final
class Rows(BaseModel):
    """The file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = Field(1, alias="schema")
    rows: tuple[Row, ...] = ()


def family_of(layout: Layout) -> str:
    """Its axes and how parameters are shared, whatever the degrees: "ddp", "fsdp", "tp+fsdp", "pp", "single"."""
    shared = {"optimizer": "zero-1", "grad_op": "fsdp-grad_op"}.get(layout.sharding, "fsdp")
    axes = [axis for axis in ("pp", "cp", "tp", "ep") if getattr(layout, axis) > 1]
    axes += [shared] if layout.dp_shard > 1 else []
    axes += ["ddp"] if layout.dp_replicate > 1 else []
    return "+".join(axes) or "single"


def machine_of(slug: str, cluster: Cluster) -> str:
    """What the rows of plans made of these figures are kept under."""
    figures = repr((cluster.device, cluster.inside, cluster.devices_per_node, cluster.host_bandwidth))
    return f"{slug}/{hashlib.sha256(figures.encode()).hexdigest()[:12]}"


def corrected(cluster: Cluster, slug: str, path: Path) -> Cluster:
    """`cluster`, which stands for the machine `slug`, with what its runs say; a file that cannot be read is noted."""
    cluster = replace(cluster, machine=machine_of(slug, cluster))
    rows, fault = read_rows(path)
    if fault:
        note = f"what earlier runs took is left out, because {fault}; the next run begins it anew"
        return replace(cluster, notes=(*cluster.notes, note))
    own = [row for row in rows if (row.machine, row.version) == (cluster.machine, __version__)]
    found = corrections_of(own)
    if not found:
        return cluster
    cluster = replace(cluster, corrections=found, device=replace(cluster.device, context_bytes=_context(cluster, own)))
    return replace(cluster, notes=(*cluster.notes, f"{', because '.join(explain(cluster))}; kept in {path}"))


def corrections_of(rows: Sequence[Row]) -> dict[str, Correction]:
    """Family -> its Correction; under OTHERS what a family that is not there takes. {} without rows."""
    by_family: dict[str, list[float]] = {}
    for row in rows:
        by_family.setdefault(row.family, []).append(row.seconds_ratio)
    found = {family: _correction(ratios) for family, ratios in sorted(by_family.items())}
    if found:
        middle = math.exp(statistics.median(math.log(one.factor) for one in found.values()))
        found[OTHERS] = Correction(middle, middle, sum(one.num_runs for one in found.values()))
    return found


def factor_of(cluster: Cluster, layout: Layout) -> float:
    """By what the calculated seconds of `layout` are multiplied."""
    if not cluster.corrections:
        return 1.0
    return (cluster.corrections.get(family_of(layout)) or cluster.corrections[OTHERS]).factor


def least_factor(cluster: Cluster) -> float:
    """That of the family which is corrected down the most."""
    return min((one.factor for one in cluster.corrections.values()), default=1.0)


def explain(cluster: Cluster) -> tuple[str, str]:
    """What was changed, and why: "... ddp x1.18", "on this machine ddp took 1.18x the prediction in 5 runs"."""
    named = {family: one for family, one in cluster.corrections.items() if family != OTHERS}
    changed = ", ".join(f"{family} x{one.factor:.2f}" for family, one in named.items())
    measured = ", ".join(
        f"{family} {one.measured:.2f}x the prediction in {one.num_runs} run{'s' if one.num_runs > 1 else ''}"
        for family, one in named.items()
    )
    others = f", others x{cluster.corrections[OTHERS].factor:.2f}"
    return f"calculated step times are multiplied: {changed}{others}", f"on this machine were measured {measured}"


def remember(path: Path, row: Row) -> str:
    """Add a run to the file, in the place of what it said of itself before; "" or what was lost, in one line.

    Of two runs that end in the same moment one may be lost, which costs one of several measurements.

    Raises:
        OSError: the file cannot be written.
    """
    rows, fault = read_rows(path)
    kept = [one for one in rows if one.run != row.run]
    path.parent.mkdir(parents=True, exist_ok=True)
    document = Rows(schema=1, rows=(*kept, row)[-KEPT_ROWS:]).model_dump(by_alias=True)
    with replacing(path) as draft:
        draft.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return f"what earlier runs took is begun anew, because {fault}" if fault else ""


def read_rows(path: Path) -> tuple[tuple[Row, ...], str]:
    """(The rows, ""), or ((), why the file cannot be taken)."""
    try:
        return Rows.model_validate_json(path.read_bytes()).rows, ""
    except FileNotFoundError:
        return (), ""
    except OSError as error:
        return (), f"{path} cannot be read: {error.strerror}"
    except ValidationError as error:
        return (), f"{path} is torn or of another version: {error.errors()[0]['msg']}"


def _correction(ratios: Iterable[float]) -> Correction:
    last = list(ratios)[-LAST_RUNS:]
    middle = statistics.median(last)
    return Correction(min(MOST, max(1 / MOST, middle)), middle, len(last))


def _context(cluster: Cluster, rows: Sequence[Row]) -> float | None:
    """What a process takes whatever it trains, of a processor, as the last runs had it."""
    found = [row.context_bytes for row in rows if row.context_bytes is not None][-LAST_RUNS:]
    known = cluster.device.context_bytes
    if not found or known is None:
        return known
    return min(MOST * known, max(known / MOST, statistics.median(found)))
