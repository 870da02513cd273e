"""What can be said of an Operation without drawing anything: formulas applied to it, and how many spares it needs."""

import math
from dataclasses import replace

from allranks.rehearsing.formulas import daly_interval, expected_goodput
from allranks.simulation import DAY, FailureModel, Operation, Outcome, Scope
from allranks.units import format_seconds

LEFT_AT_END = 0.005
"""Share of the time that a run's end may be worth beyond the formula: what is trained after the last save is counted in
a run that ends, and by the formula may still be lost. Half of the point within which formula and simulation agree."""


def whole_steps(operation: Operation, step_seconds: float) -> Operation:
    """Saves happen at the end of a step: every interval rounded up to whole ones."""
    if step_seconds <= 0:
        return operation
    tiers = (
        replace(tier, every_seconds=math.ceil(tier.every_seconds / step_seconds - 1e-9) * step_seconds)
        for tier in operation.tiers
    )
    return replace(operation, tiers=tuple(tiers))


def with_interval(operation: Operation, every_seconds: float, step_seconds: float) -> Operation:
    """The same with another interval between saves to its slowest tier."""
    last = replace(operation.tiers[-1], every_seconds=every_seconds)
    return whole_steps(replace(operation, tiers=(*operation.tiers[:-1], last)), step_seconds)


def mean_seconds_between(operation: Operation, model: FailureModel) -> float:
    """MTBF of the whole run; infinite where nothing fails."""
    per_second = model.per_second(operation.nodes)
    return 1 / per_second if per_second else math.inf


def best_interval(operation: Operation, model: FailureModel, shortest_seconds: float) -> float:
    """Seconds between saves by Daly's formula, no shorter than a save takes."""
    mean = mean_seconds_between(operation, model)
    if math.isinf(mean):
        return operation.seconds
    return max(daly_interval(operation.tiers[-1].stall_seconds, mean), shortest_seconds)


def closed_form(operation: Operation, model: FailureModel) -> tuple[float | None, str]:
    """The goodput by formula and whose it is, or None and why it does not hold here."""
    tier = operation.tiers[-1]
    if len(operation.tiers) > 1 or model.stragglers_per_1000_node_days:
        return None, "the formula knows one tier of checkpoints and no stragglers"
    if bursts := [part.name for part in model.components if part.burst_failures]:
        return None, f"the formula takes failures at a constant rate: those of {', '.join(bursts)} come in bursts"
    if rows := [part.name for part in model.components if part.scope == Scope.ROW and part.per_1000_node_days]:
        return None, f"the formula has a spare for every lost node: {', '.join(rows)} takes a row of racks at once"
    mean = mean_seconds_between(operation, model)
    lost = min(1.0, tier.every_seconds / 2 / mean)
    at_end = tier.every_seconds / 2 * lost / operation.seconds
    if at_end > LEFT_AT_END:
        if tier.every_seconds >= operation.seconds:
            return None, "the formula is of a run without end: here the run is over before its first save"
        return None, (
            f"the formula is of a run without end, which loses {lost:.0%} of what it has not saved: here the last "
            f"interval of {format_seconds(tier.every_seconds)} alone makes {at_end:.1%}"
        )
    down = operation.detect_seconds + operation.restart_seconds + tier.load_seconds + tier.lag_seconds
    found = expected_goodput(1 / mean, down, tier.every_seconds, tier.stopped_seconds)
    spares = "with spares for every failure"
    if model.per_1000_days:
        found /= 1 + _outages(operation, model)
        spares += ", and the cluster's repairs waited for"
    return found, f"Daly, FGCS 2006; {spares}"


def _outages(operation: Operation, model: FailureModel) -> float:
    """Seconds waited for the repair of the whole cluster, to each second in which it is there.

    A repair that ends before the run would be up again delays nothing. A longer one, from the failure on, takes the
    place of the detection; behind it the run starts as after any failure. While nothing is there, nothing fails.
    """
    found = 0.0
    up = operation.detect_seconds + operation.restart_seconds + operation.tiers[-1].load_seconds
    for part in model.components:
        if part.per_1000_days and part.repair_seconds:
            beyond = math.exp(-up / part.repair_seconds) * (up + part.repair_seconds - operation.detect_seconds)
            found += part.per_1000_days / (1000 * DAY) * beyond
    return found


def enough_spares(nodes: int, model: FailureModel) -> int:
    """Spares that 999 of 1000 moments need: the normal quantile of how many nodes are out at once.

    Not of a row or of all: nobody keeps spares for these, or could.
    """
    mean, spread = 0.0, 0.0
    for part in model.components:
        lost = (0, 1, model.rack_nodes, 0, 0)[part.scope]
        out = part.per_1000_node_days * nodes / (1000 * DAY) * part.repair_seconds
        mean, spread = mean + out * lost, spread + out * lost**2
    return math.ceil(mean + 3.1 * math.sqrt(spread)) if mean else 0


def work_per_node(outcome: Outcome) -> float:
    """Goodput of the run for each node that it holds, spares included: what a payer compares."""
    operation = outcome.operation
    return outcome.goodput.mean * operation.nodes / (operation.nodes + operation.spares)
