"""One process that runs an own loop as one device does: whether it is the same again, and how far rounding moves it."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from allranks.errors import AllranksError
from allranks.users_code import user_line
from allranks.verifying import observation as look
from allranks.verifying.determinism import find_noise
from allranks.verifying.observer import Observer
from allranks.verifying.own_group import process_group
from allranks.verifying.own_loop import SEED, OwnLoop, Setting, default_dtype
from allranks.verifying.policies import without_policies
from allranks.verifying.program import Program, load_program, merge
from allranks.verifying.random_sources import RandomOperations, Unseeded, seen_to_draw
from allranks.verifying.recording import OneDevice, RunRecord
from allranks.verifying.variants import Seen, variants_of
from allranks.verifying.weights import is_sum_of

Source = Program | str
MICRO_BATCHES = (
    "one device computes in micro-batches, too, since layers or the loss couple the samples of one, or these cannot be "
    "one batch: whether a mean weighs micro-batches alike that hold unequally much (S8) was not tried"
)


def read_program(source: Source) -> Program:
    """The program that is given, or that lies at this place."""
    return load_program(source) if isinstance(source, str) else source


@contextmanager
def observer_of(setting: Setting) -> Iterator[Observer]:
    """One that is watching."""
    observer = Observer(drops=setting.drops, own_noise=setting.own_noise, least_dims=setting.least_dims)
    with observer.watching():
        yield observer


def run_alone(source: Source, setting: Setting, num_ranks: int) -> OneDevice:
    """One device: the run, and with another rounding; or why it is not the same again."""
    with observer_of(setting) as observer, process_group():
        os.makedirs(setting.folder, exist_ok=True)
        try:
            own = without_policies(read_program(source))
            # Autocast leaves float64 as it is.
            operations = _operations(own, setting, observer)
            lowest, lowered = operations.lowest, operations.lowered if setting.dtype is None else None
            program, notes = _one_batch_a_step(own, setting, observer, lowest)
            short = own.too_small(setting.num_steps, num_ranks)
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
        noise = find_noise(
            first,
            lambda seed: run(seed=seed, resume=False),
            partial(seen_to_draw, lambda: _operations(program, setting, observer)),
            relative=relative_of(setting),
        )
        if noise is not None:
            return OneDevice(first, noise=noise, too_small=short)
        variants, order = variants_of(
            first,
            lambda shake, shuffled, ulp: run(shake=shake, shuffled=shuffled, lowered=ulp or lowered, resume=False),
            lambda: Seen(lowest, _draws_by_place(program, setting, observer)),
        )
        notes = (*notes, *order)
        return OneDevice(first, variants, lowered=lowered, lowest=lowest, too_small=short, notes=notes)


def run_leaves_out(source: Source, setting: Setting, num_ranks: int) -> str:
    """`Program.leaves_out`, in a process of its own: a function may go on from where it was. "" if it raises."""
    with observer_of(setting), process_group(), default_dtype(setting.dtype):
        try:
            return read_program(source).leaves_out(setting.num_steps, num_ranks)
        except (Exception, SystemExit):  # the user's data may raise anything; what the ranks raise is told
            return ""


def relative_of(setting: Setting) -> float:
    """Of a tensor's largest value that may differ without a reason."""
    return 1e-12 if setting.dtype else 1e-6


def _operations(program: Program, setting: Setting, observer: Observer) -> RandomOperations:
    """Those of the first step that draw random numbers, and the low precision in which it computes."""
    mode = RandomOperations(observer)
    short = replace(setting, num_steps=1, resume=False)
    loop = OwnLoop(replace(program, step=mode.around(program.step)), short, 0, 1, False, observer)
    loop.run()
    return mode


def _draws_by_place(program: Program, setting: Setting, observer: Observer) -> bool:
    """Whether a step draws from generators of the program's own, and not for samples wherever these are."""
    unseeded = Unseeded()

    def step(*arguments: Any) -> Any:
        with unseeded.watching():
            return program.step(*arguments)

    return bool(_operations(replace(program, step=step), setting, observer).own or unseeded.drawn)


def run_shares(source: Source, setting: Setting, step: int, one: RunRecord, num_ranks: int) -> Any:
    """Gradients of each rank's micro-batches alone, from one device's parameters before `step`."""
    before = one.steps[step - 1].parameters if step else one.start.parameters
    found: list[list[dict[str, torch.Tensor]]] = []
    with observer_of(setting) as observer, process_group():
        program = without_policies(read_program(source))
        for rank in range(num_ranks):
            with default_dtype(setting.dtype):
                look.seed_everything(SEED + 7919 * rank)
                program.build(False)  # its seeds, where data draws from a generator that everybody shares
                steps = list(_upto(program.steps(rank, num_ranks), step + 1))
            found.append([_gradients(program, setting, observer, before, batch) for batch in steps[step]])
    return found


def _upto(steps: Any, number: int) -> Any:
    for _, batches in zip(range(number), steps, strict=False):
        yield batches


def _gradients(
    program: Program, setting: Setting, observer: Observer, before: Any, batch: Any
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


def _one_batch_a_step(
    program: Program, setting: Setting, observer: Observer, lowest: torch.dtype
) -> tuple[Program, tuple[str, ...]]:
    """One device takes all samples of a step at once, where they can be one batch and no layer or loss couples them.

    A mean over micro-batches is then compared with the mean over their samples. With a note where it keeps them.
    """
    short = replace(setting, num_steps=1, resume=False)
    whole = replace(program, data=_merged(program)) if callable(program.data) else replace(program, micro_batches=1)
    if not callable(program.data) and program.micro_batches == 1:
        return whole, ()
    fed: list[list[Any]] = []
    alone = replace(whole, data=_merged(program, fed), evaluate=None)
    first = OwnLoop(alone, short, 0, 1, False, observer).run()
    if not fed or len(fed[0]) < 2:
        return whole, ()
    kept = program, (MICRO_BATCHES,)
    if first.error or not first.steps or first.start.statistics or merge(fed[0]) is None:
        return kept
    before = first.start.parameters
    own = [_gradients(program, short, observer, before, batch) for batch in fed[0]]
    return (whole, ()) if is_sum_of(first.steps[0].raw or first.steps[0].gradients, own, lowest) else kept


def _merged(program: Program, fed: list[list[Any]] | None = None) -> Callable[[int, int], Any]:
    """Its data with all micro-batches of a step as one; these are added to `fed` as they are made."""

    def data(rank: int, size: int, first_step: int = 0) -> Any:
        for batches in program.steps(rank, size, first_step):
            if fed is not None:
                fed.append(batches)
            whole = merge(batches) if len(batches) > 1 else None
            yield batches if whole is None else [whole]

    return data
