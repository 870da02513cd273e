"""What differs after training: a resume, and an evaluation."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import torch

from allranks.verifying.assembly import Mismatch, allowance, compare_parts, put_together
from allranks.verifying.evidence import Evidence, describe, few
from allranks.verifying.findings import OTHER, Finding, found
from allranks.verifying.recording import Parts, RunRecord, StepRecord
from allranks.verifying.start_causes import is_untied

LOADS = ("the load", "the second load")
VALUES = ("S17", "S40")  # kinds that a save may seem to be only because its program is run in float64


def judge_evaluation(evidence: Evidence) -> list[Finding]:
    """Whether each rank that reports something reports what one device measures."""
    one = evidence.one.run
    if one.evaluation is None:
        return []
    coverage = _coverage(evidence)
    for name, due in one.evaluation.items():
        # A rank that leaves it to the others reports nothing; where all do, it is missing.
        told = {
            rank: run.evaluation[name]
            for rank, run in enumerate(evidence.ranks)
            if run.evaluation and name in run.evaluation
        }
        values = [*told.values()] or [math.nan]
        allowed = _allowed(evidence, name, due)
        if all(abs(value - due) <= allowed for value in values):
            continue
        said = f"{name}: {due:.6g} on one device, {', '.join(f'{value:.6g}' for value in values)} on the ranks"
        if coverage is not None:
            kind, why = coverage
            return [found(kind, f"evaluation: {name} differs", said, why, tensor=name)]
        if one.start.statistics and not _buffers_agree(evidence):
            return [found("S25", f"evaluation: {name} differs with the ranks' own statistics", said, tensor=name)]
        axis = evidence.world.axis_of_values(told, due, allowed)
        factor = evidence.world.in_words(values[0] / due, axis) if due else ""
        return [found("S30", f"evaluation: {name} is not what one device reports", said, tensor=name,
                      axis=axis, factor=factor)]  # fmt: skip
    return []


def _allowed(evidence: Evidence, name: str, due: float) -> float:
    moved = [abs((run.evaluation or {}).get(name, due) - due) for run in evidence.one.variants]
    largest = max(abs(value) for value in (evidence.one.run.evaluation or {name: due}).values())
    return max(1e-9 * abs(due), 1e-12, allowance(max(moved, default=0.0), abs(due), largest))


def _coverage(evidence: Evidence) -> tuple[str, str] | None:
    if any(run.evaluated_packed for run in (evidence.one.run, *evidence.ranks)):
        return None  # a part of a packed batch is another one
    due = Counter(evidence.one.run.evaluated)
    firsts = {evidence.world.data_rank[rank]: rank for rank in reversed(range(evidence.world.size))}
    fed = sum((Counter(evidence.ranks[rank].evaluated) for rank in firsts.values()), Counter[int]())
    extra, lost = (fed - due).total(), (due - fed).total()
    if extra:
        return "S2", f"{extra} samples are counted more than once: {fed.total()} are measured, {due.total()} are there"
    return ("S3", f"{lost} of {due.total()} samples are measured by nobody") if lost else None


def _buffers_agree(evidence: Evidence) -> bool:
    return not evidence.compare(evidence.num_steps - 1, "buffers")


@final
@dataclass(frozen=True)
class _Load:
    """A load, and what was saved.

    Attributes:
        saved: the runs of the ranks that have saved.
        loaded: the runs that the load has begun.
        what: "the load", or which one it is.
    """

    saved: Sequence[RunRecord]
    loaded: Sequence[RunRecord]
    what: str

    @property
    def first(self) -> int:
        """The first step after it."""
        return self.saved[0].saved_before


def judge_resume(evidence: Evidence) -> list[Finding]:
    """Whether the ranks go on from each save as if nothing had happened, by their own uninterrupted run.

    A program in float32 that casts what it saves to float32 loses nothing, but what it has in float64 here: where
    values are off, it is asked again in its own precision, in which a save of less still is a loss.
    """
    findings = _judge_loads(evidence)
    kinds = [finding.verdict.kind for finding in findings]
    own = evidence.in_own_precision() if set(kinds) & set(VALUES) else ()
    if not own or own[0].resumed is None:
        return findings
    again = _judge_loads(replace(evidence, ranks=own))
    return findings if [finding.verdict.kind for finding in again] == kinds else again


def _judge_loads(evidence: Evidence) -> list[Finding]:
    saved: Sequence[RunRecord] = evidence.ranks
    for what in LOADS:
        loaded = [run.resumed for run in saved if run.resumed is not None]
        if len(loaded) < len(saved):
            return []
        found_here = _judge_load(evidence, _Load(saved, loaded, what))
        if found_here:
            return found_here
        saved = loaded
    return []


def _judge_load(evidence: Evidence, load: _Load) -> list[Finding]:
    errors = [run.error for run in load.loaded if run.error]
    if errors:
        return [found(OTHER, "the resume fails", errors[0])]
    found_here = _loaded(evidence, load)
    if found_here:
        return found_here
    for index in range(load.first, evidence.num_steps):
        for rank, run in enumerate(evidence.ranks):
            finding = _resumed_step(load, rank, run, index)
            if finding is not None:
                return [finding]
    return []


def _loaded(evidence: Evidence, load: _Load) -> list[Finding]:
    """Findings on the parameters that a load gave."""
    first, expected = load.first, _saved(evidence, load.saved)
    starts = [run.start for run in load.loaded]
    off = compare_parts([start.parameters for start in starts], expected, (), evidence.places, relative=0.0)
    if off:
        kind, what = _why_loaded(evidence, off, [start.parameters for start in starts], expected, first)
        lines = [describe(m, "parameter", evidence.world) for m in off[:3]]
        return [
            found(
                kind, f"after {load.what} {what}: {few([m.name for m in off])}", *lines, tensor=off[0].name, step=first
            )
        ]
    lost = _buffers_lost(load)
    if lost:
        said = f"{few(lost)} are not what was saved"
        return [found("S17", f"after {load.what} buffers differ", said, tensor=lost[0], step=first)]
    for some in evidence.one.run.start.tied:
        if any(is_untied(some, start) for start in starts):
            return [found("S14", f"tied tensors are apart after {load.what}: {few(some)}", tensor=some[0], step=first)]
    return []


def _saved(evidence: Evidence, saved: Sequence[RunRecord]) -> Parts:
    """The ranks' parameters as they were saved, put together."""
    due: Parts = evidence.one.run.steps[saved[0].saved_before - 1].parameters
    held = [_before_save(run).parameters for run in saved]
    whole = {n: put_together(n, p.value, held, evidence.places) for n, p in due.items()}
    return {n: due[n]._replace(value=value) for n, value in whole.items() if value is not None}


