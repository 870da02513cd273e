"""The modules of a world: the one that is trained, and frozen ones beside it."""

import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, final

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from allranks.data.micro_step import StepBatch
from allranks.data.stream import DataStream
from allranks.errors import ConfigError, LayoutError, TaskError
from allranks.layout import Layout
from allranks.parallel.batchnorm import has_batch_statistics
from allranks.parallel.spread import Spread
from allranks.stepping.evaluation_mode import evaluation_mode
from allranks.stepping.guards import LearntBuffers
from allranks.stepping.last_step import cut_short_step
from allranks.stepping.passes import buffers_kept
from allranks.stepping.world import Processes
from allranks.training.own.last_step import FirstStep
from allranks.training.own.starts import Start, Whole


def needs_run(layout: Layout) -> bool:
    """Whether forward and backward are no longer one call of the model and one of its loss."""
    return layout.pp > 1 or layout.cp > 1


@final
class OwnModels:
    """What `world.parallelize` has spread so far.

    Attributes:
        sequence_dims: entry of a batch -> the dim of its positions, where cp does not find it.
        starts: models that are cut and have not been compared yet, as they were.
        is_evaluating: whether an evaluation is at work.
    """

    def __init__(self) -> None:
        self.sequence_dims: Mapping[str, int] = {}
        self.starts: dict[Spread, Start] = {}
        self.is_evaluating = self._is_driven = self._is_last = False
        self._trained: Spread | None = None
        self._frozen: list[Spread] = []
        self._learnt: list[LearntBuffers] = []  # of the first of them
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._was_called = False
        self._first_step: FirstStep | None = None  # until it is made, where it has something to tell

    def check_new(self, module: nn.Module, layout: Layout) -> None:
        """Refuse a module that is no bare, new one, or a second one to train. Raises TaskError, LayoutError."""
        name = type(module).__name__
        if not isinstance(module, nn.Module):
            raise TaskError(f"world.parallelize({name}): expected an nn.Module")
        if any(member in self._known for member in module.modules()):
            raise TaskError(
                f"world.parallelize({name}): it, or a part of it, is spread already: call it once, on the whole model"
            )
        if any(isinstance(member, DistributedDataParallel | FSDPModule) for member in module.modules()):
            raise TaskError(f"world.parallelize({name}): DDP or FSDP is around it already: pass the bare module")
        if any(parameter.is_meta for parameter in module.parameters()):
            raise TaskError(f"world.parallelize({name}): it has parameters on the meta device, without values")
        if self._trained is not None and any(parameter.requires_grad for parameter in module.parameters()):
            raise TaskError(
                f"world.parallelize({name}): this world trains {type(self._trained.bare()).__name__} already: put both "
                "into one nn.Module, or freeze this one first; several optimizers in turn need a Task with a `step`"
            )

        if needs_run(layout) and self.all():
            raise LayoutError(
                f"world.parallelize({name}): layout {layout} spreads one model, and there is one already: put both "
                "into one nn.Module"
            )

    def add(self, spread: Spread, whole: Whole | None = None) -> nn.Module:
        """Keep a spread module; returns what is to be called. `whole`: rank 0's copy, where it is to be compared."""
        called = spread.modules[""]
        if needs_run(spread.mesh.layout):
            called.register_forward_pre_hook(self._check_driven, prepend=True)
        if whole is not None:
            self.starts[spread] = Start.of(spread, whole)
        self._known.update(called.modules())
        if not spread.trainable():
            self._frozen.append(spread)
            return called
        self._trained = spread
        if isinstance(called, DistributedDataParallel):
            called.register_forward_pre_hook(self._note_call)
        return called

    @property
    def trained(self) -> Spread:
        """The one that is trained. Raises TaskError where there is none yet."""
        if self._trained is None:
            raise TaskError("no model to train: call world.parallelize(model) before the loop")
        return self._trained

    def of(self, model: nn.Module) -> Spread:
        """The trained Spread, which `model` has to be. Raises TaskError for any other."""
        if self._trained is None or self._trained.modules[""] is not model:
            raise TaskError(
                f"{type(model).__name__} is not the model of this world: pass what world.parallelize(model) returned"
            )
        return self._trained

    def all(self) -> tuple[Spread, ...]:
        """Every Spread."""
        return (*(() if self._trained is None else (self._trained,)), *self._frozen)

    @property
    def backward_call(self) -> str:
        """The call that makes the backward of a batch."""
        return "world.run(batch, loss)" if needs_run(self.trained.mesh.layout) else "world.backward(loss, targets=)"

    def check_whole_forward(self) -> None:
        """Refuse a backward of the user's where no process has all of a forward. Raises TaskError."""
        if needs_run(self.trained.mesh.layout):
            raise TaskError(
                f"world.backward(): layout {self.trained.mesh.layout} spreads forward and backward over several "
                "processes: use world.run(batch, loss), which makes both"
            )

    @contextmanager
    def driving(self) -> Iterator[None]:
        """Inside, forwards are the world's own."""
        before, self._is_driven = self._is_driven, True
        try:
            yield
        finally:
            self._is_driven = before

    def begin_forward(self, last: bool) -> None:
        """A micro-batch goes out, the step's last or not; from here on `check_called` wants a new forward."""
        self._was_called, self._is_last = False, last
        self.trained.synchronise(last)

    def go_on(self) -> None:
        """After a forward and backward that count as none: what was said of the micro-batch that is out holds again."""
        if self._trained is not None:
            self._trained.synchronise(self._is_last)

    def check_called(self) -> None:
        """Refuse a loss that was computed past DDP: nobody would reduce its gradients. Raises TaskError."""
        if isinstance(self.trained.modules[""], DistributedDataParallel) and not self._was_called:
            raise TaskError(
                "this loss was computed without calling the model that world.parallelize returned, so its gradients "
                "would stay on this rank: use `model = world.parallelize(model)`"
            )

    def check_cut(self, micro_batch: int | None) -> None:
        """Refuse to cut by `micro_batch` what depends on which samples share a forward (law 2). Raises ConfigError."""
        if micro_batch is not None and any(has_batch_statistics(spread.modules) for spread in self.all()):
            raise ConfigError(
                f"world.stream(micro_batch={micro_batch}): BatchNorm looks at which samples share a forward, "
                "so the number of forwards has to be fixed: give micro_steps instead"
            )

    def fit_last_step(self, order: DataStream, processes: Processes) -> None:
        """Cut a short last step of `order` so that BatchNorm can do it; the first step tells whether it cannot."""
        short = cut_short_step(order, self.all())
        if short is None or order.position:  # where a run goes on its first step has told nothing
            self._first_step = None
        else:
            self._first_step = FirstStep(short, self.all(), processes, lambda: self.is_evaluating)

    @contextmanager
    def counting(self, counts: bool) -> Iterator[None]:
        """Inside, whether this rank's rows are part of synchronised batch statistics."""
        with ExitStack() as entered:
            for spread in self.all():
                entered.enter_context(spread.batch_norms.counting(counts))
            yield

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Every module in evaluation mode inside; afterwards modes and buffers as before, and nothing left gathered."""
        self.is_evaluating = True
        try:
            with ExitStack() as kept:
                kept.enter_context(evaluation_mode(one for spread in self.all() for one in spread.modules.values()))
                for spread in self.all():
                    kept.enter_context(buffers_kept(spread, unless=False))
                    spread.batch_norms.average()
                yield
        finally:
            self.is_evaluating = False

    def watching(self) -> AbstractContextManager[None]:
        """Inside, the forwards of a step tell what there is to know of them."""
        return nullcontext() if self._first_step is None else self._first_step.watching()

    def begin_step(self, batch: StepBatch) -> None:
        """A step begins: remember what forwards of frozen modules change in it; the trained one has a StepGuard."""
        if self._first_step is not None:
            self._first_step.begin(batch)
        self._learnt += [LearntBuffers(spread) for spread in self._frozen[len(self._learnt) :]]
        for learnt in self._learnt:
            learnt.keep()

    def check_backward(self) -> None:
        """The step's last backward is done: refuse what must not be updated by; collective in a loop's first step.

        Raises:
            ConfigError, TaskError: on every rank.
        """
        self.trained.check_reduced()
        if self._first_step is not None:
            self._first_step.finish()
            self._first_step = None

    def put_back_learnt(self, skipped: torch.Tensor | None) -> None:
        """That again, where `skipped` is 1.0. None: it is not."""
        if skipped is not None:
            for learnt in self._learnt:
                learnt.put_back(skipped)

    def abandon_learnt(self) -> None:
        """That again, after a step that was not made; the next one looks anew which buffers a step changes."""
        self.put_back_learnt(torch.ones(()))
        self._learnt.clear()

    def reshard(self) -> None:
        """Drop what forwards without a backward left gathered: the next ones must see the updated parameters."""
        for spread in self.all():
            if spread.mesh.layout.fully_sharded:
                spread.reshard()

    def _note_call(self, *_: Any) -> None:
        self._was_called = True

    def _check_driven(self, *_: Any) -> None:
        if not self._is_driven:
            raise TaskError(
                f"the model was called under layout {self.trained.mesh.layout}, where no process has all of a forward: "
                "use world.run(batch, loss), and world.evaluate(dataset, metrics=...)"
            )
