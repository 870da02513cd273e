"""Which runs show how a task scales, and what their figures say. Values only; needs no torch.

Strong scaling: one global batch shared by more processes. Weak scaling: a global batch that grows with the processes.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import isfinite
from typing import Any, Literal

from allranks.benchmarking.strategies import read_strategy
from allranks.config_sections import TrainConfig
from allranks.data.cut import cut_step
from allranks.errors import ConfigError, LayoutError, ProcessError
from allranks.layout import Layout, num_processes
from allranks.layout_refusals import refuse_unsupported
from allranks.reporting.history import number, numbers, peak_memory, whole, word
from allranks.run import Run
from allranks.verdict import Decision

Mode = Literal["strong", "weak"]

WARM_STEPS = 5
"""Steps that are not timed: caches, optimizer state, DDP's buckets, a compiler."""

LEAST_STEPS = WARM_STEPS + 5
LOSS_PART = 4
"""The loss reached is the mean over the last 1 in so many steps."""


@dataclass(frozen=True, slots=True)
class Point:
    """One run to be measured.

    Attributes:
        strategy: as it was asked for.
        layout: what that means on `layout.world_size` processes.
    """

    mode: Mode
    strategy: str
    layout: Layout
    global_batch: int

    @property
    def keys(self) -> tuple[str, ...]:
        """The strategy's `layout.KEY=VALUE`, which its layout does not name; one process has nothing to say them of."""
        return tuple(self.strategy.split()[1:]) if self.layout.world_size > 1 else ()

    @property
    def spread(self) -> str:
        """The layout with its keys: `dp_replicate=2 layout.ddp_hook=bfloat16`."""
        return " ".join([str(self.layout), *self.keys])

    @property
    def run(self) -> tuple[str, int]:
        """What it trains: of two points of one run (weak and strong on one process) only one is run."""
        return self.spread, self.global_batch

    def __str__(self) -> str:
        processes = "1 process" if self.layout.world_size == 1 else f"{self.layout.world_size} processes"
        return f"{self.spread} on {processes}, {self.global_batch} samples a step"


