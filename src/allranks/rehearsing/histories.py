"""What goes wrong and when, drawn once for a simulated run: every Operation that is compared lives through the same."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from allranks.errors import ConfigError
from allranks.simulation import DAY, Component, FailureModel, Scope
from allranks.units import format_bytes

BINS = 8192
"""Pieces of the time in which slow seconds are summed; within one they are spread evenly."""

MOST_BYTES = 4e9
"""Of all that is drawn: what a laptop holds beside the rest."""
EVENT_BYTES = 64
"""Of one failure while it is drawn: its time, component, scope, place and repair, and what they are made of."""

Array = NDArray[Any]


@final
@dataclass(frozen=True)
class Histories:
    """One row a run.

    Attributes:
        nodes: that may fail, spares included; a failure names one by `place`.
        times: (runs, events) of failures in seconds, rising; the last of a row is infinite.
        scopes, places, repairs: the same shape: Scope, a share of `nodes`, seconds until the nodes are back.
        slow: (runs, BINS + 1), seconds so far in which at least one node was slow.
        seconds: how long they are.
    """

    nodes: int
    seconds: float
    times: Array
    scopes: Array
    places: Array
    repairs: Array
    slow: Array

    def slow_until(self, runs: Array, when: Array) -> Array:
        """Seconds up to `when` of each of `runs` in which a node was slow."""
        exact = np.clip(when / self.seconds, 0.0, 1.0) * BINS
        place = np.minimum(exact.astype(np.int64), BINS - 1)
        before, after = self.slow[runs, place], self.slow[runs, place + 1]
        slow: Array = before + (exact - place) * (after - before)
        return slow


def check_room(model: FailureModel, nodes: int, seconds: float, num_runs: int) -> int:
    """How many failures are drawn for each run; ConfigError where those of all are more than MOST_BYTES."""
    mean = model.per_second(nodes) * seconds
    # Of bursts the number varies more: its variance is mean / (1 - b)^2 (A. G. Hawkes, Biometrika 58 (1971)).
    burst = max((part.burst_failures for part in model.components), default=0.0)
    events = int(mean + 8 * mean**0.5 / (1 - burst)) + 10
    of_one = events * EVENT_BYTES + (BINS + 1) * 8
    if num_runs * of_one > MOST_BYTES:
        most = int(MOST_BYTES // of_one)
        move = f"take --runs {most} or fewer" if most else "take fewer --days, or a smaller --failures"
        raise ConfigError(
            f"{num_runs:,} runs of {events:,} failures on {nodes:,} nodes need {format_bytes(num_runs * of_one)} of "
            f"memory, and {format_bytes(MOST_BYTES)} is the most: {move}"
        )
    return events


def draw_histories(
    model: FailureModel, nodes: int, seconds: float, num_runs: int, seed: int, *, running: int | None = None
) -> Histories:
    """Failures as independent Poisson processes, one a component, over `nodes` nodes; repairs exponential.

    A component that comes in bursts has as many failures in the mean as it says: some of them bring the others. Of
    `nodes` so many as are `running` (None: all) can slow the run: a spare is idle.

    Raises:
        ConfigError: they are more than a laptop's memory holds.
    """
    random = np.random.default_rng(seed)
    parts = model.components or (Component("", 0.0, Scope.PROCESS, 0.0),)
    # In units of 1 / (1000 node-days): of those that nothing brings.
    rates = np.array([(part.per_1000_node_days + part.per_1000_days / nodes) * _first(part) for part in parts])
    rate = rates.sum() * nodes / (1000 * DAY)
    shape = (num_runs, check_room(model, nodes, seconds, num_runs))
    gaps = random.exponential(1.0, shape) / rate if rate > 0 else np.full(shape, np.inf)
    times = np.cumsum(gaps, axis=1)
    times[:, -1] = np.inf
    which = random.choice(len(rates), shape, p=rates / rates.sum()) if rate > 0 else np.zeros(shape, np.int64)
    if any(part.burst_failures for part in parts):
        carried = _draw_carried_over(parts, nodes, num_runs, random)
        times, which = _draw_bursts(parts, times, which, carried, seconds, random)
    scopes = np.array([part.scope for part in parts])[which]
    repair = np.array([part.repair_seconds for part in parts])
    places = random.random(times.shape)
    return Histories(
        nodes=nodes,
        seconds=seconds,
        times=times,
        scopes=scopes,
        places=np.where(scopes == Scope.CLUSTER, 0.0, places),  # it hits whoever there is
        repairs=random.exponential(1.0, times.shape) * repair[which],
        slow=_draw_slow(model, nodes if running is None else running, seconds, num_runs, random),
    )


def _first(part: Component) -> float:
    """The share of a component's failures that no other one brings."""
    return 1 - part.burst_failures


