"""`allranks.verify`: an own loop on N local processes against one."""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

from allranks.errors import ConfigError, ProcessError
from allranks.surviving.launch import launch_without_gpus
from allranks.verifying.answer import Answer, cannot, equal_steps
from allranks.verifying.data_causes import judge_fed
from allranks.verifying.determinism import incomparable
from allranks.verifying.drawn_causes import say_compiled
from allranks.verifying.end_causes import VALUES, judge_reshard
from allranks.verifying.evidence import Evidence
from allranks.verifying.judge import judge, judge_ranks
from allranks.verifying.local_layouts import MOST_PROCESSES
from allranks.verifying.low_precision import judge_low_precision, noisy_gradients, say_errors, say_noisy
from allranks.verifying.noise_runs import does_noise_matter, is_own_noise_alike, least_dims_alike
from allranks.verifying.own_alone import (
    Source,
    relative_of,
    run_alone,
    run_leaves_out,
    run_shares,
)
from allranks.verifying.own_loop import Setting
from allranks.verifying.own_ranks import RankFailed, in_its_own, run_in_own_precision, run_load, run_rank
from allranks.verifying.program import Program
from allranks.verifying.recording import OneDevice, RunRecord, saves_of
from allranks.verifying.start_causes import judge_start, places_of, unplaced
from allranks.verifying.unmatched import judge_unmatched
from allranks.verifying.unverified import Unverified, failing
from allranks.verifying.update_state import align_settings
from allranks.verifying.world_view import say_shared, view_of

LOWERED = (
    "it runs in its own precision alone, and computes in {}: compared are how it begins, and the samples and gradients "
    "of the first step, as far as rounding in that precision allows"
)
EVEN = "every rank had as many samples in each step: uneven shares were not tried"
PACKED = (
    "in {} of {} steps it was not compared which samples the ranks were fed: the tensors of a batch have not one "
    "length, as those of packed graphs, or it has none"
)
ALONE = "the program fails on one device", "make it run alone first: build(False)"
OWN_PRECISION = (
    "it does not run in float64 ({}): compared in its own precision, to {:g} of each tensor's largest value, or as far "
    "as rounding was seen to move it"
)
CAST = (
    "its save casts what is float64 here: the resume was compared in the program's own precision, where that loses "
    "nothing"
)
RUN_IT = "make it run on several processes first: torchrun"


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
    if nproc > MOST_PROCESSES:
        raise ConfigError(f"nproc={nproc}: more than the {MOST_PROCESSES} processes that run on one machine")
    if num_steps < 2:
        raise ConfigError(f"steps={num_steps}: the optimizer's state shows from the second step on: give at least 2")
    try:
        return _verify(source, nproc, num_steps)
    except Unverified as stopped:
        return stopped.answer


def _verify(source: Source, nproc: int, num_steps: int) -> Answer:
    with tempfile.TemporaryDirectory(prefix="allranks-verify-") as folder:
        answer = _verified(source, Setting(num_steps, folder=f"{folder}/one"), nproc)
        own, least_dims = is_own_noise_alike(answer), least_dims_alike(answer)
        if own and least_dims == 1:
            return answer
        # Noise that is drawn for all and shared out, say: then it is what it is, for samples in their places.
        again = Setting(num_steps, folder=f"{folder}/again/one", own_noise=own, least_dims=least_dims)
        return _verified(source, again, nproc)


def _verified(source: Source, setting: Setting, nproc: int) -> Answer:
    """`verify_program` with this setting; saves go into its folder, and beside it."""
    one = _alone(source, setting, nproc)
    if one.run.error:
        setting, one = _in_own_precision(source, setting, one.run.error, nproc)
    stopped = hindrance(one)
    if stopped is not None and not (one.noise is not None and one.noise.seeded):
        return stopped
    try:
        ranks = launch_without_gpus(run_rank, source, _of_ranks(setting), nproc=nproc)
    except (RankFailed, ProcessError) as error:  # it raised; it was killed, or ended itself
        return stopped or _failed(source, setting, one, nproc, str(error))
    if stopped is not None:
        findings = judge_ranks(Evidence(one, ranks, view_of(ranks)))
        return Answer(tuple(findings), one, ranks, view_of(ranks), noise=stopped.unverified) if findings else stopped
    return _answer(source, setting, one, ranks)


def _in_own_precision(source: Source, setting: Setting, error: str, nproc: int) -> tuple[Setting, OneDevice]:
    """(setting, one device) of a program that fails in float64 with `error`: it may be written for one precision."""
    setting = replace(setting, dtype=None)
    one = _alone(source, setting, nproc)
    told = OWN_PRECISION.format(error.splitlines()[-1].strip(), relative_of(setting))
    notes = one.notes if one.lowered is not None else (told, *one.notes)  # LOWERED says it
    return replace(setting, lowered=one.lowered), replace(one, notes=notes)


def _alone(source: Source, setting: Setting, nproc: int) -> OneDevice:
    with failing(*ALONE):
        one: OneDevice = launch_without_gpus(run_alone, source, setting, nproc, nproc=1)[0]
    return one


def _failed(source: Source, setting: Setting, one: OneDevice, nproc: int, error: str) -> Answer:
    """Why the ranks failed: there was no sample for some of them, or the program itself."""
    fails = f"the program fails on one of {nproc} processes"
    with failing(fails, RUN_IT):
        short = one.too_small or launch_without_gpus(run_leaves_out, source, setting, nproc, nproc=1)[0]
    if not short:
        return cannot(fails, error, RUN_IT)
    advice = f"give each step at least {nproc} samples, one for each process"
    return cannot("the data is too small to be split", f"{short}\n{error}", advice)


