"""The small programs of a calibration: the engine's own steps of a chain so narrow that its products take no time."""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from allranks.config import Config, resolve_config
from allranks.data.micro_step import StepBatch
from allranks.layout import Layout
from allranks.layout_string import parse_layout
from allranks.observing.counters import Stopwatch
from allranks.parallel.backend import DeviceChoice
from allranks.planning.fixed_costs import Program, programs
from allranks.process_environment import ProcessEnvironment, num_cores
from allranks.stepping.session import assemble
from allranks.stepping.world import gather_processes
from allranks.task import Hints, Task

WIDTH, POSITIONS = 32, 8
WARM_STEPS, SPARE_STEPS = 3, 2
"""Steps before any is timed: optimizer state is made in the first, DDP builds its buckets after it."""
TURNS, QUICK_TURNS = 31, 11


class _Vectors(Dataset[tuple[Tensor, Tensor]]):
    """`length` samples that are alike: nobody learns from them."""

    draws = False

    def __init__(self, length: int) -> None:
        self._x, self._y = torch.ones(POSITIONS, WIDTH), torch.zeros(POSITIONS, WIDTH)
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._x, self._y


class _Link(nn.Module):
    """x + a layer between two products."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = self.down(functional.gelu(self.up(self.norm(x))))
        return x + inner


class Chain(Task):
    """A chain of `depth` equal blocks; what cuts `up` over `parts` ranks leaves each as many features."""

    depth: int = 2
    parts: int = 1
    samples: int = 64

    def model(self) -> nn.Module:
        """The blocks, one behind the other."""
        return nn.Sequential(*(_Link(WIDTH * self.parts) for _ in range(self.depth)))

    def hints(self) -> Hints:
        """How tp cuts it."""
        return Hints(tensor={"*.up": "colwise", "*.down": "rowwise"})

    def dataset(self, split: str) -> Any:
        """Vectors to train on."""
        return _Vectors(self.samples) if split == "train" else None

    def loss(self, output: Any, batch: Any) -> Tensor:
        """The sum of squares."""
        return functional.mse_loss(output, batch[1], reduction="sum")


def measure_programs(environment: ProcessEnvironment, choice: DeviceChoice, *, quick: bool) -> Mapping[Program, float]:
    """Seconds of a step of every program in this process, all by turns; collective over a world that runs.

    The least of all turns. Where processes share cores nobody waits for long but for a core: what a process computed
    counts then, over its share, and no other program lengthens it.
    """
    world, turns = environment.world_size, QUICK_TURNS if quick else TURNS
    cases = programs(world)
    share = min(1.0, num_cores() / world)
    clock = time.process_time if share < 1 else time.perf_counter
    steps = {case: _steps(case, WARM_STEPS + turns + SPARE_STEPS, environment, choice) for case in cases}
    for case in cases:
        for _ in range(WARM_STEPS):
            next(steps[case])()
    seconds: dict[Program, list[float]] = {case: [] for case in cases}
    for turn in range(turns):
        for case in cases[:: -1 if turn % 2 else 1]:
            if world > 1:
                dist.barrier()
            began = clock()
            next(steps[case])()
            seconds[case].append(clock() - began)
    return {case: min(found) / share for case, found in seconds.items()}


def _steps(
    program: Program, steps: int, environment: ProcessEnvironment, choice: DeviceChoice
) -> Iterator[Callable[[], float]]:
    batch = program.choice(environment.world_size).global_batch
    keys = [f"train.steps={steps}", f"train.global_batch={batch}", "evaluate.every=0"]
    keys += [f"train.micro_batch={program.choice(environment.world_size).micro_batch}", "train.max_norm=1.0"]
    config = resolve_config(task_defaults={}, toml=None, overrides=keys, layout=program.layout)
    task = Chain(depth=program.depth, parts=environment.world_size, samples=steps * batch)
    layout = Layout.resolve(parse_layout(program.layout), environment.world_size)
    return session_steps(task, config, layout, environment, choice)


def session_steps(
    task: Task, config: Config, layout: Layout, environment: ProcessEnvironment, choice: DeviceChoice
) -> Iterator[Callable[[], float]]:
    """The steps of a session; each yields what waits for its loss and gives it."""
    processes = gather_processes(environment, choice, layout)
    session = assemble(task, config, processes, Stopwatch(), lambda: (False, False))
    with session.loader() as loader:
        first = next(loader)
        before = session.step.agree_first(first)
        batch: StepBatch | None = first
        while batch is not None:
            before.read()
            outcome = session.step.run(batch, before, lambda: next(loader, None))
            session.stream.take(batch)
            yield lambda batch=batch, before=before, outcome=outcome: float(  # type: ignore[misc]
                outcome.values(before, batch.size)["loss"]
            )
            before, batch = outcome.pending, outcome.upcoming
