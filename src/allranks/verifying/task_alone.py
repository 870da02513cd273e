"""A Task on one device: its own model, loss and samples, fed to the plain loop of `one_device`."""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from allranks.config import Config, OptimizerConfig
from allranks.data.cut import cut_step
from allranks.data.evaluation import evaluation_batches
from allranks.data.loader import Loader
from allranks.data.micro_step import MicroStep
from allranks.data.stream import DataStream, draws
from allranks.digest import ledger_sum
from allranks.errors import DataError
from allranks.layout import Layout
from allranks.stepping.session import make_schedule
from allranks.task import Task, has_step, resolve_inputs, resolve_targets
from allranks.users_code import user_line
from allranks.verifying import observation as look
from allranks.verifying.choosing import Choosing
from allranks.verifying.observer import Observer
from allranks.verifying.one_device import evaluate_on_one_device, train_on_one_device
from allranks.verifying.own_loop import statistics_of, unique
from allranks.verifying.passes_watch import rows_of_forward, rows_of_step, values_of_step
from allranks.verifying.program import call, cast_floats, in_order, order_of, shuffled
from allranks.verifying.random_sources import RandomOperations
from allranks.verifying.recording import Part, Parts, RunRecord, Start, StepRecord
from allranks.verifying.task_ranks import ledger
from allranks.verifying.update_state import settings_of


@final
@dataclass(frozen=True)
class Variation:
    """What changes nothing but the rounding, or what is random.

    Attributes:
        shake: seed of an ulp (of the type `ulp`, or that of the run) of noise on the parameters; None: none.
        shuffled: feed the samples of each forward in another order.
        apart: one sample a forward, where it does not matter which samples share one.
        forwards: of a step, where a forward moves state of its own; None: one.
        exact: no autocast, where the run has one.
        seed: of the random numbers of the steps.
    """

    shake: int | None = None
    ulp: torch.dtype | None = None
    shuffled: bool = False
    apart: bool = False
    forwards: int | None = None
    exact: bool = False
    seed: int = 1


