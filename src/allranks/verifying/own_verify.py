"""`allranks.verify`: an own loop on N local processes against one."""

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from allranks.errors import AllranksError, ConfigError
from allranks.surviving.launch import launch
from allranks.task_loading import user_line
from allranks.verifying import observation as look
from allranks.verifying.answer import UNKNOWN_NOISE, Answer, cannot
from allranks.verifying.data_causes import judge_samples
from allranks.verifying.end_causes import judge_reshard
from allranks.verifying.evidence import Evidence
from allranks.verifying.gradient_causes import is_sum_of
from allranks.verifying.judge import judge, judge_ranks
from allranks.verifying.low_precision import judge_low_precision
from allranks.verifying.own_loop import OwnLoop, Setting, default_dtype, process_group
from allranks.verifying.program import Program, load_program, merge
from allranks.verifying.recording import OneDevice, RunRecord
from allranks.verifying.start_causes import judge_start, places_of, unplaced
from allranks.verifying.world_view import view_of

NUM_VARIANTS = 2
OTHER_SEED = 977
LOWERED = (
    "it runs in its own precision alone, and computes in {}: compared are how it begins, and the samples and gradients "
    "of the first step, as far as rounding in that precision allows"
)
RUN_IT = "make it run on several processes first: torchrun"
Source = Program | str


class RankFailed(RuntimeError):
    """The program raised on a rank."""


def verify(
    build: Callable[[bool], tuple[Any, Any]],
    step: Callable[[Any, Any, list[Any]], Any],
    data: Any,
    *,
    nproc: int = 2,
    num_steps: int = 4,
    **more: Any,
) -> Answer:
    """Run an own loop on `nproc` local processes and on one, and say what differs.

    Everything runs as it is written, raw torch.distributed included: the processes are there, and their gloo group is
    made (a call of `init_process_group` does nothing then); one process has a group of itself alone.

    Args:
        build: (distributed) -> (model, optimizer): plain modules for one device, wrapped ones for several.
        step: (model, optimizer, batches) -> loss: one optimizer step over this process's micro-batches.
        data: a list of global batches, one a step; or (rank, world_size) -> an iterable of steps, each a list of
            micro-batches. See `allranks.verifying.program.Program`.
        num_steps: of training, at least 2; fewer where the data ends.
        more: the other fields of Program: evaluate, validation, save, load, state, micro_batches.

    Raises:
        TaskError, DataError, ConfigError: build, step or data is not what it has to be.
    """
    return verify_program(Program(build, step, data, **more), nproc=nproc, num_steps=num_steps)


def verify_program(source: Source, *, nproc: int = 2, num_steps: int = 4) -> Answer:
    """`verify` of a Program, or of the file that defines one."""
    if nproc < 2:
        raise ConfigError(f"nproc={nproc}: one device is compared with at least 2 processes")
    if num_steps < 2:
        raise ConfigError(f"steps={num_steps}: the optimizer's state shows from the second step on: give at least 2")
    with tempfile.TemporaryDirectory(prefix="allranks-verify-") as folder:
        answer = _verified(source, Setting(num_steps, folder=f"{folder}/one"), nproc)
        if _noise_is_alike(answer):
            return answer
        # Noise that is drawn for all and shared out, say: then it is what it is, for samples in their places.
        return _verified(source, Setting(num_steps, folder=f"{folder}/again/one", own_noise=False), nproc)


def _noise_is_alike(answer: Answer) -> bool:
    """Whether every rank and one device draw noise from generators of their own for their own samples equally often."""
    runs = [*answer.ranks] if answer.one is None else [answer.one.run, *answer.ranks]
    counts = [[sum(draw.own for draw in step.draws) for step in run.steps] for run in runs]
    return all(len(set(some)) == 1 for some in zip(*counts, strict=False))


def _verified(source: Source, setting: Setting, nproc: int) -> Answer:
    """`verify_program` with this setting; saves go into its folder, and beside it."""
    one: OneDevice = launch(run_alone, source, setting, nproc, nproc=1)[0]
    if (one.run.error and "dtype" in one.run.error) or "Double" in one.run.error:
        setting = replace(setting, dtype=None)  # written for one precision: compared in that
        one = launch(run_alone, source, setting, nproc, nproc=1)[0]
    stopped = hindrance(one)
    if stopped is not None and one.again is None:
        return stopped
    try:
        ranks = launch(run_rank, source, _of_ranks(setting), nproc=nproc)
    except RankFailed as error:
        return stopped or cannot(f"the program fails on one of {nproc} processes", str(error), RUN_IT)
    if stopped is not None:
        findings = judge_ranks(Evidence(one, ranks, view_of(ranks)))
        return Answer(tuple(findings), one, ranks, view_of(ranks)) if findings else stopped
    return _answer(source, setting, one, ranks)


