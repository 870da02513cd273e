"""One process of an own loop, run as its author wrote it and watched from outside."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, final

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from allranks.errors import TaskError
from allranks.users_code import user_line
from allranks.verifying import observation as look
from allranks.verifying.given import gathered_over, noting_given
from allranks.verifying.loaded import await_loaded, note_loaded
from allranks.verifying.observer import Observer
from allranks.verifying.program import Program, cast_floats, in_order, order_of, reported, shuffled
from allranks.verifying.recording import Part, Parts, RunRecord, Start, StepRecord, saves_of
from allranks.verifying.update_state import (
    built,
    is_number,
    names_of,
    optimizers_of,
    scaler_states,
    scalers_told,
    settings_of,
    states_of,
)
from allranks.verifying.wrapper_watch import WrapperWatch

SEED, OF_A_STEP = 20261121, 1000


@final
@dataclass(frozen=True)
class Setting:
    """How a program is run.

    Attributes:
        num_steps: of training.
        dtype: floating numbers of parameters and data; None: as the program has them.
        drops: whether dropouts drop.
        folder: where a save goes.
        seed: added to the random numbers of the steps.
        shake: add an ulp of noise to the parameters, of this seed; None: do not.
        lowered: the low precision in which it computes, whose ulp that is; None: the parameters' own.
        shuffled: feed the samples of every batch in another order.
        resume: whether to save and load.
        own_noise, least_dims: see Observer.
    """

    num_steps: int
    dtype: torch.dtype | None = torch.float64
    drops: bool = False
    folder: str = ""
    seed: int = 0
    shake: int | None = None
    lowered: torch.dtype | None = None
    shuffled: bool = False
    resume: bool = True
    own_noise: bool = True
    least_dims: int = 1


@contextmanager
def default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """Inside, new floating tensors are of this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@final
@dataclass
class OwnLoop:
    """The program in this process.

    Attributes:
        record: what is known so far.
    """

    program: Program
    setting: Setting
    rank: int
    size: int
    distributed: bool
    observer: Observer
    record: RunRecord = field(default_factory=RunRecord)
    _model: Any = None
    _optimizer: Any = None
    _step: StepRecord = field(default_factory=StepRecord)
    _hooks: list[Any] = field(default_factory=list)
    _scalers: list[GradScaler] = field(default_factory=list)
    _wrappers: WrapperWatch = field(default_factory=lambda: WrapperWatch({}))

    def run(self) -> RunRecord:
        """Build, step, evaluate, and once more from each of its saves. Raises TaskError: its functions are no such."""
        try:
            with default_dtype(self.setting.dtype), scalers_told(self._scalers):
                self._run()
        except TaskError:
            raise
        except Exception as error:  # the user's program may raise anything: it is part of what it did
            self.record.error = user_line(error)
        return self.record

    def _run(self) -> None:
        program, setting = self.program, self.setting
        saves = saves_of(setting.num_steps) if program.save is not None and setting.resume else ()
        self._build()
        self.record.start = self._start()
        self._train(saves)
        self._evaluate()
        whole = self.record
        while program.load is not None and self.record.saved_before and self._went_on():
            saved = self.record
            self.record = RunRecord(first=saved.saved_before)
            self._build()
            program.load(self._model, self._optimizer, Path(setting.folder))
            note_loaded(setting.folder, self.record.first, self.rank)
            self.record.start = self._start()
            self._train(saves)
            saved.resumed = self.record
        self.record = whole

    def _went_on(self) -> bool:
        """Whether a step was made after the save."""
        return self.record.first + len(self.record.steps) > self.record.saved_before

    def _build(self) -> None:
        # Rank 0 begins with the numbers of one device; a program that wants all ranks alike has to see to it.
        look.seed_everything(SEED + 7919 * self.rank)
        self.observer.feed([])
        self.observer.unclaimed = self.record.unclaimed
        self._scalers.clear()
        for hook in self._hooks:
            hook.remove()
        self._wrappers.remove()
        self._model, self._optimizer = built(self.program.build(self.distributed))
        self._wrappers = WrapperWatch(look.modules_of(self._model))
        if self.setting.shake is not None:
            look.shake(look.logical_parameters(self._model), self.setting.shake, self.setting.lowered)
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_update) for optimizer in optimizers_of(self._optimizer)
        ]
        self.observer.on_clip = self._before_clipping

    def _start(self) -> Start:
        parameters, modules = look.logical_parameters(self._model), look.modules_of(self._model)
        held = {
            id(p) for optimizer in optimizers_of(self._optimizer) for g in optimizer.param_groups for p in g["params"]
        }
        names: dict[int, list[str]] = {}
        for name, parameter in parameters.items():
            names.setdefault(id(parameter), []).append(name)
        return Start(
            parameters=look.parts_of(parameters),
            buffers=look.parts_of(look.logical_buffers(self._model)),
            tied=[tuple(some) for some in names.values() if len(some) > 1],
            unlinked=[name for name, p in parameters.items() if p.requires_grad and id(p) not in held],
            statistics=statistics_of(modules),
            optimizers=[type(optimizer).__name__ for optimizer in optimizers_of(self._optimizer)],
            gathered=gathered_over(modules, parameters),
        )

    def _train(self, saves: Sequence[int]) -> None:
        """Steps from the record's first on; the data is made anew, and what lies before is skipped.

        Saved is before the first of `saves` that comes after it.
        """
        program, setting, first = self.program, self.setting, self.record.first
        self.observer.loaders.reset()
        self.observer.permutations.reset()
        steps = iter(program.steps(self.rank, self.size, first))
        for index in range(first, setting.num_steps):
            if index > first and index in saves and program.save is not None and not self.record.saved_before:
                if first:
                    await_loaded(setting.folder, first, self.size)
                program.save(self._model, self._optimizer, Path(setting.folder))
                self.record.saved_before = index
            self.observer.feed([])  # what makes a batch draws for no sample that is in work
            seeds = look.generator_digests()
            with self.observer.permutations.making():
                if (batches := next(steps, None)) is None:
                    break
            self._step = StepRecord(seeds=seeds, drew=self._drew(seeds, look.generator_digests()))
            rows = [look.rows_of(batch) for batch in batches]
            self._step.rows, self._step.batch_sizes = [*chain.from_iterable(rows)], tuple(map(len, rows))
            self._step.packed = not all(map(look.has_rows, batches))
            if setting.seed:
                look.seed_everything(setting.seed + OF_A_STEP * index)
            fed = self._fed(batches, rows, index)
            self.observer.feed([*chain.from_iterable(fed)], self._step.draws)
            prepared = self.observer.handing(self._prepared(batches, index), fed)
            alone = index > 0 or self.size == 1
            with nullcontext() if alone else noting_given(look.modules_of(self._model), self.record.given):
                loss = program.step(self._model, self._optimizer, prepared)
            self._step.loss = number(loss)
            self._after_update()
            self.record.steps.append(self._step)
        self.record.repeated_epochs = list(self.observer.loaders.repeated)
        self.record.redrawn = self.observer.permutations.redrawn
        self.record.compiled = self.observer.compiled

    def _drew(self, before: tuple[int, ...], after: tuple[int, ...]) -> tuple[bool, ...]:
        """Whether torch, numpy and python have drawn for samples in between."""
        drew = [a != b for a, b in zip(before, after, strict=True)]
        return (not self.observer.loaders.is_own_draw(before[0], after[0]), *drew[1:])

    def _fed(self, batches: list[Any], rows: list[list[int]], step: int) -> list[list[int]]:
        """Digests of the samples of each micro-batch in the order in which they are fed."""
        orders = (order_of(b, step * 100 + i) if self.setting.shuffled else None for i, b in enumerate(batches))
        return [in_order(some, order) for some, order in zip(rows, orders, strict=True)]

    def _prepared(self, batches: list[Any], step: int) -> list[Any]:
        found = []
        for place, batch in enumerate(batches):
            found.append(cast_floats(batch, self.setting.dtype))
            if self.setting.shuffled:
                found[-1] = shuffled(found[-1], step * 100 + place)
        return found

    def _before_clipping(self, parameters: Sequence[torch.Tensor], norm: torch.Tensor) -> None:
        self._step.norm = number(norm)
        self._step.raw |= self._gradients({id(parameter) for parameter in parameters})

    def _before_update(self, optimizer: Optimizer, args: Any, options: Any) -> None:
        self._step.updates += 1
        parameters = look.logical_parameters(self._model)
        alone = len(optimizers_of(self._optimizer)) == 1
        held = parameters.values() if alone else (p for group in optimizer.param_groups for p in group["params"])
        self._step.gradients |= self._gradients({id(parameter) for parameter in held})
        for group in optimizer.param_groups:
            self._step.settings.append(settings_of(group))
            self._step.groups.append(names_of(group, parameters))

    def _gradients(self, wanted: set[int]) -> Parts:
        parameters, done, found = look.logical_parameters(self._model), set(), {}
        for name, parameter in parameters.items():
            if parameter.grad is not None and id(parameter) in wanted and id(parameter) not in done:
                done.add(id(parameter))
                found[name] = look.part_of(parameter.grad)
        return found

    def _after_update(self) -> None:
        self._step.past = self._wrappers.take()
        parameters = look.logical_parameters(self._model)
        self._step.parameters = look.parts_of(parameters)
        self._step.buffers = look.parts_of(look.logical_buffers(self._model))
        self._step.state = states_of(self._optimizer, parameters) | scaler_states(self._scalers)
        if self.program.state is not None:
            self.record.keeps = True
            kept = reported(self.program.state(self._model, self._optimizer), "state")
            self._step.kept = {name: _kept(value) for name, value in kept.items()}

    def _evaluate(self) -> None:
        program = self.program
        self.observer.feed([])
        if program.evaluate is None:
            return
        batches = program.evaluation_batches(self.rank, self.size)
        self.record.evaluated = [row for batch in batches for row in look.rows_of(batch)]
        self.record.evaluated_packed = not all(map(look.has_rows, batches))
        found = program.evaluate(self._model, [cast_floats(batch, self.setting.dtype) for batch in batches])
        values = {name: number(value) for name, value in reported(found, "evaluate").items()}
        self.record.evaluation = {name: math.nan if value is None else value for name, value in values.items()}


def statistics_of(modules: Mapping[str, nn.Module]) -> list[str]:
    """Class names of the layers that look at the batch as a whole."""
    layers = (layer for module in modules.values() for layer in module.modules() if layer.training)
    return sorted({type(layer).__name__ for layer in layers if isinstance(layer, nn.modules.batchnorm._BatchNorm)})


def unique(tensors: Any) -> list[Any]:
    """Each once."""
    return list({id(tensor): tensor for tensor in tensors}.values())


def number(value: Any) -> float | None:
    """A loss or a norm as a number; None where it is none. Collective where it is a DTensor that is not reduced."""
    if isinstance(value, Mapping | tuple | list) and value:
        return number(next(iter(value.values())) if isinstance(value, Mapping) else value[0])
    if isinstance(value, torch.Tensor):
        full = look.part_of(value).value if not hasattr(value, "full_tensor") else value.full_tensor().detach()
        return float(full) if full.numel() == 1 else None
    return float(value) if is_number(value) else None


def _kept(value: Any) -> Part:
    return look.part_of(value if isinstance(value, torch.Tensor) else torch.tensor(float(value), dtype=torch.float64))
