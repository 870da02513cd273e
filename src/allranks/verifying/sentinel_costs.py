"""What the sentinels cost that watch over a run: by the stopwatch around their calls, in the loop of `train`.

A look is what those do that look at each step, with the line that says where the rank stands; a round is the digests of
what ranks must have alike, their exchange and what is judged of it, with what the looks of such a step do more. All on
the thread that computes. A wait for the slowest rank in the exchange is counted as the sentinels', though the next step
would have waited for it, too.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast, final

from allranks.config import GuardConfig
from allranks.data.micro_step import StepBatch
from allranks.launching.environment import read_environment
from allranks.observing.counters import Stopwatch
from allranks.parallel.backend import choose_device, start, stop
from allranks.parallel.heap import keep_heap
from allranks.request import TrainRequest
from allranks.stepping.passes import Passes, Scale, StepSums
from allranks.stepping.session import Session, assemble
from allranks.stepping.world import gather_processes
from allranks.training.comparing import Comparing
from allranks.training.prepare import prepare, resolve_layout
from allranks.training.save_clock import SaveClock
from allranks.training.saver import Saver
from allranks.training.trainer import Trainer

FEWEST = 3
"""Steps without a round: of fewer there is no median to speak of."""
WARM_ROUNDS = 2
"""At the start, which are not counted, nor the steps before them."""
BACKEND_TIMEOUT_SECONDS = 120.0

Spent = tuple[float, float]
"""Seconds on the wall, and of the processor in this thread."""
NOTHING: Spent = (0.0, 0.0)


@final
@dataclass
class Costs:
    """What was spent, by the index of the step from 0; a round follows every `every` steps."""

    every: int
    begins: list[Spent] = field(default_factory=list)
    looks: dict[int, Spent] = field(default_factory=dict)
    rounds: dict[int, Spent] = field(default_factory=dict)

    def around(self, call: Callable[..., Any], into: dict[int, Spent]) -> Callable[..., Any]:
        """`call`, whose cost is added up for each step."""

        def timed(*given: Any) -> Any:
            began = now()
            try:
                return call(*given)
            finally:
                ended, step = now(), len(self.begins) - 1
                wall, processor = into.get(step, NOTHING)
                into[step] = wall + ended[0] - began[0], processor + ended[1] - began[1]

        return timed

    def row(self) -> dict[str, float] | None:
        """Medians, in seconds; None of too few steps. A round costs 0 where none was held."""
        steps = range(WARM_ROUNDS * self.every, len(self.begins) - 1)
        alone = [step for step in steps if step not in self.rounds]
        if len(alone) < FEWEST:
            return None
        found: dict[str, float] = {}
        for place, name in enumerate(("seconds", "processor_seconds")):
            look = statistics.median(self.looks.get(step, NOTHING)[place] for step in alone)
            found[f"step_{name}"] = statistics.median(
                self.begins[step + 1][place] - self.begins[step][place] for step in alone
            )
            found[f"look_{name}"] = look
            # What a look does more in a step with a round is the round's.
            rounds = [
                self.rounds[s][place] + self.looks.get(s, NOTHING)[place] - look for s in steps if s in self.rounds
            ]
            found[f"round_{name}"] = statistics.median(rounds) if rounds else 0.0
        return {**found, "steps": len(alone), "rounds": len(steps) - len(alone)}


def now() -> Spent:
    """What has been spent by now."""
    return time.perf_counter(), time.thread_time()


def charged(row: dict[str, float], name: str = "seconds") -> float:
    """Seconds that a step of a run with the usual rounds is charged: its look, and its part of a round."""
    return row[f"look_{name}"] + row[f"round_{name}"] / GuardConfig().digest_every


def share(row: dict[str, float], name: str = "seconds") -> float:
    """The same as a part of a step without a round."""
    return charged(row, name) / row[f"step_{name}"]


@final
class Begins(Passes):
    """Passes that note when each step begins."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._inner: Passes | None = None

    def around(self, inner: Passes) -> Passes:
        """These passes, around `inner`."""
        self._inner = inner
        return self

    def run(self, batch: StepBatch, scale: Scale) -> Iterator[StepSums]:
        """As the inner one."""
        self._costs.begins.append(now())
        assert self._inner is not None
        return self._inner.run(batch, scale)


@final
class NoSaver:
    """Saving is measured elsewhere."""

    saved_step = -1
    beside = False
    failures = 0

    def __init__(self) -> None:
        self.clock = SaveClock(None, counts=False)

    def due(self, step: int) -> bool:
        """Never."""
        return False

    def save(self, step: int, before_commit: Callable[[], None]) -> Path:
        """Nothing is written."""
        return Path()

    def finish(self, progress: Callable[[], None]) -> None:
        """Nothing is on its way."""


def train_timed(session: Session, costs: Costs) -> None:
    """Train a session that was assembled with `observe=Begins(costs).around`, and note what its sentinels cost."""
    watch = session.posted.watch
    compare = costs.around(Comparing.compare, costs.rounds)
    with ExitStack() as replaced:
        for name in ("look", "say"):
            replaced.enter_context(_replaced(watch, name, costs.around(getattr(watch, name), costs.looks)))
        replaced.enter_context(_replaced(Comparing, "compare", lambda own, step: compare(own, step)))  # noqa: PLW0108
        Trainer(session, cast("Saver", NoSaver()), Stopwatch(), None, None).train()


@contextmanager
def _replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """`owner.name` is `value` meanwhile; afterwards it is what it was, the class's own if it was that."""
    own = name in vars(owner)
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before) if own else delattr(owner, name)


def costs_of_rank(request: TrainRequest) -> dict[str, float] | None:
    """One rank of a training that is timed; runs in a process that `launch` has started. What `Costs.row` says."""
    keep_heap()  # as every process of a run does
    environment, prepared = read_environment(os.environ), prepare(request)
    layout = resolve_layout(prepared.config, environment.world_size, environment.num_nodes)
    choice = choose_device(environment, "cpu", "auto", layout)  # the run's own backend may be one for GPUs
    start(environment, choice, timeout_seconds=BACKEND_TIMEOUT_SECONDS)
    try:
        costs = Costs(prepared.config.guard.digest_every)
        processes = gather_processes(environment, choice, layout)
        observe = Begins(costs).around
        session = assemble(
            prepared.task, prepared.config, processes, Stopwatch(), lambda: (False, False), observe=observe
        )
        train_timed(session, costs)
    finally:
        stop()
    return costs.row()
