"""What is run to verify a Task: its layout, the settings of the comparison, and in words what they leave out."""

import math
from dataclasses import dataclass, replace
from itertools import combinations, count
from typing import final

from allranks.config import Config, override_config
from allranks.config_sections import LayoutConfig
from allranks.data.cut import ROUNDS, cut_step
from allranks.errors import ConfigError
from allranks.layout import AXES, PROCESS_AXES, Layout, num_processes, render_layout
from allranks.layout_refusals import refuse_unsupported
from allranks.request import TrainRequest
from allranks.task import Task, has_step
from allranks.training.prepare import prepare, resolve_layout
from allranks.verifying.local_layouts import refuse_exceptions, refuse_offload, refuse_too_many, refuse_unexercised
from allranks.verifying.task_ranks import MOST_VALIDATED

DEFAULT_PROCESSES = 2
SAMPLES_A_RANK = 4
EXACT = "train.precision=float64"
NOT_IN_FLOAT8 = (
    "not compared in float8, because each process scales by the largest value of its own share: what is computed then "
    "depends on the layout (docs/explanation/exceptions.md says by how much)"
)
PLACES = "where modules lie is not verified: a CPU is one memory, and nothing moves between devices"


@final
@dataclass(frozen=True)
class Plan:
    """What is run.

    Attributes:
        request: the user's, with the settings of the comparison.
        nproc: processes.
        layout: resolved.
        task, config: what the request means.
        precision: the run's own; the comparison's is float64.
        global_batch: the run's own; the comparison's is smaller.
        workers: data.workers of the run; the comparison has none.
    """

    request: TrainRequest
    nproc: int
    layout: Layout
    task: Task
    config: Config
    precision: str
    global_batch: int
    workers: int


def plan_run(request: TrainRequest, num_steps: int) -> Plan:
    """The settings of the comparison: float64, an uneven global batch, accumulation, a few steps."""
    fixed = [f"train.steps={num_steps}", "track.tensorboard=false"]
    asked = replace(request, overrides=(*request.overrides, *fixed))
    prepared = prepare(asked)  # once: a Task may take long to make
    config = prepared.config
    nproc = request.nproc or num_processes(config.layout, available(config.layout))
    layout = Layout.resolve(config.layout, nproc)
    if layout.kind == "single":
        raise ConfigError(f"nproc={nproc}: one device is compared with at least 2 processes: give --nproc or --layout")
    # Before another layout is proposed, which would be refused for the same.
    refuse_unsupported(layout)
    refuse_exceptions(layout)
    refuse_unexercised(config.layout, layout)
    refuse_too_many(layout, nproc, render_layout(config.layout))
    refuse_offload(layout)
    if config.train.precision == "float16" and has_step(prepared.task):
        raise ConfigError("train.precision=float16 does not go with a step() of the Task's own: verify it in bfloat16")
    # Ranges that are left out begin where the run's own steps do.
    whole = ["data.skip="] if config.data.skip else []
    words = ["data.workers=0", *whole, *cut_words(prepared.task, config, layout), EXACT]
    exact = override_config(config, words)
    resolve_layout(exact, nproc)
    asked = replace(asked, overrides=(*asked.overrides, *words), nproc=nproc)
    own = config.train
    return Plan(asked, nproc, layout, prepared.task, exact, own.precision, own.global_batch, config.data.workers)


def available(asked: LayoutConfig) -> int:
    """Processes with which what takes all that is left (`*`) is 2."""
    degrees = [getattr(asked, axis) for axis in PROCESS_AXES]
    return DEFAULT_PROCESSES * math.prod(degree for degree in degrees if isinstance(degree, int))


def cut_words(task: Task, config: Config, layout: Layout) -> list[str]:
    """A small global batch which the data ranks cannot share evenly, in some micro-steps; even where pp needs it.

    A micro-batch that the user has chosen is one of larger steps: in these it would leave one micro-step, or none.
    """
    ranks, train, stages = layout.dp, config.train, layout.num_stages
    micro_steps = unlike_any_degree(layout)
    most = min(train.global_batch, ranks * SAMPLES_A_RANK * (stages if layout.pp > 1 else 1))
    if layout.pp > 1:
        per_rank = max(stages, most // ranks // stages * stages)
        words = [f"train.global_batch={per_rank * ranks}"]
        smaller = per_rank // (stages * ROUNDS if per_rank % (stages * ROUNDS) == 0 else stages)
        return words + ([f"train.micro_batch={smaller}"] if train.micro_batch is not None else [])
    batch = max(ranks, most, min(train.global_batch, micro_steps))
    if ranks > 1 and batch % ranks == 0:
        batch = batch + 1 if batch + 1 <= max(train.global_batch, ranks + 1) else batch - 1
    words = [f"train.global_batch={batch}"]
    micro_steps = micro_steps if micro_steps <= batch else 2
    if train.micro_steps is not None or has_step(task) or task.coupled or batch < micro_steps:
        return words
    if train.micro_batch is None:
        return [*words, f"train.micro_steps={micro_steps}"]
    smaller = min(train.micro_batch, -(-batch // (ranks * micro_steps)))
    return [*words, f"train.micro_batch={smaller}"]


def unlike_any_degree(layout: Layout) -> int:
    """Micro-steps of a step: a factor then tells these from ranks of an axis, of several axes, and squares of them."""
    degrees = [getattr(layout, axis) for axis in AXES if getattr(layout, axis) > 1]
    numbers = {math.prod(some) for taken in range(1, len(degrees) + 1) for some in combinations(degrees, taken)}
    taken = numbers | {number**2 for number in numbers}
    return next(steps for steps in count(2) if not {steps, steps**2} & taken)


def notes_of(plan: Plan, num_saves: int, whole_validation: int = 0) -> tuple[str, ...]:
    """What is checked, and what is not.

    Args:
        whole_validation: samples of the Task's own validation split, where some are left out; 0: none is.
    """
    again = "saved and resumed again, " if num_saves > 1 else ""
    config = plan.config
    batch, micro = config.train.global_batch, cut_step(config.train, plan.layout).num_micro_steps()
    notes = [
        f"layout {plan.layout} on {plan.nproc} processes, float64, {batch} samples a step in {micro} micro-steps",
        "dropouts are off, and their random numbers are compared",
        f"saved after half of the steps, resumed under the same layout, {again}and alone on one process",
    ]
    if plan.workers:
        notes.append(f"data.workers={plan.workers} is left out: every process loads its samples itself")
    if whole_validation:
        notes.append(f"the evaluation is made of the first {MOST_VALIDATED} of {whole_validation} validation samples")
    if plan.layout.kind == "placement":
        notes.append(PLACES)
    if plan.precision == "float8":
        notes.append(NOT_IN_FLOAT8)
    return tuple(notes)