def _draw_carried_over(
    parts: Sequence[Component], nodes: int, num_runs: int, random: np.random.Generator
) -> tuple[Array, Array, Array]:
    """(run, time, component) of what failures before the time began bring after it: nothing begins when a run does.

    They bring it as likely as their sum over exp(-age / delay) says. Its mean and variance are exact here (Hawkes 1971,
    of an exponential decay: the rate times the delay, over 2 (1 - b) the variance), its distribution is taken for
    Gamma's.
    """
    found = []
    for kind, part in enumerate(parts):
        per_second = (part.per_1000_node_days * nodes + part.per_1000_days) / (1000 * DAY)
        scale = 0.5 / _first(part)
        recent = random.gamma(per_second * part.burst_seconds / scale, scale, num_runs)
        runs = np.repeat(np.arange(num_runs), random.poisson(part.burst_failures * recent))
        found.append((runs, random.exponential(1.0, len(runs)) * part.burst_seconds, np.full(len(runs), kind)))
    runs, begun, kinds = (np.concatenate(values) for values in zip(*found, strict=True))
    return runs, begun, kinds


def _draw_bursts(
    parts: Sequence[Component],
    times: Array,
    which: Array,
    carried: tuple[Array, Array, Array],
    seconds: float,
    random: np.random.Generator,
) -> tuple[Array, Array]:
    """(times, component) with what each failure brings, and what that brings, until nothing more comes in time;
    `carried`: likewise, what came before the time began brings.

    Source: A. G. Hawkes, D. Oakes, A cluster process representation of a self-exciting process, JAP 11 (1974).
    """
    more = np.array([part.burst_failures for part in parts])
    delay = np.array([part.burst_seconds for part in parts])
    runs, places = np.nonzero(times < seconds)
    later = carried[1] < seconds
    own = runs, times[runs, places], which[runs, places]
    newest = tuple(np.concatenate([one, other[later]]) for one, other in zip(own, carried, strict=True))
    found = [newest]
    while len(newest[0]):
        number = random.poisson(more[newest[2]])
        runs, begun, kind = (np.repeat(values, number) for values in newest)
        begun = begun + random.exponential(1.0, len(begun)) * delay[kind]
        inside = begun < seconds
        newest = runs[inside], begun[inside], kind[inside]
        found.append(newest)
    runs, begun, kind = (np.concatenate(values) for values in zip(*found, strict=True))
    order = np.lexsort((begun, runs))
    runs, begun, kind = runs[order], begun[order], kind[order]
    each = np.bincount(runs, minlength=len(times))
    shape = len(times), int(each.max(initial=0)) + 1
    places = np.arange(len(runs)) - np.repeat(np.cumsum(each) - each, each)
    all_times, all_kinds = np.full(shape, np.inf), np.zeros(shape, np.int64)
    all_times[runs, places], all_kinds[runs, places] = begun, kind
    return all_times, all_kinds


def _draw_slow(model: FailureModel, nodes: int, seconds: float, num_runs: int, random: np.random.Generator) -> Array:
    """The cumulative seconds with a slow node: the union of the times in which one is, in bins."""
    slow = np.zeros((num_runs, BINS + 1))
    mean = model.stragglers_per_1000_node_days * nodes * seconds / (1000 * DAY)
    edges = np.linspace(0.0, seconds, BINS + 1)
    for run in range(num_runs if mean > 0 else 0):
        starts = np.sort(random.uniform(0.0, seconds, random.poisson(mean)))
        ends = np.maximum.accumulate(starts + random.exponential(model.straggler_seconds, len(starts)))
        # An interval counts from where those before it have ended.
        begins = np.maximum(starts, np.concatenate(([0.0], ends[:-1])))
        slow[run] = _covered(edges, begins, np.maximum(ends, begins))
    return slow


def _covered(edges: Array, begins: Array, ends: Array) -> Array:
    """Seconds of the disjoint, rising intervals that lie before each edge."""
    lengths = np.concatenate(([0.0], np.cumsum(ends - begins)))
    begun = np.searchsorted(begins, edges, side="right")
    last = np.maximum(begun - 1, 0)
    inside = np.minimum(edges, ends[last]) - begins[last] if len(begins) else np.zeros_like(edges)
    return np.where(begun > 0, lengths[last] + inside, 0.0)