def _before_save(run: RunRecord) -> StepRecord:
    return run.steps[run.saved_before - 1 - run.first]


def judge_reshard(evidence: Evidence, loaded: RunRecord) -> list[Finding]:
    """Whether one process that loads what the ranks have saved has its values where they were.

    A save that only as many ranks can read is no mistake: a load that fails or gives other values is not judged. One
    that gives all of the values in other places has taken the save for something else, and nobody would be told.
    """
    saved = [run.last_saved for run in evidence.ranks]
    first = saved[0].saved_before
    if loaded.error or not first:
        return []
    alone, expected = replace(evidence, places={}), _saved(evidence, saved)
    off = compare_parts([loaded.start.parameters], expected, (), {}, relative=0.0)
    if not off or not _permuted(alone, off, [loaded.start.parameters], expected):
        return []
    said = f"saved by {evidence.world.size} ranks; these have their own values back when they load it"
    names = few([m.name for m in off])
    return [found("S18", f"after a load on one process values are there in other places: {names}", said,
                  tensor=off[0].name, step=first)]  # fmt: skip


def _buffers_lost(load: _Load) -> list[str]:
    """Buffers that a rank has after the load otherwise than when it saved."""
    lost = []
    for run, loaded in zip(load.saved, load.loaded, strict=True):
        now, saved = loaded.start.buffers, _before_save(run).buffers
        lost += [name for name, part in now.items() if name in saved and _apart(part.value, saved[name].value)]
    return lost


