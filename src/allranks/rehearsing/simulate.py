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
from allranks.rehearsing.histories import Histories, check_room, draw_histories
from allranks.rehearsing.lanes import Lanes
from allranks.simulation import CAUSES, FailureModel, Interval, Operation, Outcome, Simulation

MIDDLE = (5.0, 95.0)
STEPS_OF_INTERVAL = (0.25, 0.5, 0.7, 1.0, 1.4, 2.0, 4.0)
"""Intervals to look at, as multiples of what the formula or the user says."""


FAILURES = 200_000
"""Drawn in all runs of the chosen operation together, as far as MOST_RUNS and FEWEST_RUNS let it be."""

MOST_RUNS, FEWEST_RUNS = 400, 40
PER_COMPARED = 4
"""An operation that is only compared has so many times fewer runs: it lives through the same failures as the others."""


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
    """Simulate `operation`, and what would be better.

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
    around = _intervals(chosen, model, shortest_seconds)
    intervals = list(dict.fromkeys(with_interval(chosen, every, step_seconds) for every in around))
    spares = [replace(chosen, spares=number) for number in _spares(chosen, model)]
    faster = replace(chosen, restart_seconds=chosen.restart_seconds / 2)
    num_runs = trial.runs_of(chosen, model)
    check_room(model, chosen.nodes + chosen.spares, chosen.seconds, num_runs)  # before others take their time
    compared = run_all([*intervals, *spares, faster], model, max(1, num_runs // PER_COMPARED), trial.seed)
    by_interval, by_spares = compared[: len(intervals)], compared[len(intervals) : -1]
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
        chosen=run_all([chosen], model, num_runs, trial.seed)[0],
        formula=goodput,
        formula_because=because,
        intervals=tuple(by_interval),
        best_every_seconds=best.operation.tiers[-1].every_seconds,
        young_seconds=young_interval(save, mean) if known else None,
        daly_seconds=daly_interval(save, mean) if known else None,
        spares=tuple(by_spares),
        best_spares=max(by_spares, key=work_per_node).operation.spares,
        faster=compared[-1],
        notes=notes,
    )


def run_all(operations: Sequence[Operation], model: FailureModel, num_runs: int, seed: int) -> list[Outcome]:
    """What comes of each operation; all live through the same failures, as far as they have the nodes."""
    nodes = max(one.nodes + one.spares for one in operations)
    histories = draw_histories(model, nodes, operations[0].seconds, num_runs, seed)
    lanes = Lanes(
        operations, histories, rack_nodes=model.rack_nodes, row_nodes=model.row_nodes, slowdown=model.straggler_slowdown
    )
    lanes.live()
    return [_outcome(one, place, lanes, histories) for place, one in enumerate(operations)]


def _outcome(operation: Operation, place: int, lanes: Lanes, histories: Histories) -> Outcome:
    num_runs = len(histories.times)
    mine = slice(place * num_runs, (place + 1) * num_runs)
    return Outcome(
        operation=operation,
        goodput=_interval(lanes.spent["productive"][mine] / operation.seconds),
        interruptions=_interval(lanes.interruptions[mine]),
        shares={cause: float(lanes.spent[cause][mine].mean()) / operation.seconds for cause in CAUSES},
        num_runs=num_runs,
    )


def _interval(values: np.ndarray) -> Interval:
    low, high = np.percentile(values, MIDDLE)
    return Interval(float(low), float(values.mean()), float(high))


def _intervals(operation: Operation, model: FailureModel, shortest: float) -> list[float]:
    """Around what the formula says and what the user chose, rising."""
    formula, own = best_interval(operation, model, shortest), operation.tiers[-1].every_seconds
    around = [formula * step for step in STEPS_OF_INTERVAL] + [own * step for step in (0.5, 1.0, 2.0)]
    return sorted({min(own, operation.seconds), *(min(max(every, shortest), operation.seconds) for every in around)})


def _spares(operation: Operation, model: FailureModel) -> list[int]:
    """Numbers of spares to look at: none up to more than enough, and what the user chose."""
    enough = enough_spares(operation.nodes, model)
    shares = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5)
    return sorted({round(enough * share) for share in shares} | {operation.spares})
