"""Simulation: a run of days on a cluster whose parts fail: what fails, how it is kept going, what comes out."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import final

DAY = 86400.0


class Scope(IntEnum):
    """What a failure takes with it; each takes what the ones before it take."""

    PROCESS = 0  # the processes: every node is still there
    NODE = 1
    RACK = 2  # several nodes at once: a switch, a power feed
    ROW = 3  # several racks at once: a spine of the network, a cooling loop
    CLUSTER = 4  # all there is, spares too: the storage, the power of the building


@final
@dataclass(frozen=True, slots=True)
class Component:
    """Something that fails.

    Attributes:
        per_1000_node_days: incidents in a thousand nodes' days.
        scope: what an incident takes with it.
        repair_seconds: mean time until the nodes are back (exponentially distributed); unused for a process.
        per_1000_days: incidents in a thousand days, however many nodes there are: of what takes the whole cluster.
        burst_failures: of these incidents each brings so many more of its kind with it in the mean, below 1: they come
            in bursts. burst_seconds: mean time that one comes after what brought it (exponentially distributed).
    """

    name: str
    per_1000_node_days: float
    scope: Scope
    repair_seconds: float
    per_1000_days: float = 0.0
    burst_failures: float = 0.0
    burst_seconds: float = 3600.0


@final
@dataclass(frozen=True, slots=True)
class FailureModel:
    """How often what fails.

    Attributes:
        rack_nodes, row_nodes: nodes that an incident of scope RACK or ROW takes.
        stragglers_per_1000_node_days: nodes that become slow; each slows the whole synchronous run by
            `straggler_slowdown` (0.1: its steps take 1.1 of their time) until it is found, `straggler_seconds` later.
        source: where the rates come from.
    """

    name: str
    components: tuple[Component, ...]
    rack_nodes: int = 2
    stragglers_per_1000_node_days: float = 0.0
    straggler_slowdown: float = 0.1
    straggler_seconds: float = 3600.0
    source: str = ""
    row_nodes: int = 32

    @property
    def per_1000_node_days(self) -> float:
        """Incidents of all components that fail with their nodes."""
        return sum(component.per_1000_node_days for component in self.components)

    @property
    def per_1000_days(self) -> float:
        """Incidents of the whole cluster."""
        return sum(component.per_1000_days for component in self.components)

    def per_second(self, nodes: int) -> float:
        """Incidents of all kinds in a second, where there are so many nodes."""
        return (self.per_1000_node_days * nodes + self.per_1000_days) / (1000 * DAY)


@final
@dataclass(frozen=True, slots=True)
class Tier:
    """A place where checkpoints are kept.

    Attributes:
        survives: the widest failure after which it can still be read.
        every_seconds: of training between two saves.
        stall_seconds: that a save stops the step for.
        lag_seconds: from the start of a save until it counts.
        load_seconds: to read it back.
    """

    name: str
    survives: Scope
    every_seconds: float
    stall_seconds: float = 0.0
    lag_seconds: float = 0.0
    load_seconds: float = 0.0

    @property
    def stopped_seconds(self) -> float:
        """That a step is stopped for at each save: one that comes before the last one counts waits for that."""
        return max(self.stall_seconds, self.lag_seconds - self.every_seconds)


@final
@dataclass(frozen=True, slots=True)
class Operation:
    """How a run is kept going.

    Attributes:
        nodes: that the run uses; spares: beside them, started and idle.
        seconds: how long it lasts on the clock.
        tiers: where checkpoints go; the last one survives every Scope.
        detect_seconds: from a failure until it is known; restart_seconds: from then until training goes on, without
            the reading of the checkpoint.
        elastic_nodes: the run goes on with fewer nodes, in multiples of this, where no spare is left; 0: it waits.
        join_seconds: for nodes to come back in at a step boundary, without loss.
    """

    nodes: int
    spares: int
    seconds: float
    tiers: tuple[Tier, ...]
    detect_seconds: float = 15.0
    restart_seconds: float = 300.0
    elastic_nodes: int = 0
    join_seconds: float = 30.0


CAUSES = ("productive", "redone", "saving", "stragglers", "shrunk", "detecting", "restarting", "waiting")
"""Where the seconds on the clock go; they sum to all of them. productive: steps that the end still has."""


@final
@dataclass(frozen=True, slots=True)
class Interval:
    """The mean over the simulated runs and the range that holds the middle 90% of them."""

    low: float
    mean: float
    high: float


@final
@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one Operation.

    Attributes:
        goodput: the share of the time that ended as training at full size and speed (ETTR).
        interruptions: failures that stopped the run.
        shares: cause (of CAUSES) -> its mean share of the time; errors: what another seed moves it by (one standard
            deviation of the mean). Of `productive` they are those of the goodput.
        num_runs: simulated.
        gained: goodput beyond the chosen Operation's in the same runs; gained_error: what another seed moves that by.
    """

    operation: Operation
    goodput: Interval
    interruptions: Interval
    shares: Mapping[str, float]
    errors: Mapping[str, float]
    num_runs: int
    gained: float = 0.0
    gained_error: float = 0.0


@final
@dataclass(frozen=True, slots=True)
class Simulation:
    """A simulated run, and what would be better.

    Attributes:
        chosen: as asked for; it is one of `intervals` and one of `spares`, and all have lived through the same runs.
        formula: its goodput by the closed form; None where that does not hold, `formula_because` says why or by whom.
        intervals: the same run with other intervals between saves to its slowest tier, in rising order.
        best_every_seconds: of these, the one with the most goodput; young_seconds, daly_seconds: by formula, None
            where a save costs nothing.
        spares: the same run with other numbers of spares; best_spares: the most work per node paid for.
        faster: the same run restarted in half the time.
        notes: what was decided for the user, and why.
    """

    model: str
    cluster: str
    failures: FailureModel
    devices_per_node: int
    chosen: Outcome
    formula: float | None
    formula_because: str
    intervals: tuple[Outcome, ...]
    best_every_seconds: float
    young_seconds: float | None
    daly_seconds: float | None
    spares: tuple[Outcome, ...]
    best_spares: int
    faster: Outcome
    notes: tuple[str, ...] = ()
