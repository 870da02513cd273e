"""Why parameters differ although gradients do not: settings, skipped updates, an optimizer of other tensors."""

import math
from collections.abc import Sequence

import torch

from allranks.verifying.assembly import Mismatch
from allranks.verifying.evidence import Evidence, describe, few
from allranks.verifying.findings import OTHER, Finding, found
from allranks.verifying.recording import StepRecord
from allranks.verifying.update_state import POSITION, RATES


def judge_settings(evidence: Evidence, step: int) -> list[Finding]:
    """Whether the optimizers' settings are those of one device: learning rate, weight decay and the like."""
    one, ranks = evidence.step(step)
    for rank, record in enumerate(ranks):
        # A rank that has other groups, as the stage of a pipeline may, is held to the first one.
        most = len(one.settings) if len(record.settings) == len(one.settings) else 1
        for index, (mine, due) in enumerate(zip(record.settings[:most], one.settings, strict=False)):
            for key, value in due.items():
                if key in mine and not math.isclose(mine[key], value, rel_tol=1e-9, abs_tol=1e-15):
                    return [_setting(evidence, step, rank, index, key, mine[key], value)]
    return []


def _setting(evidence: Evidence, step: int, rank: int, group: int, key: str, value: float, due: float) -> Finding:
    axis = evidence.world.by_factor(value / due, evidence.world.data_axis) if due else evidence.world.data_axis
    factor = evidence.world.in_words(value / due, axis) if due else ""
    said, advice = f"the samples seen are the same: {key} is a function of them, or of the number of steps", ""
    if key == "lr":
        kind = "S23" if _same_ratio(evidence, rank, group) else "S22"
    elif _moves(evidence, group, key) and len(held := _held(evidence, step, group, key)) > 1:
        kind, advice = "S28", f"agree on {key} over all ranks before the step goes by it"
        said = f"{key} moves from step to step on one device, and the ranks have {', '.join(f'{v:.6g}' for v in held)}"
    else:
        kind = "S38"
    times = f", {factor} times" if factor != "" else ""
    return found(
        kind,
        f"step {step}: {key} of group {group} is {value:.6g} on rank {rank}, on one device {due:.6g}{times}",
        said,
        axis=axis,
        factor=factor,
        step=step,
        next=advice,
    )


def _moves(evidence: Evidence, group: int, key: str) -> bool:
    """Whether one device has other values of a setting in some steps: it is state then, and nothing that was asked."""
    settings = [step.settings[group] for step in evidence.one.run.steps if group < len(step.settings)]
    return len({some[key] for some in settings if key in some}) > 1


def _held(evidence: Evidence, step: int, group: int, key: str) -> list[float]:
    """The different values of a setting that the ranks have."""
    _, ranks = evidence.step(step)
    groups = [record.settings[group] for record in ranks if group < len(record.settings)]
    return list(dict.fromkeys(some[key] for some in groups if key in some))


def _same_ratio(evidence: Evidence, rank: int, group: int) -> bool:
    """Whether a learning rate is by one factor off in all steps: not a schedule that moves at another pace."""
    ratios = []
    for mine, due in zip(evidence.ranks[rank].steps, evidence.one.run.steps, strict=False):
        if group < len(mine.settings) and group < len(due.settings) and due.settings[group].get("lr"):
            ratios.append(mine.settings[group].get("lr", math.nan) / due.settings[group]["lr"])
    return all(math.isclose(ratio, ratios[0], rel_tol=1e-9) for ratio in ratios)


def judge_schedules(evidence: Evidence, step: int) -> list[Finding]:
    """Whether schedulers that have not moved a rate yet stand where those of one device do.

    One that has, to the same rates, is right wherever it stands: it may be stepped once a rank, and be as much longer.
    One with other numbers, a longer one say, is another schedule.
    """
    one, ranks = evidence.step(step)
    for name, (_, due) in one.state.items():
        scheduler, _, key = name.rpartition(".")
        if key != POSITION or f"{scheduler}.{RATES}" not in one.state or not _still(evidence, f"{scheduler}.{RATES}"):
            continue
        asked = [n for n in one.state if n.rpartition(".")[0] == scheduler and n != name and _still(evidence, n)]
        for rank, record in enumerate(ranks):
            held = record.state.get(name)
            if held is None or torch.equal(held.value, due) or not all(_alike(record, one, other) for other in asked):
                continue
            factor = float(held.value) / float(due) if due else 0.0
            axis = evidence.world.by_factor(factor, evidence.world.data_axis) if factor else evidence.world.data_axis
            what = f"{scheduler} stands at {float(held.value):g} on rank {rank}, on one device at {float(due):g}"
            said = "no learning rate has moved yet: it will, in another step than on one device"
            return [found("S22", f"step {step}: {what}", said, axis=axis, step=step,
                          factor=evidence.world.in_words(factor, axis) if factor else "")]  # fmt: skip
    return []