def hindrance(one: OneDevice) -> Answer | None:
    """Why one device gives nothing to compare with; None where it does."""
    if one.run.error:
        return cannot(ALONE[0], one.run.error, ALONE[1])
    if not one.run.steps:
        return cannot("there is no data on one device", "", "data(0, 1), or the list, has to give a step")
    if len(one.run.steps) < 2:
        return cannot("the data is too small for two steps", "it gives 1", "let data give at least two steps")
    return incomparable(one, "the program")


def _answer(source: Source, setting: Setting, one: OneDevice, ranks: Sequence[RunRecord]) -> Answer:
    places = places_of(one.run, ranks)
    unknown = unplaced(one.run, ranks, places)
    if unknown:
        return cannot("a parameter cannot be compared", unknown, "give it the same logical name on both sides")
    world = view_of(ranks, places)
    for run in ranks:
        align_settings(run, one.run)

    @cache
    def shares(step: int) -> Any:
        with failing(*ALONE):
            return launch_without_gpus(run_shares, source, setting, step, one.run, len(ranks), nproc=1)[0]

    @cache
    def noise_matters() -> bool:
        salted = replace(setting, folder=f"{setting.folder}-salted", resume=False)
        return does_noise_matter(partial(launch_without_gpus, run_rank, source, salted, nproc=len(ranks)), evidence)

    @cache
    def in_own_precision() -> Sequence[RunRecord]:
        own = run_in_own_precision(source, _of_ranks(setting), len(ranks))
        for run in own:
            align_settings(run, one.run)
        return own

    evidence = Evidence(
        one, ranks, world, places, relative=relative_of(setting), noise_matters=noise_matters, shares=shares,
        in_own_precision=in_own_precision,
    )  # fmt: skip
    lengths = {len(record.steps) for record in (one.run, *ranks)}  # of several, that is what is wrong
    if one.lowered is not None and len(lengths) == 1 and evidence.num_steps:
        return _in_its_own_precision(evidence)
    findings = judge(evidence) or judge_unmatched(evidence)
    cast = bool(in_own_precision.cache_info().currsize) and not {each.verdict.kind for each in findings} & {*VALUES}
    if not findings and all(run.resumed is not None for run in ranks):
        saving = in_its_own(_of_ranks(setting)) if cast else _of_ranks(setting)  # the save that can be exact
        with failing("the program fails where one process loads what the ranks have saved", RUN_IT):
            loaded: RunRecord = launch_without_gpus(run_load, source, saving, nproc=1)[0]
        findings = judge_reshard(replace(evidence, ranks=in_own_precision()) if cast else evidence, loaded)
    shared = say_packed(evidence, evidence.num_steps) or ((EVEN,) if _is_even(evidence) else ())
    told = one.notes + ((CAST,) if cast else ()) + say_shared(world) + shared
    notes = told + say_compiled(evidence) + not_tried(ranks, setting.num_steps)
    equal = equal_steps(evidence) if findings else {}
    return Answer(tuple(findings), one, tuple(ranks), world, notes=notes, equal_steps=equal)


def say_packed(evidence: Evidence, num_steps: int) -> tuple[str, ...]:
    """A note on those of the first steps in which some side's batches have no row for each sample; none where none."""
    packed = [any(run.steps[step].packed for run in (evidence.one.run, *evidence.ranks)) for step in range(num_steps)]
    return (PACKED.format(sum(packed), num_steps),) if any(packed) else ()


def not_tried(ranks: Sequence[RunRecord], num_steps: int) -> tuple[str, ...]:
    """What of a program was not run: because it does not say how, or the data ends too soon."""
    run, saves = ranks[0], saves_of(num_steps)
    steps, told = len(run.steps), []
    if not run.saved_before:
        short = f"it is saved before step {saves[0]}, and the data ends sooner"
        told.append(f"no resume was tried: {short if steps < saves[0] else 'the program has no save and load'}")
    elif run.resumed is None:
        told.append(f"no resume was tried: the data ends where it is saved, before step {run.saved_before}")
    elif len(saves) > 1 and steps <= saves[1]:
        told.append(f"no second save was resumed: the data ends where it is made, before step {saves[1]}")
    if all(run.evaluation is None for run in ranks):
        told.append("no evaluation was tried: the program has no evaluate")
    elif not any(run.evaluation for run in ranks):
        told.append("no evaluation was compared: evaluate returns nothing")
    if run.keeps and not any(record.kept for one in ranks for record in one.steps):
        told.append("nothing that is kept was compared: state returns nothing")
    return tuple(told)


def _is_even(evidence: Evidence) -> bool:
    """Whether ranks have different samples, and in each step equally many."""
    steps = (evidence.step(index)[1] for index in range(evidence.num_steps))
    return evidence.world.data_ranks > 1 and all(len({len(record.rows) for record in ranks}) == 1 for ranks in steps)


def _in_its_own_precision(evidence: Evidence) -> Answer:
    """Of a program that computes in a low precision alone."""
    one, name = evidence.one, str(evidence.one.lowered).removeprefix("torch.")
    found = judge_start(evidence) or judge_fed(evidence, 0) or judge_low_precision(evidence)
    findings = (*found, *judge_ranks(evidence))
    equal = () if found else say_errors(evidence, name)
    said = (*one.notes, *say_shared(evidence.world), *say_packed(evidence, 1))
    notes = (LOWERED.format(name), *said, *equal, *say_noisy(one, name))
    if not findings and set(noisy_gradients(one)) >= one.run.steps[0].gradients.keys():
        return cannot(
            f"rounding in {name} hides what is computed", notes[-1], "verify it in float32, or with more samples"
        )
    return Answer(findings, one, tuple(evidence.ranks), evidence.world, notes=notes)


def _of_ranks(setting: Setting) -> Setting:
    return replace(setting, folder=f"{setting.folder}-ranks")