@dataclass(frozen=True, slots=True)
class Trained:
    """What one run's journals say.

    Attributes:
        step_seconds: the median from one step to the next, waiting for data included.
        memory_bytes: the peak of the process that needed most.
        loss: of training, the mean over the last quarter of the steps.
        validation: the last evaluation's metrics; empty where there was none.
        ledger: of all steps: equal where all steps saw the same samples.
    """

    step_seconds: float
    memory_bytes: int
    loss: float
    validation: Mapping[str, float]
    ledger: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table; medians over the repeats.

    Attributes:
        speedup: samples a second by those of the mode's first row in the same repeat, with quartiles over the repeats.
        efficiency: the speed-up by how many times more processes there are.
        time_saved: of the time that the first row needs for as many samples, as a fraction; below 0 where it is slower.
        loss_difference: from the loss of the mode's first row, as a fraction of that.
        same_samples: whether every step saw the samples that it saw in the first row.
    """

    mode: Mode
    strategy: str
    layout: str
    processes: int
    global_batch: int
    step_ms: float
    samples_per_second: float
    speedup: float
    speedup_q1: float
    speedup_q3: float
    efficiency: float
    time_saved: float
    memory_bytes: int
    loss: float
    loss_difference: float
    validation: Mapping[str, float]
    same_samples: bool
    repeats: int

    def to_json(self) -> dict[str, Any]:
        """As one JSON object; a number that is not finite as its name ("nan")."""
        return {name: _plain(value) for name, value in asdict(self).items()}


def plan_points(
    strategies: Sequence[str], nproc: Sequence[int], modes: Sequence[Mode], train: TrainConfig
) -> list[Point]:
    """The points of each mode, fewest processes first; the first of a mode is what the others are compared with.

    Args:
        strategies: layout strings, with keys `layout.KEY=VALUE` behind them; one without `*` takes the number of
            processes that it names, whatever `nproc` says.
        nproc: numbers of processes; those that a strategy's degrees do not divide are left out.
        train: of the task; its global_batch is that of strong scaling, and of one process in weak scaling.

    Raises:
        LayoutError: a strategy fits none of the numbers, is not made yet, or a batch cannot be cut as it asks.
        ConfigError: there is nothing to compare.
    """
    layouts: dict[str, tuple[str, Layout]] = {}
    for strategy in strategies:
        for layout in _resolve(strategy, nproc):
            layouts.setdefault(Point("strong", strategy, layout, 0).spread, (strategy, layout))
    ordered = sorted(layouts.values(), key=lambda found: found[1].world_size)
    if len(ordered) < 2:
        only = ordered[0][1].world_size
        raise ConfigError(f"one layout on {only} process(es) has nothing to be compared with: name more by --nproc 1,2")
    points = []
    for mode in modes:
        for strategy, layout in ordered:
            batch = train.global_batch * (layout.world_size if mode == "weak" else 1)
            cut_step(train.model_copy(update={"global_batch": batch}), layout)
            points.append(Point(mode, strategy, layout, batch))
    return points


def _resolve(strategy: str, nproc: Sequence[int]) -> list[Layout]:
    config = read_strategy(strategy)
    starred = not config.chosen or "*" in (config.dp_replicate, config.dp_shard, config.tp, config.cp, config.pp)
    sizes = nproc if starred else [num_processes(config, max(nproc))]
    found, refusal = [], None
    for size in sizes:
        try:
            layout = Layout.resolve(config, size)
        except LayoutError as error:
            refusal = refusal or error
            continue
        refuse_unsupported(layout)
        found.append(layout)
    if not found:
        raise refusal or LayoutError(f"{strategy} fits none of {', '.join(map(str, nproc))} processes")
    return found


def default_nproc(num_devices: int) -> tuple[int, ...]:
    """1, 2, 4, ... up to the number of devices, and two at least."""
    sizes = [1, 2]
    while sizes[-1] * 2 <= num_devices:
        sizes.append(sizes[-1] * 2)
    return tuple(sizes)


def read_trained(run: Run) -> Trained:
    """What the journals of a finished run say. Raises ProcessError where its data ended too early."""
    steps = run.steps()
    if len(steps) < LEAST_STEPS:
        raise ProcessError(f"the data ended after {len(steps)} steps: at least {LEAST_STEPS} are needed")
    journals = {rank: run.events(rank) for rank in run.ranks()}
    times = [number(step, "t") or 0.0 for step in steps[WARM_STEPS:]]
    losses = [number(step, "loss") or 0.0 for step in steps]
    evaluations = [event for event in journals[0] if event["event"] == "evaluation"]
    return Trained(
        step_seconds=statistics.median(later - earlier for earlier, later in pairwise(times)),
        memory_bytes=max(peak_memory(journals).values(), default=0),
        loss=statistics.fmean(losses[-max(1, len(losses) // LOSS_PART) :]),
        validation=numbers(evaluations[-1], "metrics") if evaluations else {},
        ledger=tuple(f"{whole(step, 'samples')} {word(step, 'ledger')}" for step in steps),
    )


def summarise(points: Sequence[Point], repeats: Sequence[Mapping[tuple[str, int], Trained]]) -> list[Row]:
    """A row for each point: of each repeat, what every run in it was."""
    first = {point.mode: point for point in reversed(points)}
    return [_row(point, first[point.mode], repeats) for point in points]


def _row(point: Point, first: Point, repeats: Sequence[Mapping[tuple[str, int], Trained]]) -> Row:
    mine, base = [found[point.run] for found in repeats], [found[first.run] for found in repeats]
    ratios = [
        (point.global_batch / one.step_seconds) / (first.global_batch / other.step_seconds)
        for one, other in zip(mine, base, strict=True)
    ]
    low, speedup, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    seconds = statistics.median(one.step_seconds for one in mine)
    newest, reference = mine[-1], base[-1]
    return Row(
        mode=point.mode,
        strategy=point.strategy,
        layout=point.spread,
        processes=point.layout.world_size,
        global_batch=point.global_batch,
        step_ms=round(seconds * 1e3, 3),
        samples_per_second=round(point.global_batch / seconds, 3),
        speedup=round(speedup, 4),
        speedup_q1=round(low, 4),
        speedup_q3=round(high, 4),
        efficiency=round(speedup * first.layout.world_size / point.layout.world_size, 4),
        time_saved=round(1 - 1 / speedup, 4),
        memory_bytes=max(one.memory_bytes for one in mine),
        loss=newest.loss,
        loss_difference=abs(newest.loss - reference.loss) / (abs(reference.loss) or 1.0),
        validation=dict(newest.validation),
        same_samples=newest.ledger == reference.ledger,
        repeats=len(repeats),
    )


def decide_threads(processes: int, cores: int, asked: str, *, gpu: bool) -> tuple[int | None, list[Decision]]:
    """Threads of each process, in every run alike (None: as `allranks train` has them), and what is said of it.

    Args:
        processes: the most that any run has.
        asked: OMP_NUM_THREADS of the environment; empty: not set.
    """
    if gpu:
        return None, []
    said = asked.isdecimal() and int(asked) > 0
    threads = int(asked) if said else max(1, cores // processes)
    because = "OMP_NUM_THREADS says so" if said else f"{processes} processes share {cores} core(s)"
    alike = "in runs of fewer processes too: a process stands for a device"
    decisions = [Decision(f"{_count(threads, 'thread')} in each process", f"{because}; {alike}")]
    if processes * threads > cores:
        shared = f"{processes} processes of {_count(threads, 'thread')} share {_count(cores, 'core')}"
        decisions.append(Decision("efficiency here says how well cores are shared, not how devices scale", shared))
    return threads, decisions


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    return str(value) if isinstance(value, float) and not isfinite(value) else value


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
