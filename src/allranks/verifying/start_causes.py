"""What differs before the first step: initial values, tied tensors, buffers, what the optimizer holds."""

from collections.abc import Mapping, Sequence
from itertools import takewhile

import torch

from allranks.parameter_map import Box
from allranks.verifying.assembly import Mismatch, compare_parts, locate
from allranks.verifying.evidence import Evidence, describe, few
from allranks.verifying.findings import Finding, found
from allranks.verifying.recording import Parts, RunRecord, Start, StepRecord

OF_GRADIENT = 1e-3  # of a tensor's largest gradient: those of another place are further off


def places_of(one: RunRecord, ranks: Sequence[RunRecord]) -> dict[tuple[str, int], Box]:
    """Where the parts lie that were cut by hand, by their initial values.

    Where several places have these (zeros, ones), those are left in which a part's gradients are one device's through
    the most first steps; and of these each rank has the next one behind the last, in the order of the ranks.
    """
    may = {
        (name, rank): locate(one.start.parameters[name].value, part)
        for rank, run in enumerate(ranks)
        for name, part in run.start.parameters.items()
        if part.box is None and name in one.start.parameters
    }
    found_at = {key: boxes[0] for key, boxes in may.items() if len(boxes) == 1}
    for name in dict.fromkeys(name for (name, _), boxes in may.items() if len(boxes) > 1):
        holders = [rank for rank in range(len(ranks)) if may.get((name, rank))]
        for group in _fed_alike(ranks, holders):
            left = [_by_gradients(name, one, ranks[rank], may[name, rank]) for rank in group]
            found_at |= {(name, rank): box for rank, box in zip(group, _one_behind_the_other(left), strict=True)}
    return found_at


def _fed_alike(ranks: Sequence[RunRecord], some: Sequence[int]) -> list[list[int]]:
    """Ranks in groups that were fed the same samples; all of them together where each has its own."""
    groups: dict[object, list[int]] = {}
    for rank in some:
        groups.setdefault(tuple(tuple(sorted(step.rows)) for step in ranks[rank].steps), []).append(rank)
    return [*groups.values()] if len(groups) < len(some) else [[*some]]


def _by_gradients(name: str, one: RunRecord, run: RunRecord, boxes: Sequence[Box]) -> list[Box]:
    """Of places those in which a rank's gradients of a part are one device's through the most first steps."""

    def is_there(box: Box, alone: StepRecord, step: StepRecord) -> bool:
        due, own = (alone.raw or alone.gradients).get(name), (step.raw or step.gradients).get(name)
        if due is None or own is None or tuple(own.value.shape) != box.shape or not own.value.numel():
            return True
        apart = (own.value.to(due.value.dtype) - due.value[box.place(tuple(due.value.shape))]).abs().max()
        return bool(apart <= OF_GRADIENT * due.value.abs().max())

    def steps(box: Box) -> int:
        return sum(takewhile(bool, (is_there(box, *both) for both in zip(one.steps, run.steps, strict=False))))

    counts = [steps(box) for box in boxes] if len(boxes) > 1 else [0]
    return [box for box, count in zip(boxes, counts, strict=True) if count == max(counts)]


def _one_behind_the_other(may: Sequence[Sequence[Box]]) -> list[Box]:
    """One place for each part: the first behind the last part's, or at the beginning again."""
    found_here: list[Box] = []
    for boxes in may:
        behind = [box for box in boxes if found_here and box.intersect(found_here[-1]) is None]
        later = [box for box in behind if box.offset > found_here[-1].offset]
        found_here.append((later or boxes)[0])
    return found_here


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
