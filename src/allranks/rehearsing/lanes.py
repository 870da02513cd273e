"""Runs that fail, many at once: a lane is one Operation under one history; all lanes take their next event together.

The state of a lane is what a supervisor knows: how far training is, what each tier of checkpoints holds, which nodes
are there. Between two events nothing changes but the clock, so that a step of the simulation is exact, however long.
"""

from collections.abc import Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from allranks.rehearsing.histories import Histories
from allranks.simulation import CAUSES, Operation

Array = NDArray[Any]
SLOTS = 16


@final
class Lanes:
    """Every operation under every history.

    Args:
        operations: of the same length in time and the same number of tiers.
        histories: drawn for at least as many nodes as the largest operation has, spares included.
        rack_nodes, row_nodes, slowdown: of the FailureModel.
    """

    def __init__(
        self, operations: Sequence[Operation], histories: Histories, *, rack_nodes: int, row_nodes: int, slowdown: float
    ) -> None:
        num_runs = len(histories.times)
        self.histories = histories
        self.runs = np.tile(np.arange(num_runs), len(operations))
        self.lost_nodes = np.array([0, 1, rack_nodes, row_nodes, np.inf])
        self.slow_share = slowdown / (1 + slowdown)
        self.any_slow = bool(histories.slow.any())

        def each(values: Sequence[float]) -> Array:
            return np.repeat(np.array(values, dtype=float), num_runs)

        self.nodes, self.spares = each([one.nodes for one in operations]), each([one.spares for one in operations])
        self.detect, self.restart = (
            each([o.detect_seconds for o in operations]),
            each([o.restart_seconds for o in operations]),
        )
        self.quantum, self.join = (
            each([o.elastic_nodes for o in operations]),
            each([o.join_seconds for o in operations]),
        )
        places = range(len(operations[0].tiers))
        self.every, self.lag, self.load = (
            np.stack([each([getattr(o.tiers[place], name) for o in operations]) for place in places])
            for name in ("every_seconds", "lag_seconds", "load_seconds")
        )
        self.survives = np.array([tier.survives for tier in operations[0].tiers])
        stalls = np.stack([each([o.tiers[place].stopped_seconds for o in operations]) for place in places])
        self.training_share = 1 / (1 + (stalls / self.every).sum(axis=0))
        self.lag = self.lag * self.training_share  # in training, as the intervals are
        num_lanes = len(self.runs)
        self.now, self.known, self.ready, self.work, self.out = np.zeros((5, num_lanes))
        self.kept = np.zeros_like(self.every)
        self.last_load = self.load[-1].copy()
        self.running = self.nodes.copy()
        self.event = np.zeros(num_lanes, dtype=np.int64)
        self.interruptions = np.zeros(num_lanes)
        self.spent = {cause: np.zeros(num_lanes) for cause in CAUSES}
        self.back_at = np.full((num_lanes, SLOTS), np.inf)
        self.back = np.zeros((num_lanes, SLOTS))

    def live(self) -> None:
        """Take events until every lane's time is over; then `spent`, `interruptions` say what came of each."""
        end = self.histories.seconds
        while (self.now < end).any():
            fails, mends = self.histories.times[self.runs, self.event], self._next_back()
            self._pass(np.minimum(np.minimum(fails, mends), end))
            going = self.now < end
            self._fail(np.flatnonzero(going & (fails <= mends)))
            self._take_in(np.flatnonzero(going & (mends < fails)))
        self.spent["productive"] = self.work

    def _next_back(self) -> Array:
        """When nodes come back that the run lacks; those that become spares are counted when they are looked for."""
        mends = np.full(len(self.runs), np.inf)
        lacking = np.flatnonzero(self.running < self.nodes)
        if len(lacking):
            mends[lacking] = self.back_at[lacking].min(axis=1)
        return mends

    def _pass(self, until: Array) -> None:
        """The clock goes on to `until`: what is down stays so until it is ready, then it trains or waits for nodes."""
        spent, start = self.spent, np.clip(self.ready, self.now, until)
        detecting = np.clip(np.minimum(self.known, start) - self.now, 0.0, None)
        spent["detecting"] += detecting
        spent["restarting"] += start - self.now - detecting
        rest = until - start
        runs = self.running > 0
        spent["waiting"] += np.where(runs, 0.0, rest)
        steps = np.where(runs, rest * self.training_share, 0.0)
        spent["saving"] += np.where(runs, rest, 0.0) - steps
        late = np.zeros_like(steps)
        if self.any_slow:
            slow = self.histories.slow_until(self.runs, until) - self.histories.slow_until(self.runs, start)
            late = np.where(runs, slow * self.training_share, 0.0) * self.slow_share
            spent["stragglers"] += late
        done = (steps - late) * self.running / self.nodes
        spent["shrunk"] += steps - late - done
        self.work += done
        self.now = until

    def _fail(self, lanes: Array) -> None:
        """The next failure of these lanes: it hits the run, idle spares alone, or a node that is not there.

        A rack and a row take their first node and then idle spares as far as they go: more than these are the run's.
        """
        history, runs, event = self.histories, self.runs[lanes], self.event[lanes]
        scope, place = history.scopes[runs, event], history.places[runs, event] * history.nodes
        self.event[lanes] += 1
        self._bring_back(lanes)
        there = self.nodes[lanes] + self.spares[lanes] - self.out[lanes]
        running = self.running[lanes]
        lost = np.where(place < there, np.minimum(self.lost_nodes[scope], there), 0.0)
        hit = (place < running) | ((running > 0) & (lost > there - running))
        self._send_away(lanes, lost, history.repairs[runs, event])
        struck, scope = lanes[hit], scope[hit]
        self.interruptions[struck] += 1
        self._roll_back(struck, scope)
        self.known[struck] = self.now[struck] + self.detect[struck]
        self.ready[struck] = self.known[struck] + self.restart[struck] + self.last_load[struck]
        self.running[struck] = self._usable(struck)

    def _roll_back(self, lanes: Array, scope: Array) -> None:
        """Training is where the newest checkpoint is that survived; tiers that did not hold what is read back."""
        work, every = self.work[lanes], self.every[:, lanes]
        saved = np.floor(np.maximum(work - self.lag[:, lanes], 0.0) / every) * every
        kept = np.maximum(self.kept[:, lanes], saved)
        survived = self.survives[:, None] >= scope[None, :]
        readable = np.where(survived, kept, -1.0)
        tier = readable.argmax(axis=0)  # of equally new ones the first, which is the fastest
        newest = readable.max(axis=0)
        self.spent["redone"][lanes] += work - newest
        self.work[lanes] = newest
        self.kept[:, lanes] = np.where(survived, kept, newest)
        self.last_load[lanes] = self.load[tier, lanes]

    def _send_away(self, lanes: Array, number: Array, seconds: Array) -> None:
        """So many nodes are out for so long."""
        away = number > 0
        lanes, number, seconds = lanes[away], number[away], seconds[away]
        if not len(lanes):
            return
        free = np.isinf(self.back_at[lanes])
        if not free.any(axis=1).all():
            num_lanes = len(self.runs)
            self.back_at = np.hstack([self.back_at, np.full((num_lanes, SLOTS), np.inf)])
            self.back = np.hstack([self.back, np.zeros((num_lanes, SLOTS))])
            free = np.isinf(self.back_at[lanes])
        slot = free.argmax(axis=1)
        self.back_at[lanes, slot] = self.now[lanes] + seconds
        self.back[lanes, slot] = number
        self.out[lanes] += number

    def _bring_back(self, lanes: Array) -> None:
        """What is repaired by now is no longer out."""
        due = self.back_at[lanes] <= self.now[lanes, None]
        lanes, due = lanes[due.any(axis=1)], due[due.any(axis=1)]
        self.out[lanes] -= np.where(due, self.back[lanes], 0.0).sum(axis=1)
        self.back_at[lanes] = np.where(due, np.inf, self.back_at[lanes])

    def _take_in(self, lanes: Array) -> None:
        """Nodes that the run lacks are back: it takes in as many as it can use."""
        self._bring_back(lanes)
        before, after = self.running[lanes], self._usable(lanes)
        self.running[lanes] = after
        now, up = self.now[lanes], self.ready[lanes] <= self.now[lanes]
        again = up & (before == 0) & (after > 0)
        joins = up & (before > 0) & (after > before)
        pause = np.where(again, self.restart[lanes] + self.last_load[lanes], np.where(joins, self.join[lanes], 0.0))
        self.known[lanes] = np.where(pause > 0, now, self.known[lanes])
        self.ready[lanes] = np.where(pause > 0, now + pause, self.ready[lanes])

    def _usable(self, lanes: Array) -> Array:
        """Nodes that the run can use: all that it wants, else whole replicas of the rest, or none."""
        wanted, quantum = self.nodes[lanes], self.quantum[lanes]
        there = wanted + self.spares[lanes] - self.out[lanes]
        fewer = np.where(quantum > 0, np.floor(there / np.maximum(quantum, 1)) * quantum, 0.0)
        return np.where(there >= wanted, wanted, fewer)
