"""What `allranks.join` returns: this process among the others, and the calls of a loop of one's own."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import default_collate

from allranks.errors import ConfigError, TaskError
from allranks.hints import TensorStyle
from allranks.stepping.ema import Ema
from allranks.stepping.session import make_agreement
from allranks.training.own.averaging import add_average
from allranks.training.own.driven import Driven, Metrics
from allranks.training.own.evaluate import Measure, choose_measure, evaluate_own
from allranks.training.own.forward import Loss, Targets
from allranks.training.own.ground import JOINED, Ground
from allranks.training.own.loop import OwnLoop, end
from allranks.training.own.optimizer import OwnOptimizers
from allranks.training.own.state import Kept, OwnState
from allranks.training.own.step import OwnStep
from allranks.training.own.stream import Stream, make_loop
from allranks.training.own.team import Team, make_team
from allranks.training.own.watch import OwnWatch
from allranks.training.snapshot import Contents
from allranks.verdict import Decision


@final
class World:
    """This process among the others, and what an own loop asks of them. Made by `join`; leaving its `with` ends it.

    A call that is "collective" has to be made by all processes, in the same order.

    Attributes:
        rank, local_rank, size: this process's number in the world and on its host; the number of processes.
        device: where this process computes.
    """

    def __init__(self, ground: Ground) -> None:
        processes = ground.processes
        self.rank, self.local_rank, self.size = processes.rank, processes.environment.local_rank, processes.size
        self.device = ground.device
        self._ground = ground
        self._driven = Driven(ground.models, self._decide)
        self._watch = OwnWatch(ground.config.guard, processes)
        self._step = OwnStep(ground, self._driven, make_agreement(processes), self._watch)
        self._optimizers = OwnOptimizers(self._watch, self._decide)
        self._loop: OwnLoop | None = None

    def __enter__(self) -> "World":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(error)

    def __repr__(self) -> str:
        return f"<World rank {self.rank} of {self.size} on {self.device}, layout {self._ground.processes.mesh.layout}>"

    @property
    def weight(self) -> int:
        """1, or 0 while the batch that is out only fills this rank's place: for your own sums over samples."""
        return self._step.weight

    @property
    def directory(self) -> Path | None:
        """The Run directory, once there is one: from `resume` or the first batch on."""
        logbook = None if self._loop is None else self._loop.logbook
        return None if logbook is None else logbook.run.path

    def parallelize(
        self,
        module: nn.Module,
        *,
        blocks: Sequence[str] = (),
        tensor: Mapping[str, TensorStyle] | None = None,
        optional: Sequence[str] = (),
        find_unused: bool = False,
        split_before: Sequence[str] = (),
        sequence_dims: Mapping[str, int] = MappingProxyType({}),
    ) -> nn.Module:
        """Spread `module` by the layout, and return what to call; rank 0's values, streamed to all; collective.

        One module with trainable parameters, and any number of frozen ones. A sharded layout works in place; under ddp
        what is returned is DistributedDataParallel, with the module as its `.module`. Under pp and cp `run` calls it.

        Args:
            blocks: names of repeated blocks (globs), where they are not found by structure.
            tensor: module (glob) -> how tp cuts it, as in `Hints.tensor`, where it is not found either.
            optional: modules (globs) that a forward may leave out on some ranks; they get zero gradients then.
            find_unused: whether a backward may leave other trainable parameters without a gradient.
            split_before, sequence_dims: as in `Hints`: where pp may cut it, and which entries of a batch cp cuts.

        Raises:
            TaskError: it is spread already, is a second one to train, or is not the same on every rank.
            LayoutError: it cannot be spread in this way.
        """
        hints: dict[str, Any] = {"blocks": blocks, "tensor": tensor or {}, "split_before": split_before}
        hints |= {"optional": optional, "find_unused": find_unused}
        return self._ground.spread(module, self._step.links, sequence_dims=sequence_dims, **hints)

    def optimizer(self, model: nn.Module, kind: Callable[..., Optimizer], **settings: Any) -> Optimizer:
        """`kind(parameters, **settings)` over the model's trainable parameters, as they are spread; fused if possible.

        Raises:
            TaskError: not this world's model, or not an optimizer of exactly these parameters.
        """
        return self._optimizers.make(self._ground.models.of(model), kind, settings)

    def ema(self, model: nn.Module, decay: float) -> Ema:
        """An average of the parameters that follows each `step`, and that `resume` keeps: make it before.

        `with average.in_place():` gives the model these values, for `evaluate`; after it come its own again. Raises
        TaskError, ConfigError: not this world's model; there is one already; no decay between 0 and 1.
        """
        return add_average(self._ground.models.of(model), decay, self._step.beside, self._step.links)

    def stream(
        self,
        dataset: Any,
        *,
        global_batch: int,
        micro_batch: int | None = None,
        micro_steps: int | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        seed: int | None = None,
        shuffle: bool = True,
        workers: int = 0,
        collate: Callable[[list[Any]], Any] = default_collate,
    ) -> Stream:
        """This rank's micro-batches, on its device, in the order of law 2.

        Args:
            dataset: map-style, or iterable with a declared `order`.
            global_batch: samples per optimizer step over the whole world.
            micro_batch: samples per forward; None: this rank's whole share at once.
            micro_steps: forwards per step instead, for batch statistics or a loss that couples samples.
            epochs, steps: the end, counted from the first start of the run; neither: one epoch.
            seed: of order and randomness; None: join's.
            workers: processes that load.

        Raises:
            TaskError: there is a stream already. DataError, LayoutError, ConfigError: the dataset or the numbers.
        """
        if self._loop is not None:
            raise TaskError("world.stream() was called already: a world has one (world.evaluate takes a dataset)")
        cut = {"global_batch": global_batch, "micro_batch": micro_batch, "micro_steps": micro_steps}
        numbers = cut | {"epochs": epochs, "steps": steps, "seed": seed}
        loading: dict[str, Any] = {"collate": collate, "shuffle": shuffle, "workers": workers}
        self._loop = make_loop(self._ground, self._step, dataset, numbers, **loading)
        self._watch.begin(self._step, self._loop)
        return Stream(self._loop)

    def resume(self, model: nn.Module, optimizer: Optimizer, stream: Stream, **others: Kept) -> int:
        """Name what is kept, and take it from the run's newest good checkpoint, if there is one; collective.

        From here on a checkpoint is written by `save`, at the end of the stream, and where a stop was agreed.

        Args:
            others: objects with `state_dict` and `load_state_dict` of JSON values, such as `scheduler=scheduler`.

        Returns:
            The step at which it stands; 0 for a new run.

        Raises:
            TaskError: one of the three is not this world's, or it is too late. CheckpointError: it does not fit.
            RunError: the Run directory refuses.
        """
        loop = self._need_loop("world.resume()")
        spread, optimizers = self._ground.models.of(model), self._optimizers.find(optimizer)
        if not isinstance(stream, Stream) or not stream.belongs_to(loop):  # type: ignore[redundant-expr]
            raise TaskError("world.resume(): pass the stream that world.stream(...) returned")
        state = OwnState(spread, optimizers.by_name[""], others, loop.say)
        outer, beside = self._step.links.outer, self._step.beside
        return loop.resume(Contents(spread, optimizers, loop.order, extra={}, task=state, outer=outer, beside=beside))

    def backward(self, loss: torch.Tensor, targets: int) -> None:
        """Accumulate the gradients of `loss`, a SUM over `targets` targets; the step's last batch reduces; collective.

        Raises:
            TaskError: no batch is out, or it had its backward; the loss is not one number with a gradient.
        """
        self._step.backward(loss, targets)

    def step(self, optimizer: Optimizer, max_norm: float | None = None) -> bool:
        """On the step's last batch: agree the count of targets, divide once, clip, update; whether it did; collective.

        Raises:
            TaskError: not this world's optimizer, or this batch had no backward. GuardError: a sentinel ends the run.
        """
        loop = self._need_loop("world.step()")
        if max_norm is not None and not max_norm > 0:
            raise ConfigError(f"world.step(max_norm={max_norm}): expected a norm above 0, or None for no clipping")
        made = self._optimizers.find(optimizer)
        finished = self._step.step(made, max_norm)
        if finished is not None:
            loop.finished(finished)
            self._watch.finish_step(made, finished.number)
        return finished is not None

    def save(self, every: int = 1) -> Path | None:
        """Write a checkpoint after every `every`-th step; its path where that was now; collective.

        Raises:
            TaskError: `resume` has not named what is kept. CheckpointError: it cannot be written.
        """
        return self._need_loop("world.save()").save(every)

    def log(self, **values: float | torch.Tensor) -> None:
        """Rank 0's numbers, into this step's line of the journal and TensorBoard; what stands there anyway is left out.

        The loss does (the world's, per target), the learning rate and the gradient norm. After the loop: an evaluation.
        """
        self._need_loop("world.log()").log(values)

    def run(self, batch: Any, loss: Loss, *, targets: Targets = None) -> torch.Tensor:
        """Forward, `loss(output, batch)` and backward in one call, under every layout; this rank's loss; collective.

        Forward's arguments are found as for a Task. Under pp a step's batches pass together when its last one is here;
        until then their losses are nan. Before the first update of a model that is cut (tp, pp, cp, ep) it is
        compared with the whole one, of which rank 0 keeps a copy until then; under tp and ep any first call is.

        Args:
            loss: a SUM over the targets of the batch that it is given: under cp this rank's positions of it.
            targets: of the whole batch: a number, or a function of the batch; None: found as for a Task.

        Raises:
            TaskError: no batch is out, it had its backward, or it is not what is needed.
            LayoutError: it cannot be cut, or the cut model does not compute what the whole one does.
        """
        return self._step.run(batch, loss, targets)

    def evaluate(
        self,
        dataset: Any,
        measure: Measure | None = None,
        *,
        metrics: Metrics | None = None,
        batch: int,
        micro_batch: int | None = None,
        workers: int = 0,
        collate: Callable[[list[Any]], Any] = default_collate,
    ) -> dict[str, float]:
        """{name: the world's sum / count} over all of `dataset`, each once, in evaluation mode; recorded; collective.

        Args:
            measure: batch -> {name: (sum, count)}; called without gradients.
            metrics: instead, (output, batch) -> the same, under every layout: the world makes the forward.
            batch: samples at a time over the whole world; `micro_batch` in a forward.
        """
        started = time.perf_counter()
        loading = {"batch_size": batch, "micro_batch": micro_batch, "workers": workers, "collate": collate}
        chosen = choose_measure(measure, metrics, self._driven, self._ground.processes.mesh.layout)
        found = evaluate_own(self._ground, self._step, dataset, chosen, **loading)
        if self._loop is not None:
            self._loop.evaluated(found, time.perf_counter() - started)
        return found

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows of all data-parallel ranks, in their order, with gradients, a filler's own last; collective."""
        return self._step.links.rows("gather", self._ground.processes.data_group, self.weight).gather(rows)

    def offset(self, rows: torch.Tensor) -> int:
        """The number of rows before this rank's in `gather(rows)`; collective."""
        return self._step.links.rows("offset", self._ground.processes.data_group, self.weight).offset(rows)

    def group(self, axis: str) -> dist.ProcessGroup:
        """The process group of this rank along an axis of the layout. LayoutError where the layout has no such axis."""
        return self._ground.processes.mesh.group(axis)

    def team(self, ranks: Sequence[int]) -> Team:
        """A group of ranks; called by all ranks, members or not, in the same order; collective. LayoutError if not."""
        return make_team(ranks, self._ground.processes)

    def close(self, error: BaseException | None = None) -> None:
        """Leave the world, as the end of its `with` does; collective where there was no `error`.

        Raises:
            SystemExit: 130 or 75, where a stop was agreed (Ctrl-C, SIGTERM).
        """
        if self in JOINED:
            end(self._loop, self._ground, error, lambda: JOINED.remove(self))

    def _decide(self, decision: Decision) -> None:
        if self._loop is None or not self._loop.decide(decision):
            self._ground.decisions.append(decision)

    def _need_loop(self, call: str) -> OwnLoop:
        if self._loop is None:
            raise TaskError(f"{call} before world.stream(...): it belongs into the loop over a stream")
        return self._loop