def hindrance(one: OneDevice) -> Answer | None:
    """Why one device gives nothing to compare with; None where it does."""
    if one.run.error:
        return cannot("the program fails on one device", one.run.error, "make it run alone first: build(False)")
    if not one.run.steps:
        return cannot("there is no data on one device", "", "data(0, 1), or the list, has to give a step")
    assert one.again is not None
    alone = Evidence(replace(one, again=None), [one.again], view_of([one.again]), places_of(one.run, [one.again]))
    differs = judge(alone)
    if differs:
        drawn = f"it draws random numbers: {', '.join(one.random)}" if one.random else UNKNOWN_NOISE
        return cannot(
            "the program is not deterministic on one device",
            f"{drawn}; {differs[0].verdict.what}",
            "make its noise part of data, or a function of the sample, for the time of the comparison",
        )
    return None


def _answer(source: Source, setting: Setting, one: OneDevice, ranks: Sequence[RunRecord]) -> Answer:
    places = places_of(one.run, ranks)
    unknown = unplaced(one.run, ranks, places)
    if unknown:
        return cannot("a parameter cannot be compared", unknown, "give it the same logical name on both sides")
    world = view_of(ranks)

    @cache
    def shares(step: int) -> Any:
        return launch(run_shares, source, setting, step, one.run, len(ranks), nproc=1)[0]

    evidence = Evidence(one, ranks, world, places, relative=1e-12 if setting.dtype else 1e-6, shares=shares)
    lengths = {len(record.steps) for record in (one.run, *ranks)}  # of several, that is what is wrong
    if one.lowered is not None and len(lengths) == 1 and evidence.num_steps:
        found = judge_start(evidence) or judge_samples(evidence, 0) or judge_low_precision(evidence)
        notes = (LOWERED.format(str(one.lowered).removeprefix("torch.")),)
        return Answer((*found, *judge_ranks(evidence)), one, tuple(ranks), world, notes=notes)
    findings = judge(evidence)
    if not findings and all(run.resumed is not None for run in ranks):
        findings = judge_reshard(evidence, launch(run_load, source, _of_ranks(setting), nproc=1)[0])
    return Answer(tuple(findings), one, tuple(ranks), world)


def _of_ranks(setting: Setting) -> Setting:
    return replace(setting, folder=f"{setting.folder}-ranks")


def run_load(source: Source, setting: Setting) -> RunRecord:
    """One process that is built as a rank is, and loads what the ranks have saved."""
    with _observer(setting) as observer, process_group():
        program = _program(source)

        def build(distributed: bool) -> Any:
            assert program.load is not None
            model, optimizer = program.build(distributed)
            try:
                program.load(model, optimizer, Path(setting.folder))
            except SystemExit as error:  # so many ranks it does not load for
                raise RankFailed(str(error)) from error
            return model, optimizer

        alone = replace(program, build=build, data=[], evaluate=None, save=None, load=None, state=None)
        return OwnLoop(alone, replace(setting, num_steps=0, resume=False), 0, 1, True, observer).run()


@contextmanager
def _observer(setting: Setting) -> Iterator[look.Observer]:
    """One that is watching."""
    observer = look.Observer(drops=setting.drops, own_noise=setting.own_noise)
    with observer.watching():
        yield observer


def run_rank(source: Source, setting: Setting) -> RunRecord:
    """One of the ranks; runs in a process that `launch` has started."""
    with _observer(setting) as observer, process_group() as (rank, size):
        os.makedirs(setting.folder, exist_ok=True)
        record = OwnLoop(_program(source), setting, rank, size, True, observer).run()
        if record.error:  # the others wait for this rank: the launcher ends them
            raise RankFailed(f"rank {rank}: {record.error}")
        return record