def _still(evidence: Evidence, name: str) -> bool:
    """Whether a number of a scheduler is the same on one device in all steps."""
    values = [step.state[name].value for step in evidence.one.run.steps if name in step.state]
    return all(torch.equal(value, values[0]) for value in values)


def _alike(record: StepRecord, one: StepRecord, name: str) -> bool:
    return name in record.state and torch.equal(record.state[name].value, one.state[name].value)


def judge_updates(evidence: Evidence, step: int) -> list[Finding]:
    """Whether every rank's optimizers made as many updates as one device's."""
    one, ranks = evidence.step(step)
    counts = [record.updates for record in ranks]
    if all(count == one.updates for count in counts):
        return []
    said = f"calls of optimizer.step: {one.updates} on one device, {counts} on the ranks"
    if len(set(counts)) > 1:
        return [found("S28", f"step {step}: some ranks update and others do not", said, step=step)]
    return [found("S22", f"step {step}: the ranks make another number of updates", said, step=step)]


def explain_parameters(evidence: Evidence, step: int, off: Sequence[Mismatch]) -> list[Finding]:
    """Findings for parameters that differ after `step`, whose gradients did not."""
    world, names = evidence.world, [m.name for m in off]
    lines = [describe(m, "parameter", world) for m in off[:3]]
    first, kind, axis, advice = off[0], OTHER, "", ""
    still = [m for m in off if _unmoved(evidence, step, m)]
    what = "parameters differ after an update from equal gradients"
    tied = {name for some in evidence.one.run.start.tied for name in some}
    lone = {rank for m in off for rank in m.ranks}
    if still:
        kind, what = "S12", "parameters with a gradient are not updated"
        names = [m.name for m in still]
    elif tied and set(names) <= tied:
        kind = "S14"
    elif all(_without_gradient(evidence, step, name) for name in names):
        kind, what = "S35", "parameters without a gradient are updated otherwise"
    elif any(not m.agree for m in off) and len(lone) == 1 and world.size > 1:
        kind, what = "S39", f"rank {min(lone)} alone has other parameters after the same update"
    elif any(not m.agree for m in off):
        kind, what = "S11", "ranks hold different values of the same parameter"
        axis = evidence.axis_apart(step, "parameters", next(m for m in off if not m.agree))
    if kind == OTHER:
        advice = "compare the optimizer's state and its param_groups: which tensors does it hold?"
    return [
        found(kind, f"step {step}: {what}: {few(names)}", *lines, tensor=first.name, axis=axis,
              factor="" if still else world.in_words(first.factor, axis), step=step,
              error=first.relative, next=advice)
    ]  # fmt: skip


def _unmoved(evidence: Evidence, step: int, mismatch: Mismatch) -> bool:
    """Whether some rank's part is what it was before the step, while one device's has moved."""
    for rank in mismatch.ranks:
        run = evidence.ranks[rank]
        before = run.steps[step - 1].parameters if step else run.start.parameters
        now = run.steps[step].parameters
        if mismatch.name in before and mismatch.name in now:
            was, part = before[mismatch.name].value, now[mismatch.name].value
            if was.shape == part.shape and was.numel() and torch.equal(was, part):
                return True
    return False


def _without_gradient(evidence: Evidence, step: int, name: str) -> bool:
    """Whether one device has no gradient of it, or one of zeros, and the ranks the other way round."""
    one, ranks = evidence.step(step)
    part = (one.gradients or one.raw).get(name)
    nothing = part is None or not bool(part.value.any())
    have = [name in (record.gradients or record.raw) for record in ranks]
    return nothing and (any(have) != (part is not None) or not all(have))
