"""`allranks verify TASK`: the real session under a layout against one device."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import psutil
import torch

from allranks.config import Config, override_config
from allranks.data.cut import ROUNDS, cut_step
from allranks.data.stream import checked_len, declared_order
from allranks.errors import ConfigError, DataError
from allranks.layout import Layout, num_processes, render_layout
from allranks.layout_refusals import refuse_unsupported
from allranks.request import TrainRequest
from allranks.surviving.launch import launch_without_gpus
from allranks.task import Task, has_step
from allranks.training.prepare import prepare, resolve_layout
from allranks.verifying import observation as look
from allranks.verifying.answer import Answer, cannot
from allranks.verifying.determinism import find_noise, incomparable
from allranks.verifying.evidence import Evidence
from allranks.verifying.findings import Finding
from allranks.verifying.judge import judge
from allranks.verifying.local_layouts import refuse_exceptions, refuse_too_many
from allranks.verifying.low_precision import judge_low_precision, say_noisy
from allranks.verifying.lowered import LOWERED, Lowered, run_lowered
from allranks.verifying.own_loop import default_dtype
from allranks.verifying.random_sources import RandomOperations, Unseeded
from allranks.verifying.recording import OneDevice, RunRecord, saves_of
from allranks.verifying.shrinking import Room, Size, choose_size, shrink
from allranks.verifying.task_alone import TaskAlone, Variation
from allranks.verifying.task_ranks import Errand, TaskRecord, run_task_rank, shorten_validation
from allranks.verifying.unverified import Unverified, failing, failing_here
from allranks.verifying.world_view import WorldView

DEFAULT_PROCESSES = 2
SAMPLES_A_RANK = 4
NUM_VARIANTS = 2
PLAIN = Variation()
TOO_LARGE = "return settings that make it small in hints().small, or take a machine with more memory"
ALONE = "the Task fails on one device", "make it train alone first: --layout single"
ON_A_RANK = "a rank fails", "make it train under this layout first: allranks train"
EXACT = "train.precision=float64"
NOT_IN_FLOAT8 = (
    "not compared in float8, because each process scales by the largest value of its own share: what is computed then "
    "depends on the layout (docs/explanation/exceptions.md says by how much)"
)


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
    """

    request: TrainRequest
    nproc: int
    layout: Layout
    task: Task
    config: Config
    precision: str
    global_batch: int


def verify_task(request: TrainRequest, num_steps: int) -> Answer:
    """Verify a Task under a layout.

    Raises:
        ConfigError, LayoutError, TaskError, DataError: what was asked cannot be run.
    """
    if num_steps < 2:
        raise ConfigError(f"--steps {num_steps}: the optimizer's state shows from the second step on: give at least 2")
    plan = plan_run(request, num_steps)
    try:
        return _verify_sized(plan, request, num_steps)
    except Unverified as stopped:
        return stopped.answer


def _verify_sized(plan: Plan, request: TrainRequest, num_steps: int) -> Answer:
    """In the size that this machine has memory for. Raises Unverified where the user's code fails."""
    with failing_here(*ALONE):
        dataset = plan.task.dataset("train")
        order = declared_order(dataset)
        stopped = too_small(dataset, plan) if order == "map" else None
    if order == "sharded":
        because = 'the dataset declares order="sharded": which samples a step has depends on the number of ranks'
        return cannot("there is no order to compare", because, 'verify it with order="global"')
    if stopped is not None:
        return stopped

    def with_settings(words: Sequence[str]) -> Plan:
        return plan_run(replace(request, overrides=(*request.overrides, *words)), num_steps)

    room = Room(plan.layout, plan.nproc, num_steps, psutil.virtual_memory().available)
    with failing_here(*ALONE):
        size = choose_size(plan.task, room, lambda words: with_settings(words).task)
    if size.hindrance:
        return cannot("the model is too large to be verified on this machine", size.hindrance, TOO_LARGE)
    answer = _verify(with_settings(size.settings) if size.settings else plan, num_steps, size)
    return replace(answer, shrunk=size.note)


