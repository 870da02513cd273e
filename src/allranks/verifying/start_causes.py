"""What differs before the first step: initial values, tied tensors, buffers, what the optimizer holds."""

from collections.abc import Mapping, Sequence

import torch

from allranks.parameter_map import Box
from allranks.verifying.assembly import Mismatch, compare_parts, locate
from allranks.verifying.evidence import Evidence, describe, few
from allranks.verifying.findings import Finding, found
from allranks.verifying.recording import Parts, RunRecord, Start


def places_of(one: RunRecord, ranks: Sequence[RunRecord]) -> dict[tuple[str, int], Box]:
    """Where the parts lie that were cut by hand, by their initial values."""
    found_at = {}
    for rank, run in enumerate(ranks):
        for name, part in run.start.parameters.items():
            whole = one.start.parameters.get(name)
            box = None if whole is None else locate(name, whole.value, part)
            if box is not None and part.box is None:
                found_at[name, rank] = box
    return found_at


def unplaced(one: RunRecord, ranks: Sequence[RunRecord], places: Mapping[tuple[str, int], Box]) -> str:
    """In words, the first tensor of a rank of which one device has nothing; "" where there is none."""
    for rank, run in enumerate(ranks):
        for name, part in run.start.parameters.items():
            if name not in one.start.parameters:
                known = ", ".join(list(one.start.parameters)[:3])
                return f"rank {rank} has a parameter {name}, and one device has none of that name (it has {known}, ...)"
            if part.box is None and (name, rank) not in places:
                shapes = list(part.value.shape), list(one.start.parameters[name].value.shape)
                return (
                    f"rank {rank} has {name} of shape {shapes[0]}, on one device it is {shapes[1]}, and the part is "
                    "nowhere in the initial values there: build both from the same values"
                )
    return ""


def judge_start(evidence: Evidence) -> list[Finding]:
    """Findings on what `build` made, before any step."""
    return [
        *_values(evidence),
        *_buffers(evidence),
        *_tied(evidence),
        *_linked(evidence),
        *(_dtypes(evidence) if evidence.own_types else []),
    ]


def _values(evidence: Evidence) -> list[Finding]:
    expected = evidence.one.run.start.parameters
    ranks = [run.start.parameters for run in evidence.ranks]
    off = compare_parts(ranks, expected, (), evidence.places, relative=0.0)
    if not off:
        return []
    tied = {name for some in evidence.one.run.start.tied for name in some}
    if set(m.name for m in off) <= tied:
        return [_start(evidence, "S14", "tied tensors begin with different values", off)]
    nan = [m for m in off if any(_unset(run, m.name) for run in ranks)]
    if nan:
        return [_start(evidence, "S32", "parameters are not set", nan)]
    return [_start(evidence, "S32", "initial values are not those of one device", off)]


def _unset(parts: Parts, name: str) -> bool:
    return name in parts and not bool(torch.isfinite(parts[name].value).all())


def _buffers(evidence: Evidence) -> list[Finding]:
    ranks = [run.start.buffers for run in evidence.ranks]
    # What has another type is told by `_dtypes`.
    expected = {
        n: p
        for n, p in evidence.one.run.start.buffers.items()
        if any(n in parts for parts in ranks)
        and not (evidence.own_types and any(n in parts and parts[n].value.dtype != p.value.dtype for parts in ranks))
    }
    off = compare_parts(ranks, expected, (), evidence.places, relative=1e-6)
    return [_start(evidence, "S33", "buffers do not begin as on one device", off)] if off else []


def _start(evidence: Evidence, kind: str, what: str, off: Sequence[Mismatch]) -> Finding:
    lines = [describe(m, "", evidence.world).strip() for m in off[:3]]
    axis = evidence.world.axis_of(off[0].ranks)
    return found(kind, f"before the first step {what}: {few([m.name for m in off])}", *lines,
                 tensor=off[0].name, axis=axis)  # fmt: skip


def _tied(evidence: Evidence) -> list[Finding]:
    for some in evidence.one.run.start.tied:
        for rank, run in enumerate(evidence.ranks):
            if is_untied(some, run.start):
                said = f"one device has one tensor for {' and '.join(some)}, rank {rank} has several"
                return [found("S14", f"tied tensors are apart: {few(some)}", said, tensor=some[0])]
    return []


def is_untied(names: Sequence[str], start: Start) -> bool:
    """Whether a process holds several of these names, and not as one tensor."""
    held = {name for name in names if name in start.parameters}
    return len(held) > 1 and not any(held <= set(group) for group in start.tied)


def _linked(evidence: Evidence) -> list[Finding]:
    """What no rank's optimizer holds. Each may hold another part (ZeRO-1): what it then makes of it shows in a step."""
    due = set(evidence.one.run.start.unlinked)
    held = {n for run in evidence.ranks for n in run.start.parameters.keys() - set(run.start.unlinked)}
    for rank, run in enumerate(evidence.ranks):
        left = [name for name in run.start.unlinked if name not in due | held]
        if left:
            said = f"of rank {rank}'s trainable parameters no rank's optimizer holds {len(left)}"
            return [found("S12", f"the optimizer does not hold what the model computes with: {few(left)}", said,
                          tensor=left[0])]  # fmt: skip
    return []


def _dtypes(evidence: Evidence) -> list[Finding]:
    one = evidence.one.run.start
    for what in ("parameters", "buffers"):
        due: Parts = getattr(one, what)
        for rank, run in enumerate(evidence.ranks):
            parts: Parts = getattr(run.start, what)
            off = [n for n, p in parts.items() if n in due and p.value.dtype != due[n].value.dtype]
            if off:
                types = f"{parts[off[0]].value.dtype} on rank {rank}, {due[off[0]].value.dtype} on one device"
                kind = "S26" if what == "buffers" and _follows(evidence, off[0]) else "S27"
                return [found(kind, f"{what} have another precision: {few(off)}", types, tensor=off[0])]
    return []


def _follows(evidence: Evidence, name: str) -> bool:
    """Whether a buffer changes while one device trains: a statistic, and no table that a forward computes with."""
    run = evidence.one.run
    held = [run.start.buffers[name].value, *(step.buffers[name].value for step in run.steps if name in step.buffers)]
    return any(not torch.equal(value, held[0]) for value in held[1:])