def run_alone(source: Source, setting: Setting, num_ranks: int) -> OneDevice:
    """One device: the run, the run again, and with another rounding."""
    with _observer(setting) as observer, process_group():
        os.makedirs(setting.folder, exist_ok=True)
        try:
            program = _one_batch_a_step(_program(source), setting, observer)
        except AllranksError:
            raise
        except Exception as error:  # the user's data may raise anything
            return OneDevice(RunRecord(error=user_line(error)))

        def run(**changes: Any) -> RunRecord:
            torch.use_deterministic_algorithms(False)
            return OwnLoop(program, replace(setting, **changes), 0, 1, False, observer).run()

        first = run(resume=False)
        if first.error:
            return OneDevice(first)
        again = run(seed=OTHER_SEED, resume=False)
        operations = _operations(program, setting, observer)
        lowered = operations.lowered if setting.dtype is None else None  # autocast leaves float64 as it is
        moved = {"shuffled": True, "resume": False, "lowered": lowered}
        variants = [run(shake=number, **moved) for number in range(1, NUM_VARIANTS + 1)]
        right = [variant for variant in variants if not variant.error]
        return OneDevice(first, right, again=again, random=tuple(operations.names), lowered=lowered)


def _operations(program: Program, setting: Setting, observer: look.Observer) -> look.RandomOperations:
    """Those of the first step that draw random numbers, and the low precision in which it computes."""
    mode = look.RandomOperations()
    short = replace(setting, num_steps=1, resume=False)
    loop = OwnLoop(replace(program, step=mode.around(program.step)), short, 0, 1, False, observer)
    loop.run()
    return mode


def run_shares(source: Source, setting: Setting, step: int, one: RunRecord, num_ranks: int) -> Any:
    """Gradients of each rank's micro-batches alone, from one device's parameters before `step`."""
    before = one.steps[step - 1].parameters if step else one.start.parameters
    found: list[list[dict[str, torch.Tensor]]] = []
    with _observer(setting) as observer, process_group():
        program = _program(source)
        for rank in range(num_ranks):
            steps = list(_upto(program.steps(rank, num_ranks), step + 1))
            found.append([_gradients(program, setting, observer, before, batch) for batch in steps[step]])
    return found


def _upto(steps: Any, number: int) -> Any:
    for _, batches in zip(range(number), steps, strict=False):
        yield batches


def _gradients(
    program: Program, setting: Setting, observer: look.Observer, before: Any, batch: Any
) -> dict[str, torch.Tensor]:
    def build(distributed: bool) -> Any:
        model, optimizer = program.build(False)
        with torch.no_grad():
            for name, parameter in look.logical_parameters(model).items():
                parameter.copy_(before[name].value)
        return model, optimizer

    alone = replace(program, build=build, data=lambda rank, size: [[batch]], evaluate=None, state=None)
    with default_dtype(setting.dtype):
        record = OwnLoop(alone, replace(setting, num_steps=1, resume=False), 0, 1, False, observer).run()
    if record.error or not record.steps:
        return {}
    step = record.steps[0]
    return {name: part.value for name, part in (step.raw or step.gradients).items()}


def _one_batch_a_step(program: Program, setting: Setting, observer: look.Observer) -> Program:
    """One device takes all samples of a step at once, where they can be one batch and no layer or loss couples them.

    A mean over micro-batches is then compared with the mean over their samples.
    """
    short = replace(setting, num_steps=1, resume=False)
    whole = replace(program, data=_merged(program)) if callable(program.data) else replace(program, micro_batches=1)
    steps = list(_upto(program.steps(0, 1), 1))
    if not steps or len(steps[0]) < 2:
        return whole
    first = OwnLoop(replace(whole, evaluate=None), short, 0, 1, False, observer).run()
    if first.error or not first.steps or first.start.statistics:
        return program
    before = first.start.parameters
    own = [_gradients(program, short, observer, before, batch) for batch in steps[0]]
    return whole if is_sum_of(first.steps[0].raw or first.steps[0].gradients, own) else program


def _merged(program: Program) -> Callable[[int, int], Any]:
    def data(rank: int, size: int, first: int = 0) -> Any:
        for batches in program.steps(rank, size, first):
            whole = merge(batches) if len(batches) > 1 else None
            yield batches if whole is None else [whole]

    return data


def _program(source: Source) -> Program:
    return load_program(source) if isinstance(source, str) else source
