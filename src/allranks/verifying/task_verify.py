"""`allranks verify TASK`: the real session under a layout against one device."""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from allranks.data.cut import cut_step
from allranks.data.stream import checked_len, declared_order
from allranks.errors import ConfigError, DataError
from allranks.free_memory import free_host_bytes
from allranks.request import TrainRequest
from allranks.surviving.launch import launch_without_gpus
from allranks.training.prepare import prepare
from allranks.verifying.answer import Answer, cannot, equal_steps
from allranks.verifying.determinism import find_noise, incomparable
from allranks.verifying.drawn_causes import say_compiled
from allranks.verifying.evidence import Evidence
from allranks.verifying.findings import Finding
from allranks.verifying.judge import judge
from allranks.verifying.low_precision import judge_low_precision, say_errors, say_noisy
from allranks.verifying.lowered import LOWERED, Lowered, run_lowered
from allranks.verifying.noise_runs import least_dims_alike
from allranks.verifying.observer import Observer
from allranks.verifying.own_loop import default_dtype
from allranks.verifying.plan import Plan, notes_of, plan_run
from allranks.verifying.random_sources import RandomOperations, seen_to_draw
from allranks.verifying.recording import OneDevice, RunRecord, saves_of
from allranks.verifying.shrinking import Room, Size, choose_size, shrink
from allranks.verifying.task_alone import TaskAlone, Variation
from allranks.verifying.task_ranks import Errand, TaskRecord, run_task_rank, shorten_validation
from allranks.verifying.unverified import Unverified, failing, failing_here
from allranks.verifying.variants import ORDERED, Seen, variants_of
from allranks.verifying.world_view import WorldView

PLAIN = Variation()
TOO_LARGE = "return settings that make it small in hints().small, or take a machine with more memory"
NOT_EVALUATED = "no evaluation was compared: the Task has no validation samples, or a step of its own"
ALONE = "the Task fails on one device", "make it train alone first: --layout single"
ON_A_RANK = "a rank fails", "make it train under this layout first: allranks train"


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

    room = Room(plan.layout, plan.nproc, num_steps, free_host_bytes())
    with failing_here(*ALONE):
        size = choose_size(plan.task, room, lambda words: with_settings(words).task)
    if size.hindrance:
        return cannot("the model is too large to be verified on this machine", size.hindrance, TOO_LARGE)
    sized = with_settings(size.settings) if size.settings else plan
    answer = _verify(sized, num_steps, size)
    least_dims = least_dims_alike(answer)
    if least_dims > 1:
        answer = _verify(sized, num_steps, size, least_dims=least_dims)
    return replace(answer, shrunk=size.note)


def _verify(plan: Plan, num_steps: int, size: Size, *, least_dims: int = 1) -> Answer:
    with tempfile.TemporaryDirectory(prefix="allranks-verify-") as folder:
        saves = saves_of(num_steps)
        forwards = cut_step(plan.config.train, plan.layout).num_micro_steps()
        errand = Errand(plan.request, num_steps, f"{folder}/checkpoints", saves, keep=size.keep, forwards=forwards)
        errand = replace(errand, least_dims=least_dims)
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
        notes = one.notes + notes_of(plan, len(saves), one.whole_validation) + say_compiled(evidence)
        if all(record.run.evaluation is None for record in ranks):
            notes = (*notes, NOT_EVALUATED)
        if not findings and plan.precision in LOWERED:
            with failing(f"it fails in {plan.precision}", "make it train in this precision first: allranks train"):
                stateful = replace(errand, stateful=one.run.stateful)
                low = _run_lowered(plan, stateful, ordered=ORDERED in one.notes)
            findings, lowered = _in_low_precision(plan, low)
            notes = (*notes, *lowered)
    runs, equal = tuple(record.run for record in ranks), equal_steps(evidence) if findings else {}
    return Answer(tuple(findings), one, runs, evidence.world, notes=notes, equal_steps=equal)


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
    batches = max((len(step.batch_sizes) for record in ranks for step in record.run.steps), default=1)
    world = WorldView(tuple(record.data_rank for record in ranks), dict(ranks[0].axes or {}), batches)
    return Evidence(one, [record.run for record in ranks], world, own_types=False)


def run_task_alone(errand: Errand) -> OneDevice:
    """One device: the run, and with another rounding; or why it is not the same again. In a process of `launch`."""
    prepared = prepare(errand.request)
    observer = Observer(least_dims=errand.least_dims)
    with observer.watching(), default_dtype(torch.float64):
        shortened = shorten_validation(prepared.task)
        shrink(prepared.task, errand.keep)

        def run(variation: Variation = PLAIN) -> RunRecord:
            return TaskAlone(prepared.task, prepared.config, errand.num_steps, observer, variation).run()

        def drawn() -> RandomOperations:
            operations = RandomOperations(observer)
            with operations:
                TaskAlone(prepared.task, prepared.config, 1, observer, operations=operations).run()
            return operations

        first = run()
        if first.error:
            return OneDevice(first)
        plain = PLAIN
        if first.stateful and errand.forwards > 1:
            plain = replace(PLAIN, forwards=errand.forwards)
            first = run(plain)
        drawing = partial(seen_to_draw, drawn)
        noise = find_noise(first, lambda seed: run(replace(plain, seed=plain.seed + seed)), drawing)
        if noise is not None:
            return OneDevice(first, noise=noise)

        def seen() -> Seen:
            operations = drawn()
            return Seen(operations.lowest, bool(operations.own))

        variants, notes = variants_of(
            first, lambda shake, shuffled, ulp: run(replace(plain, shake=shake, ulp=ulp, shuffled=shuffled)), seen
        )
        return OneDevice(first, variants, whole_validation=max(shortened, default=0), notes=notes)


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


def _run_lowered(plan: Plan, errand: Errand, *, ordered: bool) -> Lowered:
    words = (*plan.request.overrides, f"train.precision={plan.precision}")
    return run_lowered(replace(plan.request, overrides=words), errand, plan.nproc, ordered=ordered)


def _in_low_precision(plan: Plan, low: Lowered) -> tuple[list[Finding], tuple[str, ...]]:
    """Findings on the first step in the run's own precision, and what was compared there, in words."""
    if not low.comparable:
        return [], (low.note,)
    evidence = evidence_of(low.one, low.ranks)
    findings = judge_low_precision(evidence)
    equal = () if findings else say_errors(evidence, plan.precision)
    return findings, (low.note, *equal, *say_noisy(low.one, plan.precision))


def replace_steps(one: OneDevice, first: int) -> OneDevice:
    """One device from step `first` on, as if it had begun there."""

    def rest(run: RunRecord) -> RunRecord:
        return replace(run, steps=run.steps[first:])

    return replace(one, run=rest(one.run), variants=[rest(run) for run in one.variants])