def _verify(plan: Plan, num_steps: int, size: Size) -> Answer:
    with tempfile.TemporaryDirectory(prefix="allranks-verify-") as folder:
        saves = saves_of(num_steps)
        errand = Errand(plan.request, num_steps, f"{folder}/checkpoints", saves=saves, keep=size.keep)
        with failing(*ALONE):
            one: OneDevice = launch_without_gpus(run_task_alone, errand, nproc=1)[0]
        stopped = hindrance(one)
        if stopped is not None:
            return stopped
        with failing(*ON_A_RANK):
            ranks: list[TaskRecord] = launch_without_gpus(run_task_rank, errand, nproc=plan.nproc)
        evidence = evidence_of(one, ranks)
        findings = judge(evidence)
        if not findings:
            with failing("the run that goes on alone from the ranks' checkpoint fails", ALONE[1]):
                record: TaskRecord = launch_without_gpus(run_task_rank, _going_on_alone(plan, errand), nproc=1)[0]
            findings = _resharded(record.run, one)
        notes = notes_of(plan, len(saves))
        if not findings and plan.precision in LOWERED:
            with failing(f"it fails in {plan.precision}", "make it train in this precision first: allranks train"):
                low = _run_lowered(plan, errand)
            findings, lowered = _in_low_precision(plan, low)
            notes = (*notes, *lowered)
    return Answer(tuple(findings), one, tuple(record.run for record in ranks), evidence.world, notes=notes)


def plan_run(request: TrainRequest, num_steps: int) -> Plan:
    """The settings of the comparison: float64, an uneven global batch, accumulation, a few steps."""
    fixed = [f"train.steps={num_steps}", "data.workers=0", "track.tensorboard=false"]
    asked = replace(request, overrides=(*request.overrides, *fixed))
    prepared = prepare(asked)  # once: a Task may take long to make
    config = prepared.config
    nproc = request.nproc or num_processes(config.layout, DEFAULT_PROCESSES)
    layout = Layout.resolve(config.layout, nproc)
    if layout.kind == "single":
        raise ConfigError(f"nproc={nproc}: one device is compared with at least 2 processes: give --nproc or --layout")
    # Before another layout is proposed, which would be refused for the same.
    refuse_unsupported(layout)
    refuse_exceptions(layout)
    refuse_too_many(layout, nproc, render_layout(config.layout))
    if config.train.precision == "float16" and has_step(prepared.task):
        raise ConfigError("train.precision=float16 does not go with a step() of the Task's own: verify it in bfloat16")
    # Ranges that are left out begin where the run's own steps do.
    whole = ["data.skip="] if config.data.skip else []
    words = [*cut_words(prepared.task, config, layout), *whole, EXACT]
    exact = override_config(config, words)
    resolve_layout(exact, nproc)
    asked = replace(asked, overrides=(*asked.overrides, *words), nproc=nproc)
    return Plan(asked, nproc, layout, prepared.task, exact, config.train.precision, config.train.global_batch)


