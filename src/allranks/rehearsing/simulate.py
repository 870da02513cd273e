"""Simulate a run of days with failures: its goodput, where the time goes, which interval and how many spares pay."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import numpy as np

from allranks.rehearsing.expectations import (
    best_interval,
    closed_form,
    enough_spares,
    mean_seconds_between,
    whole_steps,
    with_interval,
    work_per_node,
)
from allranks.rehearsing.formulas import daly_interval, young_interval
from allranks.rehearsing.histories import draw_histories
from allranks.rehearsing.lanes import Lanes
from allranks.simulation import CAUSES, FailureModel, Interval, Operation, Outcome, Simulation

MIDDLE = (5.0, 95.0)
STEPS_OF_INTERVAL = (0.25, 0.5, 0.7, 1.0, 1.4, 2.0, 4.0)
"""Intervals to look at, as multiples of what the formula or the user says."""


FAILURES = 200_000
"""Drawn in all runs of the chosen operation together, as far as MOST_RUNS and FEWEST_RUNS let it be."""

MOST_RUNS, FEWEST_RUNS = 400, 40


@final
@dataclass(frozen=True, slots=True)
class Trial:
    """How much is drawn: runs of the chosen operation (None: by how often it fails), from which seed."""

    num_runs: int | None = None
    seed: int = 0

    def runs_of(self, operation: Operation, model: FailureModel) -> int:
        """Many runs where few things happen in each, and few where their number alone makes the mean certain."""
        if self.num_runs is not None:
            return self.num_runs
        failures = operation.seconds / mean_seconds_between(operation, model)
        return int(min(MOST_RUNS, max(FEWEST_RUNS, FAILURES / max(failures, 1.0))))


def simulate(
    operation: Operation,
    model: FailureModel,
    *,
    step_seconds: float = 0.0,
    shortest_seconds: float = 1.0,
    trial: Trial | None = None,
    named: tuple[str, str, int] = ("", "", 1),
    notes: tuple[str, ...] = (),
) -> Simulation:
    """Simulate `operation`, and what would be better, in the same runs: what they differ by is no luck.

    Args:
        operation: its intervals are rounded up to whole steps.
        step_seconds: of one optimizer step.
        shortest_seconds: no interval between saves can be shorter: a save takes that long.
        named: of model and cluster, and the devices of a node, for the reader.

    Raises:
        ConfigError: so many runs of so many failures are more than memory holds.
    """
    trial = trial or Trial()
    chosen = whole_steps(operation, step_seconds)
    intervals = _intervals(chosen, model, step_seconds, shortest_seconds)
    spares = [replace(chosen, spares=number) for number in _spares(chosen, model)]
    faster = replace(chosen, restart_seconds=chosen.restart_seconds / 2)
    different = list(dict.fromkeys([chosen, *intervals, *spares, faster]))
    found = run_all(different, model, trial.runs_of(chosen, model), trial.seed)
    outcomes = dict(zip(different, found, strict=True))
    by_interval, by_spares = [outcomes[one] for one in intervals], [outcomes[one] for one in spares]
    goodput, because = closed_form(chosen, model)
    mean = mean_seconds_between(chosen, model)
    save = chosen.tiers[-1].stall_seconds
    known = save > 0 and math.isfinite(mean)  # else there is nothing to weigh against each other
    best = max(by_interval, key=lambda outcome: outcome.goodput.mean)
    return Simulation(
        model=named[0],
        cluster=named[1],
        failures=model,
        devices_per_node=named[2],
        chosen=outcomes[chosen],
        formula=goodput,
        formula_because=because,
        intervals=tuple(by_interval),
        best_every_seconds=best.operation.tiers[-1].every_seconds,
        young_seconds=young_interval(save, mean) if known else None,
        daly_seconds=daly_interval(save, mean) if known else None,
        spares=tuple(by_spares),
        best_spares=max(by_spares, key=work_per_node).operation.spares,
        faster=outcomes[faster],
        notes=notes,
    )


def run_all(operations: Sequence[Operation], model: FailureModel, num_runs: int, seed: int) -> list[Outcome]:
    """What comes of each operation, and what it gains on the first one.

    All have as many nodes for as long, and live through the same failures, as far as they have the spares.
    """
    first = operations[0]
    nodes = first.nodes + max(one.spares for one in operations)
    histories = draw_histories(model, nodes, first.seconds, num_runs, seed, running=first.nodes)
    lanes = Lanes(
        operations, histories, rack_nodes=model.rack_nodes, row_nodes=model.row_nodes, slowdown=model.straggler_slowdown
    )
    lanes.live()
    return [_outcome(one, place, lanes, num_runs) for place, one in enumerate(operations)]


def _outcome(operation: Operation, place: int, lanes: Lanes, num_runs: int) -> Outcome:
    first, mine = slice(num_runs), slice(place * num_runs, (place + 1) * num_runs)
    shares = {cause: lanes.spent[cause][mine] / operation.seconds for cause in CAUSES}
    goodput = shares["productive"]
    gained = goodput - lanes.spent["productive"][first] / operation.seconds
    return Outcome(
        operation=operation,
        goodput=_interval(goodput),
        interruptions=_interval(lanes.interruptions[mine]),
        shares={cause: float(share.mean()) for cause, share in shares.items()},
        errors={cause: _error(share) for cause, share in shares.items()},
        num_runs=num_runs,
        gained=float(gained.mean()),
        gained_error=_error(gained) if place else 0.0,
    )


def _interval(values: np.ndarray) -> Interval:
    low, high = np.percentile(values, MIDDLE)
    return Interval(float(low), float(values.mean()), float(high))


def _error(shares: np.ndarray) -> float:
    """Of their mean, one standard deviation; a single one says nothing: half, the most that shares can have."""
    return float(shares.std(ddof=1)) / math.sqrt(len(shares)) if len(shares) > 1 else 0.5


def _intervals(operation: Operation, model: FailureModel, step_seconds: float, shortest: float) -> list[Operation]:
    """The same with intervals around what the formula says and what the user chose, and as chosen, rising."""
    formula, own = best_interval(operation, model, shortest), operation.tiers[-1].every_seconds
    around = [formula * step for step in STEPS_OF_INTERVAL] + [own * step for step in (0.5, 2.0)]
    within = (min(max(every, shortest), operation.seconds) for every in around)
    others = (with_interval(operation, every, step_seconds) for every in within)
    # Where no save comes within the run, the own row says so once.
    never = own >= operation.seconds
    kept = [one for one in others if not never or one.tiers[-1].every_seconds < operation.seconds]
    return sorted({operation, *kept}, key=lambda one: one.tiers[-1].every_seconds)


def _spares(operation: Operation, model: FailureModel) -> list[int]:
    """Numbers of spares to look at: none up to more than enough, and what the user chose."""
    enough = enough_spares(operation.nodes, model)
    shares = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5)
    return sorted({round(enough * share) for share in shares} | {operation.spares})
