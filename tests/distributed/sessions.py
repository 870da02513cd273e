"""Sessions inside the workers of a pool: made as a worker makes them, and stepped as the Trainer steps them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from allranks.config import Config, resolve_config
from allranks.data.micro_step import StepBatch
from allranks.data.random_keys import seed_all
from allranks.launching.environment import ALONE, ProcessEnvironment
from allranks.layout import Layout
from allranks.observing.counters import Stopwatch
from allranks.parallel.backend import DeviceChoice
from allranks.parameter_map import Box
from allranks.stepping.passes import Passes
from allranks.stepping.session import Session, assemble, model_key
from allranks.stepping.step import Outcome
from allranks.stepping.world import Processes, gather_processes
from allranks.task import Task

Parts = dict[str, tuple[tuple[int, ...], Box, torch.Tensor]]

SGD = ("optimizer.name=sgd", "optimizer.lr=0.1", "optimizer.momentum=0.9")


def config_of(layout: str, *overrides: str, precision: str = "float64", steps: int = 3) -> Config:
    """The config of a command line."""
    fixed = (f"train.steps={steps}", f"train.precision={precision}")
    return resolve_config(task_defaults={}, toml=None, overrides=[*fixed, *overrides], layout=layout)


def processes_of(config: Config, local_size: int | None = None) -> Processes:
    """This worker among the others of its pool, `local_size` of them on a host; collective."""
    cpu = DeviceChoice(torch.device("cpu"), "gloo", None, ())
    if not dist.is_initialized():
        return gather_processes(ALONE, cpu, Layout.resolve(config.layout, 1))
    rank, size = dist.get_rank(), dist.get_world_size()
    local = size if local_size is None else local_size
    environment = ProcessEnvironment(
        "torchrun",
        rank=rank,
        local_rank=rank % local,
        world_size=size,
        local_world_size=min(local, size - rank // local * local),
        node_rank=rank // local,
        num_nodes=-(-size // local),
    )
    return gather_processes(environment, cpu, Layout.resolve(config.layout, size))


def session_of(
    task: Task,
    config: Config,
    processes: Processes | None = None,
    observe: Callable[[Passes], Passes] = lambda passes: passes,
) -> Session:
    """A session on this worker; collective."""
    return assemble(
        task, config, processes or processes_of(config), Stopwatch(), lambda: (False, False), observe=observe
    )


@dataclass(frozen=True)
class Stepped:
    """A finished step: its batch on this rank, and its outcome."""

    batch: StepBatch
    outcome: Outcome

    @property
    def loss(self) -> float:
        """The world's sum of losses."""
        return self.outcome.pending.read().loss

    @property
    def ledger(self) -> int:
        """The world's."""
        return self.outcome.pending.read().ledger


def step_through(
    session: Session, num_steps: int, alter: Callable[[StepBatch], StepBatch] = lambda batch: batch
) -> Iterator[Stepped]:
    """Step on from the stream's position, the gradients of a step gone; `alter` may change what is fed; collective."""
    with session.loader() as loader:
        batch: StepBatch | None = next(loader)
        assert batch is not None
        before = session.step.agree_first(batch)
        for _ in range(num_steps):
            assert batch is not None, "the data ended before the steps did"
            outcome = session.step.run(alter(batch), before, lambda: next(loader, None))
            session.stream.take(batch)
            yield Stepped(batch, outcome)
            before, batch = outcome.pending, outcome.upcoming


def parts_of(session: Session) -> Parts:
    """What this rank holds of every parameter, buffer and optimizer state, by name."""
    model = {name: (entry, session.spread.local(name)) for name, entry in session.spread.map.items()}
    optimizers = {entry.name: (entry, tensor) for entry, tensor in session.optimizers.parts()}
    return {name: (entry.shape, entry.box, local.clone()) for name, (entry, local) in (model | optimizers).items()}


def together(ranks: Sequence[Parts]) -> dict[str, torch.Tensor]:
    """Whole tensors from the parts of all ranks; AssertionError where two ranks disagree, or a part is missing."""
    found: dict[str, torch.Tensor] = {}
    # A rank of a pipeline holds nothing of other stages.
    kinds = {name: (shape, local.dtype) for parts in ranks for name, (shape, _, local) in parts.items()}
    for name, (shape, dtype) in kinds.items():
        whole, filled = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=torch.bool)
        for _, box, local in (parts[name] for parts in ranks if name in parts):
            place = box.place(shape)
            assert torch.equal(whole[place][filled[place]], local[filled[place]]), f"two ranks hold different {name}"
            whole[place], filled[place] = local, True
        assert filled.all(), f"no rank holds some part of {name}"
        found[name] = whole
    return found


def initial_model(task: Task, seed: int = 0) -> Any:
    """The user's model() under the seed, as one process builds it (law 5)."""
    seed_all(model_key(seed))
    return task.model()
