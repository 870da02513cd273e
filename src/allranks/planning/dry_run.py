"""What a dry run counted of a Choice, and the Estimate that follows: its memory, the host's too, and its messages."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, final

from allranks.layout import Layout
from allranks.plan import Estimate, MemoryUse, Span, Traffic
from allranks.planning.reasons import HOLDINGS, NOTICED, needs_of_host
from allranks.rehearsed_messages import COPIES_OF_EXPERTS
from allranks.units import format_bytes, format_seconds

NOTICED_OTHER = 0.05
"""Of the planned bytes: what a dry run counts and no plan does is named where it is more."""
CAUSES = {
    "dp": "data",
    "dp_shard": "data",
    "dp_replicate": "data",
    "tp": "tensor",
    "cp": "context",
    "ep": "expert",
    "pp": "pipeline",
    COPIES_OF_EXPERTS: "data",
}
"""Axis of a Traffic -> the part of a StepTime that its messages take."""


@final
@dataclass(frozen=True, slots=True)
class DryRun:
    """What `allranks dryrun` said of one Choice.

    Attributes:
        peak_bytes: on the fullest rank; by_category: of what, at that moment.
        margin_bytes: that have to stay free beside them.
        sent_bytes: axis of a Traffic -> bytes in one step, counted as a Traffic counts them, of the busiest rank.
        host_bytes: that wait in a node's memory, where every process has as much there as the one with the most.
        fault: the first thing that the run would fail by, with the move that mends it; "" where there is none.
    """

    peak_bytes: float = 0.0
    margin_bytes: float = 0.0
    by_category: Mapping[str, float] = field(default_factory=dict)
    sent_bytes: Mapping[str, float] = field(default_factory=dict)
    host_bytes: float = 0.0
    fault: str = ""


def read_dry_run(document: Mapping[str, Any], layout: Layout, per_node: int) -> DryRun:
    """The document of `allranks dryrun --json` (docs/reference/dryrun.md) of a run under `layout`.

    Args:
        per_node: processes on one node.
    """
    ranks = list(document["ranks"].values())
    fullest = max(ranks, key=lambda rank: float(rank["peak_bytes"]))
    found = [*document["findings"], *(finding for rank in ranks for finding in rank["findings"])]
    faults = [f"{finding['what']}; {finding['next']}" for finding in found if finding["fails"]]
    sent: Counter[str] = Counter()
    for rank in ranks:
        sent |= _sent(rank["collectives"], layout)  # the most of each axis
    return DryRun(
        peak_bytes=fullest["peak_bytes"],
        margin_bytes=document["margin_bytes"],
        by_category=dict(fullest["by_category"]),
        sent_bytes=dict(sent),
        host_bytes=per_node * document["host_peak_bytes"],
        fault=next(iter(faults), ""),
    )


def _sent(collectives: list[dict[str, Any]], layout: Layout) -> Counter[str]:
    """Of one rank by axis. A collective over n ranks brings a rank (n - 1) / n of what a Traffic counts.

    Where parameters are shared, a Traffic has the gathers and scatters of those who share them, and apart from them the
    sums over copies.
    """
    shared = layout.dp_shard > 1 and layout.sharding != "none"
    sent: Counter[str] = Counter()
    for one in collectives:
        axis, others = one["axis"], one["ranks"] - 1
        if one["op"] == "receive" or not others:
            continue
        if axis == "pp" and one["op"] != "send":  # a plan has no sums of what the first and the last stage share
            continue
        if axis == "cp" and layout.dp == 1 and one["op"] == "all-reduce":
            axis = "dp"  # gradients: the ranks of a sequence are all the data-parallel ones that there are
        if axis.startswith("dp") or axis not in CAUSES:
            among_sharers = "dp_shard" in axis
            if shared and layout.dp_replicate > 1:
                axis = "dp_shard" if among_sharers else "dp_replicate"
            elif shared and not among_sharers:
                continue
            else:
                axis = "dp"
        sent[axis] += one["bytes"] * (1 if one["op"] == "send" else one["ranks"] / others)
    return sent


def ratios(planned: Estimate, told: DryRun) -> dict[str, float]:
    """Axis -> counted bytes over planned ones, where they differ by more than is noticed."""
    expected: dict[str, float] = {}
    for row in planned.traffic:
        expected[row.axis] = expected.get(row.axis, 0.0) + row.sent_bytes
    counted = dict(told.sent_bytes)
    counted.setdefault("dp", counted.get("dp_shard", 0.0))  # of modes whose plan has one row for all data ranks
    found = {axis: counted[axis] / num for axis, num in expected.items() if num and counted.get(axis)}
    return {axis: ratio for axis, ratio in found.items() if abs(ratio - 1) > NOTICED}


def corrected(planned: Estimate, told: DryRun) -> Estimate:
    """`planned` with the counted memory, of devices and of hosts; seconds of messages are in proportion to their bytes.

    What hides behind computation stays the share that was planned. What the process takes besides its tensors stays as
    planned, too, and so do copies of checkpoints in the host's memory: a dry run, which is of steps, does not see them.
    """
    if told.fault:
        return replace(planned, fault=told.fault)
    scales = ratios(planned, told)
    time = replace(planned.time, **dict(_scaled_seconds(planned, scales)))
    slower = time.total / planned.time.total if planned.time.total else 1.0
    memory = _memory(told, planned.memory.framework)
    peak = told.peak_bytes + max(told.margin_bytes, memory.framework)
    return replace(
        planned,
        memory=memory,
        stages={},
        peak_bytes=Span(memory.total, peak, peak),
        host_bytes=told.host_bytes + planned.copied_bytes,
        time=time,
        step_seconds=Span(*(slower * part for part in _parts(planned.step_seconds))),
        traffic=tuple(_scaled(row, scales.get(row.axis, 1.0)) for row in planned.traffic),
        mfu=planned.mfu / slower,
        samples_per_second=planned.samples_per_second / slower,
        tokens_per_second=planned.tokens_per_second / slower,
    )


def _scaled_seconds(planned: Estimate, scales: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """(cause, its seconds): of several axes, each scales its part of what is exposed. Arithmetic: in proportion."""
    for cause in {CAUSES[axis]: None for axis in scales}:
        rows = [row for row in planned.traffic if CAUSES[row.axis] == cause]
        exposed = [row.seconds - row.hidden_seconds for row in rows]
        scaled = sum(scales.get(row.axis, 1.0) * part for row, part in zip(rows, exposed, strict=True))
        yield cause, getattr(planned.time, cause) * (scaled / sum(exposed) if sum(exposed) else 1.0)


def _parts(span: Span) -> tuple[float, float, float]:
    return span.low, span.expected, span.high


def _scaled(row: Traffic, ratio: float) -> Traffic:
    sizes = {name: ratio * getattr(row, name) for name in ("sent_bytes", "seconds", "hidden_seconds")}
    return replace(row, **sizes)


def _memory(told: DryRun, framework: float) -> MemoryUse:
    """The categories of a rehearsal are those of a plan, and one for the rest, which is little."""
    counted = dict(told.by_category)
    rest = counted.pop("other", 0.0)
    return MemoryUse(**{**counted, "activations": counted.get("activations", 0.0) + rest, "framework": framework})


def what_changed(planned: Estimate, told: DryRun) -> str:
    """One line: what was counted beside what was planned, and what that does to the step."""
    if told.fault:
        return f"would fail: {told.fault}"
    after = corrected(planned, told)
    tensors = planned.memory.total - planned.memory.framework
    other = told.by_category.get("other", 0.0)
    beside = f" ({format_bytes(other)} of it cuBLAS's and the batch's)" if other > NOTICED_OTHER * tensors else ""
    said = [f"{format_bytes(told.peak_bytes)} counted{beside}, {format_bytes(tensors)} planned"]
    if not after.fits_host:
        said.append(needs_of_host(after))
    if after.peak_bytes.high > after.capacity_bytes:
        name, most = max(told.by_category.items(), key=lambda pair: pair[1])
        margin = after.peak_bytes.expected - told.peak_bytes
        room = format_bytes(after.capacity_bytes)
        holding = HOLDINGS.get(name, name)
        said.append(f"with {format_bytes(margin)} of margin more than {room}; {holding} {format_bytes(most)}")
    scales = ratios(planned, told)
    if scales:
        times = ", ".join(f"{axis} {ratio:.2f}" for axis, ratio in scales.items())
        before, now = (format_seconds(one.step_seconds.expected) for one in (planned, after))
        step = f"step {before} -> {now}" if before != now else f"step {now} as before"
        said.append(f"bytes by axis times {times}: {step}")
    else:
        said.append("messages as planned")
    return "; ".join(said)