def cut_words(task: Task, config: Config, layout: Layout) -> list[str]:
    """A small global batch which the data ranks cannot share evenly, in some micro-steps; even where pp needs it.

    A micro-batch that the user has chosen is one of larger steps: in these it would leave one micro-step, or none.
    """
    ranks, train, stages = layout.dp, config.train, layout.num_stages
    most = min(train.global_batch, ranks * SAMPLES_A_RANK * (stages if layout.pp > 1 else 1))
    if layout.pp > 1:
        per_rank = max(stages, most // ranks // stages * stages)
        words = [f"train.global_batch={per_rank * ranks}"]
        smaller = per_rank // (stages * ROUNDS if per_rank % (stages * ROUNDS) == 0 else stages)
        return words + ([f"train.micro_batch={smaller}"] if train.micro_batch is not None else [])
    batch = max(ranks, most)
    if ranks > 1 and batch % ranks == 0:
        batch = batch + 1 if batch + 1 <= max(train.global_batch, ranks + 1) else batch - 1
    words = [f"train.global_batch={batch}"]
    # Another number than that of the data ranks, so that a factor tells which of the two it is.
    micro_steps = 3 if ranks == 2 else 2
    if train.micro_steps is not None or has_step(task) or task.coupled or batch < micro_steps:
        return words
    if train.micro_batch is None:
        return [*words, f"train.micro_steps={micro_steps}"]
    smaller = min(train.micro_batch, -(-batch // (ranks * micro_steps)))
    return [*words, f"train.micro_batch={smaller}"]


def too_small(dataset: Any, plan: Plan) -> Answer | None:
    """Why a map-style dataset gives no step: of the user's own global batch, or one to be split; None where it does."""
    try:
        size = checked_len(dataset, plan.global_batch)
    except DataError as error:
        return cannot("the data is too small for a step", str(error), "the run itself would be refused for it")
    needed, ranks = plan.config.train.global_batch, plan.layout.dp
    if size >= needed:
        return None
    said = (
        f"{type(dataset).__name__} has {size} samples; a step that {ranks} data-parallel ranks share has {needed} here"
    )
    return cannot("the data is too small to be split", said, f"give at least {needed} samples, or fewer data ranks")


def hindrance(one: OneDevice) -> Answer | None:
    """Why one device gives nothing to compare with; None where it does."""
    if one.run.error:
        return cannot(ALONE[0], one.run.error, ALONE[1])
    if len(one.run.steps) < 2:
        return cannot("the data is too small for two steps", f"it gives {len(one.run.steps)}", "give more samples")
    return incomparable(one, "the Task")


def evidence_of(one: OneDevice, ranks: Sequence[TaskRecord]) -> Evidence:
    """What is judged."""
    batches = max((step.num_batches for record in ranks for step in record.run.steps), default=1)
    world = WorldView(tuple(record.data_rank for record in ranks), dict(ranks[0].axes or {}), batches)
    return Evidence(one, [record.run for record in ranks], world, own_types=False)


def run_task_alone(errand: Errand) -> OneDevice:
    """One device: the run, and with another rounding; or why it is not the same again. In a process of `launch`."""
    prepared = prepare(errand.request)
    observer = look.Observer()
    with observer.watching(), default_dtype(torch.float64):
        shorten_validation(prepared.task)
        shrink(prepared.task, errand.keep)

        def run(variation: Variation = PLAIN) -> RunRecord:
            return TaskAlone(prepared.task, prepared.config, errand.num_steps, observer, variation).run()

        def drawing(seeded: bool) -> Sequence[str]:
            operations, unseeded = RandomOperations(observer), Unseeded()
            with unseeded.watching(), operations:
                TaskAlone(prepared.task, prepared.config, 1, observer, operations=operations).run()
            return operations.names if seeded else (*operations.own, *unseeded.names)

        first = run()
        if first.error:
            return OneDevice(first)
        noise = find_noise(first, lambda seed: run(replace(PLAIN, seed=PLAIN.seed + seed)), drawing)
        if noise is not None:
            return OneDevice(first, noise=noise)
        variants = [run(Variation(shake=number, shuffled=True)) for number in range(1, NUM_VARIANTS + 1)]
        return OneDevice(first, [v for v in variants if not v.error])


def _going_on_alone(plan: Plan, errand: Errand) -> Errand:
    """From the ranks' checkpoint, on one process."""
    request = replace(plan.request, layout="single", nproc=1)
    return replace(errand, request=request, resume=True, saves=())


def _resharded(run: RunRecord, one: OneDevice) -> list[Finding]:
    """Findings on the run that goes on alone from the ranks' checkpoint."""
    first = run.first
    rest = replace_steps(one, first)
    evidence = Evidence(rest, [run], WorldView((0,)), before=one.run.steps[:first])
    return [
        replace(finding, verdict=replace(finding.verdict, what=f"after a load on one process: {finding.verdict.what}"))
        for finding in judge(evidence, start=False)
    ]


def _run_lowered(plan: Plan, errand: Errand) -> Lowered:
    words = (*plan.request.overrides, f"train.precision={plan.precision}")
    return run_lowered(replace(plan.request, overrides=words), errand, plan.nproc)


def _in_low_precision(plan: Plan, low: Lowered) -> tuple[list[Finding], tuple[str, ...]]:
    """Findings on the first step in the run's own precision, and what was compared there, in words."""
    if not low.comparable:
        return [], (low.note,)
    return judge_low_precision(evidence_of(low.one, low.ranks)), (low.note, *say_noisy(low.one, plan.precision))


def replace_steps(one: OneDevice, first: int) -> OneDevice:
    """One device from step `first` on, as if it had begun there."""

    def rest(run: RunRecord) -> RunRecord:
        return replace(run, steps=run.steps[first:])

    return replace(one, run=rest(one.run), variants=[rest(run) for run in one.variants])


def notes_of(plan: Plan, num_saves: int) -> tuple[str, ...]:
    """What is checked, and what is not."""
    again = "saved and resumed again, " if num_saves > 1 else ""
    config = plan.config
    batch, micro = config.train.global_batch, cut_step(config.train, plan.layout).num_micro_steps()
    notes = (
        f"layout {plan.layout} on {plan.nproc} processes, float64, {batch} samples a step in {micro} micro-steps",
        "dropouts are off, and their random numbers are compared",
        f"saved after half of the steps, resumed under the same layout, {again}and alone on one process",
    )
    return (*notes, NOT_IN_FLOAT8) if plan.precision == "float8" else notes