@final
@dataclass
class TaskAlone:
    """One run of a Task on one device.

    Attributes:
        lowered: what autocast lowers a forward to, and nothing is evaluated; None: everything is in float64.
        scale: of the losses in the backward; gradients are divided by it.
        choosing: what goes through it is chosen by it; None: nothing is looked at.
        operations: are told where a step begins and ends.
    """

    task: Task
    config: Config
    num_steps: int
    observer: Observer
    variation: Variation = Variation()
    lowered: torch.dtype | None = None
    scale: float = 1.0
    choosing: Choosing | None = None
    operations: RandomOperations | None = None
    record: RunRecord = field(default_factory=RunRecord)
    _models: dict[str, nn.Module] = field(default_factory=dict)
    _optimizers: dict[str, Optimizer] = field(default_factory=dict)
    _step: StepRecord = field(default_factory=StepRecord)
    _fed: list[list[int]] = field(default_factory=list)

    def run(self) -> RunRecord:
        """Train and evaluate."""
        try:
            self._build()
            with nullcontext() if self.choosing is None else self.choosing.within(self._models):
                self._train()
            if self.lowered is None:
                self.record.evaluation = self._evaluate() or None
        except Exception as error:  # the user's code may raise anything: it is part of what it did
            self.record.error = str(error) if isinstance(error, DataError) else user_line(error)
        return self.record

    def _build(self) -> None:
        seed = self.config.train.seed
        self.observer.feed([])
        self.observer.unclaimed = self.record.unclaimed
        look.seed_everything(seed)
        made = self.task.model()
        self._models = {name: module.to(self._dtype) for name, module in look.modules_of(made).items()}
        for module in self._models.values():
            if not any(part.training for part in module.modules()):
                module.train()
        parameters = {
            which: unique(p for p in look.logical_parameters(module).values() if p.requires_grad)
            for which, module in self._models.items()
        }
        parameters = {which: held for which, held in parameters.items() if held}
        found: Any = self.task.optimizer(parameters.get("", parameters))
        if found is None:
            found = {which: plain_optimizer(held, self.config.optimizer) for which, held in parameters.items()}
        self._optimizers = found if isinstance(found, Mapping) else {"": found}  # type: ignore[assignment]
        named = look.logical_parameters(self._models)
        self.record.start = Start(
            parameters=self._unaliased(named),
            buffers=look.parts_of(look.logical_buffers(self._models)),
            tied=self._tied(named),
            statistics=statistics_of(self._models),
            optimizers=[type(optimizer).__name__ for optimizer in self._optimizers.values()],
        )
        if self.variation.shake is not None:
            look.shake(named, self.variation.shake, self.variation.ulp or self.lowered)
        for parameter in unique(named.values()) if self.scale != 1.0 else ():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._unscale)

    def _train(self) -> None:
        dataset = self.task.dataset("train")
        fixed = self.task.coupled or bool(self.record.start.statistics)
        cut = replace(cut_step(self.config.train, Layout(), fixed=fixed), least=1 + bool(self.record.start.statistics))
        if not fixed:
            # One forward over the whole global batch; as many as the ranks make, where their number shows.
            cut = replace(cut, micro_batch=1 if self.variation.apart else None, micro_steps=self.variation.forwards)
        stream = DataStream(
            dataset,
            cut=cut,
            seed=self.config.train.seed,
            epochs=self.config.train.epochs,
            steps=self.num_steps,
            left_out=self.config.data.left_out,
        )
        schedule = make_schedule(self.config, stream)
        size = self.config.train.global_batch
        with Loader(stream, collate=self.task.collate, draws=draws(dataset)) as loader:
            train_on_one_device(
                self._models,
                self._optimizers,
                self._steps(loader),
                self._losses,
                lambda step: schedule.factor(step * size, size),
                self.config.train.max_norm,
                self._before_update,
                self._after_step,
            )

    def _steps(self, loader: Loader) -> Iterator[list[Any]]:
        for index, batch in zip(range(self.num_steps), loader, strict=False):
            loader.stream.take(batch)
            self._step = StepRecord(batch_sizes=tuple(len(m.positions) for m in batch.micro_steps))
            pairs = [(int(p), int(s)) for m in batch.micro_steps for p, s in zip(m.positions, m.samples, strict=True)]
            self._step.rows, self._step.values = rows_of_step(batch), values_of_step(batch)
            value = ledger_sum([p for p, _ in pairs], [s for _, s in pairs])
            self._step.kept = {"ledger": Part(None, ledger(f"{value:016x}"))}
            self._fed = [self._in_order(m, index) for m in batch.micro_steps]
            self.observer.feed(self._fed[0] if len(self._fed) == 1 else [], self._step.draws)
            look.seed_everything(self.variation.seed + index)
            if self.operations is not None:
                self.operations.begin()
            batches = [self._cast(m.batch) for m in batch.micro_steps]
            yield [shuffled(one, index) for one in batches] if self.variation.shuffled else batches

    def _in_order(self, micro_step: MicroStep, index: int) -> list[int]:
        """Digests of the samples of a forward in the order in which they are fed."""
        rows = rows_of_forward(micro_step)
        return in_order(rows, order_of(micro_step.batch, index) if self.variation.shuffled else None)

    @property
    def _dtype(self) -> torch.dtype:
        return torch.float64 if self.lowered is None else torch.float32

    def _cast(self, batch: Any) -> Any:
        return cast_floats(batch, self._dtype)

    def _output(self, model: nn.Module, batch: Any) -> Any:
        arguments = resolve_inputs(self.task, model, batch).call(batch)
        if self.lowered is None:
            return call(model, arguments)
        with torch.autocast("cpu", self.lowered, enabled=not self.variation.exact):
            return cast_floats(call(model, arguments), torch.float32)

    def _losses(self, models: Mapping[str, nn.Module], batches: list[Any]) -> Iterator[tuple[str, torch.Tensor, int]]:
        if has_step(self.task):
            own: Any = models.get("", models)
            for turn in zip(*(self.task.step(own, batch) for batch in batches), strict=True):
                yield turn[0][0], torch.stack([loss for _, loss, _ in turn]).sum(), sum(int(n) for _, _, n in turn)
            return
        count = resolve_targets(self.task, batches[0]).call
        losses = [self._loss(models[""], batch, rows) for batch, rows in zip(batches, self._fed, strict=True)]
        total = torch.stack(losses).sum()
        if self.scale != 1.0:
            total.register_hook(lambda gradient: gradient * self.scale)
        yield "", total, sum(count(batch) for batch in batches)

    def _loss(self, model: nn.Module, batch: Any, rows: list[int]) -> torch.Tensor:
        self.observer.begin_forward(rows)
        return self.task.loss(self._output(model, batch), batch)

    @torch.no_grad()
    def _unscale(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            parameter.grad /= self.scale

    def _before_update(self, step: int, which: str, loss: float, norm: float) -> None:
        held = {id(p) for group in self._optimizers[which].param_groups for p in group["params"]}
        self._step.loss, self._step.norm = loss if self._step.loss is None else self._step.loss, norm
        self._step.updates += 1
        for name, parameter in look.logical_parameters(self._models).items():
            if parameter.grad is not None and id(parameter) in held and name in self.record.start.parameters:
                self._step.raw[name] = look.part_of(parameter.grad)

    def _after_step(self, step: int) -> None:
        if self.operations is not None:
            self.operations.end()
        if not self.record.steps and not self.record.start.statistics:
            self.record.stateful = look.has_moved(self._models, self.record.start.buffers)
        for part in (part for module in self._models.values() for part in module.modules()):
            move: Any = getattr(part, "update_balance", None)
            if hasattr(part, "tokens_per_expert") and callable(move):
                move()
        named = look.logical_parameters(self._models)
        self._step.parameters = self._unaliased(named)
        self._step.buffers = look.parts_of(look.logical_buffers(self._models))
        every = self._optimizers.values()
        self._step.settings = [settings_of(group) for optimizer in every for group in optimizer.param_groups]
        self._follow(named)
        self.record.steps.append(self._step)

    def _follow(self, named: Mapping[str, nn.Parameter]) -> None:
        """The average of the parameters (train.ema) after this step."""
        decay = self.config.train.ema
        if decay is None:
            return
        before = self.record.steps[-1].kept if self.record.steps else None
        for name, (_, value) in self.record.start.parameters.items():
            if named[name].requires_grad:
                last = value if before is None else before[f"ema.{name}"].value
                self._step.kept[f"ema.{name}"] = Part(None, decay * last + (1 - decay) * named[name].detach())

    @torch.no_grad()
    def _evaluate(self) -> dict[str, float]:
        validation = None if has_step(self.task) else self.task.dataset("validation")
        if validation is None:
            return {}
        self.observer.feed([])  # what is dropped here is no step's
        model = self._models[""]
        for name, parameter in look.logical_parameters(model).items():
            average = self.record.steps[-1].kept.get(f"ema.{name}")
            if average is not None:
                parameter.copy_(average.value)
        model.eval()  # now: it may merge parameters
        size, seed = self.config.train.global_batch, self.config.train.seed
        batches = evaluation_batches(
            validation, batch_size=size, seed=seed, collate=self.task.collate, draws=draws(validation)
        )
        return evaluate_on_one_device(self._terms(model, m) for m in batches)

    def _terms(self, model: nn.Module, micro_step: MicroStep) -> Mapping[str, tuple[Any, Any]]:
        self.observer.begin_forward(rows_of_forward(micro_step))
        batch = self._cast(micro_step.batch)
        output = self._output(model, batch)
        loss = self.task.loss(output, batch), resolve_targets(self.task, batch).call(batch)
        return {"loss": loss, **self.task.metrics(output, batch)}

    def _unaliased(self, named: Mapping[str, nn.Parameter]) -> Parts:
        first = {id(parameter): name for name, parameter in reversed(list(named.items()))}
        return {name: look.part_of(p) for name, p in named.items() if first[id(p)] == name}

    def _tied(self, named: Mapping[str, nn.Parameter]) -> list[tuple[str, ...]]:
        groups: dict[int, list[str]] = {}
        for name, parameter in named.items():
            groups.setdefault(id(parameter), []).append(name)
        return [tuple(some) for some in groups.values() if len(some) > 1]


def plain_optimizer(parameters: list[Any], config: OptimizerConfig) -> Optimizer:
    """torch's own, as the config names it."""
    if config.name == "sgd":
        return torch.optim.SGD(parameters, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay)
    kind = torch.optim.AdamW if config.name == "adamw" else torch.optim.Adam
    betas = config.beta1, config.beta2
    return kind(parameters, lr=config.lr, betas=betas, eps=config.eps, weight_decay=config.weight_decay)