def _why_loaded(
    evidence: Evidence, off: Sequence[Mismatch], held: Sequence[Parts], expected: Parts, first: int
) -> tuple[str, str]:
    earlier = [evidence.one.run.start.parameters, *(step.parameters for step in evidence.one.run.steps[: first - 1])]
    for index, parts in enumerate(earlier):
        if not compare_parts(held, parts, (), evidence.places, relative=1e-9):
            return "S40", f"the run stands before step {index}, not before step {first}"
    if _permuted(evidence, off, held, expected):
        return "S18", "values are there in other places"
    for m in off:
        got, due = put_together(m.name, expected[m.name].value, held, evidence.places), expected[m.name].value
        if got is None:
            return "S19", "part of a tensor is nowhere"
        same = (got == due).reshape(len(got), -1).all(1) if got.dim() else got == due
        if bool(same.any()) and not bool(same.all()):
            return "S19", f"{int((~same).sum())} of {same.numel()} rows are lost"
    return "S40", "parameters are not those that were saved"


def _permuted(evidence: Evidence, off: Sequence[Mismatch], held: Sequence[Parts], expected: Parts) -> bool:
    """Whether the tensors that are off hold together just what they should, each value somewhere."""
    got = [put_together(m.name, expected[m.name].value, held, evidence.places) for m in off]
    if any(value is None for value in got):
        return False
    found_here = torch.cat([value.flatten() for value in got if value is not None])
    due = torch.cat([expected[m.name].value.flatten() for m in off])
    return torch.equal(found_here.sort().values, due.sort().values)


def _resumed_step(load: _Load, rank: int, run: RunRecord, index: int) -> Finding | None:
    """A finding on one step after the load, by what the same rank did without one, in `run`."""
    after, steps = f"after {load.what}", load.loaded[rank].steps
    if index - load.first >= len(steps):
        return found("S20", f"{after} the data ends before step {index}", step=index)
    due, now = run.steps[index], steps[index - load.first]
    if now.rows != due.rows:
        return found("S20", f"{after} step {index} is fed other samples on rank {rank}",
                     _where(now.rows, run.steps), step=index)  # fmt: skip
    lr = [group.get("lr") for group in now.settings], [group.get("lr") for group in due.settings]
    if lr[0] != lr[1]:
        return found("S17", f"{after} the learning rate of step {index} is {lr[0]}, without it {lr[1]}", step=index)
    drawn = [[draw.state for draw in record.draws] for record in (now, due)]
    if drawn[0] != drawn[1]:
        noise = any(draw.noise for draw in due.draws)
        what = "draws other noise" if noise and _dropped(due) == _dropped(now) else "drops other units"
        return found("S21", f"{after} step {index} {what} on rank {rank}", step=index)
    lost = [name for name in due.state if name not in now.state]
    off = [n for n, part in due.state.items() if n in now.state and _apart(now.state[n].value, part.value)]
    if lost or off:
        names = lost or off
        return found("S17", f"{after} optimizer state differs: {few(names)}", tensor=names[0], step=index)
    moved = [n for n, part in due.parameters.items() if _apart(now.parameters[n].value, part.value)]
    if moved:
        return found("S17", f"{after} parameters differ after step {index}: {few(moved)}", tensor=moved[0],
                     step=index)  # fmt: skip
    kept = [n for n, part in due.kept.items() if n not in now.kept or _apart(now.kept[n].value, part.value)]
    return found("S17", f"{after} {few(kept)} differ", tensor=kept[0], step=index) if kept else None


def _dropped(record: StepRecord) -> list[int]:
    return [draw.state for draw in record.draws if not draw.noise]


def _where(rows: Sequence[int], steps: Sequence[StepRecord]) -> str:
    for index, step in enumerate(steps):
        if list(step.rows) == list(rows):
            return f"they are those of step {index}"
    return "they are of no step of the run without a load"


def _apart(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape:
        return True
    return bool(one.numel()) and not torch.allclose(one.double(), other.double(), rtol=1e-9, atol=1e-13)
