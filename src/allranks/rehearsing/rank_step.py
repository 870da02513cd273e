"""One rank's step: the Task's model, spread as training spreads it, and the very Step that training runs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, final

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from allranks.config import Config
from allranks.data.loader import Loader
from allranks.data.micro_step import StepBatch
from allranks.data.stream import declared_order, draws
from allranks.errors import DataError
from allranks.layout import Layout
from allranks.observing.counters import Stopwatch
from allranks.parallel.backend import DeviceChoice
from allranks.parallel.batchnorm import has_batch_statistics
from allranks.parallel.mesh import build_mesh
from allranks.parallel.replica_twin import ReplicaTwin
from allranks.parallel.spread import Spread
from allranks.parallel.stage_transport import signature_of
from allranks.process_environment import ProcessEnvironment
from allranks.profiling.fakes import build_fake, make_fake
from allranks.rehearsing.host_memory import mark_waiting
from allranks.rehearsing.ledger import Ledger
from allranks.rehearsing.replay import GIVEN
from allranks.rehearsing.shallow import run_empty
from allranks.stepping.alternating import AlternatingPasses
from allranks.stepping.ema import Ema
from allranks.stepping.fed import fed
from allranks.stepping.guards import StepGuard
from allranks.stepping.optimizer import Optimizers, build_optimizers
from allranks.stepping.outer import make_outer
from allranks.stepping.passes import Forward, Passes, Scale, StepSums, micro_forward
from allranks.stepping.scaler import Scaler
from allranks.stepping.session import make_agreement, make_passes, make_schedule, open_stream, spread_task
from allranks.stepping.spikes import make_judge
from allranks.stepping.start_check import Meeting, check_coupling, check_step
from allranks.stepping.step import Step
from allranks.stepping.world import Processes
from allranks.task import Task, has_step, resolve_inputs, resolve_targets
from allranks.verdict import Decision


@final
@dataclass
class RankStep:
    """What a rank needs for its steps.

    Attributes:
        batch: of the first step, on tensors without memory.
        ledger: where memory is written down.
    """

    spread: Spread
    step: Step
    optimizers: Optimizers
    processes: Processes
    batch: StepBatch
    passes: "WatchedPasses"
    forward: Forward
    decisions: tuple[Decision, ...]

    def run(self) -> None:
        """One optimizer step; the agreement before it is made, too, where there is none."""
        self._run(self.batch)

    def warm_up(self) -> None:
        """A step of the first micro-step alone, for the state that a step leaves; for micro-steps that are all alike.

        A pipeline's schedule for a whole step runs once behind it, on nothing: it keeps what its stages receive into.
        """
        self._run(replace(self.batch, micro_steps=self.batch.micro_steps[:1]))
        if self.spread.stages is not None:
            run_empty(self.spread.stages, len(self.batch.micro_steps))

    def walk(self) -> None:
        """One forward of each kind of micro-step through all stages of a pipeline, which have to be of this rank."""
        stages = self.spread.stages
        assert stages is not None
        for one in self.batch.micro_steps:
            placed = self.forward.place(one.batch)
            if not stages.scheduler.is_known(signature_of(self.forward.inputs(placed), self.spread.bare())):
                with fed(one), micro_forward(self.spread, one.weight):
                    self.forward(placed)

    def _run(self, batch: StepBatch) -> None:
        before = self.step.agree_first(batch)
        self.step.run(batch, before, lambda: self.batch)


@final
class WatchedPasses(Passes):
    """The passes of training, with a note where they end.

    Args:
        optimizers: where a step has several losses, each is of one of them, and updates its parameters alone.

    Attributes:
        absent: ids of parameters whose blocks are left out: they get a gradient afterwards.
        unreached: names of those that no loss of the last step has updated, though their blocks ran.
        ended: whether the last backward is done: what runs now is the update.
    """

    def __init__(self, passes: Passes, spread: Spread, ledger: Ledger, optimizers: Optimizers) -> None:
        self._passes, self._spread, self._ledger, self._optimizers = passes, spread, ledger, optimizers
        self.absent: set[int] = set()
        self.recording = self.ended = False
        self.reset: Callable[[], None] = lambda: None
        self.unreached: list[str] = []
        if spread.experts is not None:
            self._give_before(spread.experts)

    def run(self, batch: StepBatch, scale: Scale) -> Iterator[StepSums]:
        self.reset()
        waiting = self._spread.trainable()
        for sums in self._passes.run(batch, scale):
            self.mark()
            self._note(GIVEN)
            self._give()
            self.mark()
            due = set(map(id, self._optimizers.parameters(sums.which)))
            waiting = {name: p for name, p in waiting.items() if p.grad is None or id(p) not in due}
            self.unreached = list(waiting)
            self._note("update")
            self.ended = True
            yield sums
            self.ended = False
            if isinstance(self._passes, AlternatingPasses):
                self._note("step()")  # between two losses the Task's own code runs
        self._note("update")

    def _give_before(self, experts: Any) -> None:
        """Cut experts whose blocks are left out get theirs before the reduction: that makes one of zeros where none is,
        which would lie beside the one that they have on paper.
        """
        reduce = experts.reduce

        def give_and_reduce(*among: Any) -> None:
            if self.recording:
                going_on = self._ledger.stretches[-1]
                self._note(GIVEN)
                self._give()
                self.mark()
                self._ledger.begin(going_on.phase, "", going_on.micro_step)
            else:
                self._give()
            reduce(*among)

        experts.reduce = give_and_reduce

    def _note(self, phase: str) -> None:
        if self.recording:
            self._ledger.begin(phase)

    def _give(self) -> None:
        twins = [module for module in self._spread.modules.values() if isinstance(module, ReplicaTwin)]
        for parameter in self._spread.trainable().values():
            if parameter.grad is not None or id(parameter) not in self.absent:
                continue
            if not any(twin.lend(parameter) for twin in twins):
                with self._ledger.making(self._ledger.find(local(parameter)).memory):
                    parameter.grad = torch.empty_like(parameter)

    def mark(self) -> None:
        """Say which memory is gradients now: DDP's buckets take the place of what earlier micro-steps have summed."""
        trained = self._spread.trainable().items()
        made = ((local(p.grad), name.rpartition(".")[0]) for name, p in trained if p.grad is not None)
        self._ledger.mark_parts(made, "gradients")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that lies here."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def mark_state(told: RankStep, ledger: Ledger) -> None:
    """Say what is weights, optimizer state, the batch, and what the guard keeps."""
    spread = told.spread
    for leaf in pytree.tree_leaves([one.batch for one in told.batch.micro_steps]):
        if isinstance(leaf, torch.Tensor) and not leaf.is_meta:
            ledger.mark(leaf, "other", "the batch")
    for name, tensor in spread.tensors.items():
        if not tensor.is_meta:
            ledger.mark(local(tensor.detach()), "weights", name.rpartition(".")[0])
    for module in spread.modules.values():
        for buffer in module.buffers():
            if not buffer.is_meta:
                ledger.mark(buffer, "weights")
    for kept in () if told.step.guard is None else told.step.guard.held:
        ledger.mark(kept, "other", "the guard")
    for optimizer in told.optimizers.by_name.values():
        names = {id(tensor): name for name, tensor in spread.updatable().items()}
        for parameter, state in optimizer.state.items():
            memory = ledger.find(local(parameter.detach())).heirs
            for value in pytree.tree_leaves(dict(state)):
                if isinstance(value, torch.Tensor):
                    ledger.mark(local(value), "optimizer", names.get(id(parameter), "").rpartition(".")[0])
                    ledger.move(local(value), memory)


def environment_of(rank: int, size: int, per_node: int) -> ProcessEnvironment:
    """Process `rank` of `size`, as a launch with `per_node` of them on a host has it."""
    return ProcessEnvironment(
        "none",
        rank=rank,
        local_rank=rank % per_node,
        world_size=size,
        local_world_size=min(per_node, size),
        node_rank=rank // per_node,
        num_nodes=-(-size // per_node),
    )


def processes_of(rank: int, layout: Layout, backend: str, per_node: int) -> Processes:
    """Process `rank` among the others, in the fake world that runs."""
    environment = environment_of(rank, layout.world_size, per_node)
    choice = DeviceChoice(torch.device("cpu"), backend, None, ())
    agreement = None if layout.world_size == 1 else dist.new_group()
    return Processes(environment, choice, build_mesh(layout, "cpu"), agreement, None)


def assemble_rank(task: Task, config: Config, processes: Processes, ledger: Ledger, mode: Any) -> RankStep:
    """As `stepping.session.assemble`, without what looks at values.

    That is what examines the first samples, and the sentinels (`watch`): in a step they make no tensor and send
    nothing, and whether the generators, the samples and the rates are right is nothing to a dry run. On a GPU the
    guard's judgement stays there: a few numbers, and behind the update one learnt buffer more at a time.
    """
    dataset = task.dataset("train")
    declared_order(dataset)
    built, decisions = build_fake(task.model, mode)
    with mode:
        spread = spread_task(task, config, processes, dataset, lambda: built)
        optimizers = build_optimizers(spread, config.optimizer, task.optimizer)
        check_step(task, spread)
        fixed = task.coupled or has_batch_statistics(spread.modules)
    stream = open_stream(dataset, config, processes, fixed=fixed)
    batch, forward = _first_batch(task, spread, stream, mode, has_step(task))
    # Whether the loss couples samples, and gathers, takes the values of some: here the Task is taken at its word.
    check_coupling(task, Meeting(task.coupled, task.coupled, forward, None, ()), processes.mesh.layout)
    with mode:
        outer = make_outer(spread, order=declared_order(dataset))
        ema = None if config.train.ema is None else Ema(spread, config.train.ema)
        scaler = Scaler(processes.device, processes.world_group) if spread.precision.scales else None
        passes = WatchedPasses(make_passes(task, forward, optimizers, processes), spread, ledger, optimizers)
        guard = StepGuard(spread, make_judge(task, config, processes))
        step = Step(
            spread,
            passes,
            optimizers,
            make_schedule(config, stream),
            make_agreement(processes),
            max_norm=config.train.max_norm,
            stop_requested=lambda: (False, False),
            stopwatch=Stopwatch(),
            outer=outer,
            ema=ema,
            scaler=scaler,
            guard=guard,
        )
    mark_waiting(spread, ledger)
    if ema is not None:
        _mark_averages(spread, ema, ledger)
    decisions += spread.decisions + optimizers.decisions
    return RankStep(spread, step, optimizers, processes, batch, passes, forward, decisions)


def _mark_averages(spread: Spread, ema: Ema, ledger: Ledger) -> None:
    for parameter, (_, average) in zip(spread.updatable().values(), ema.parts(), strict=True):
        with ledger.making(ledger.find(local(parameter.detach())).heirs):
            ledger.mark(local(average), "other", "the average of the parameters")


def _first_batch(task: Task, spread: Spread, stream: Any, mode: Any, own_step: bool) -> tuple[StepBatch, Forward]:
    """The first step's batches, loaded as training loads them, and what forward gets of them."""
    loader = Loader(stream, collate=task.collate, draws=draws(stream.dataset))
    real: StepBatch | None = next(loader, None)
    loader.close()
    if real is None:
        raise DataError(f"{type(task).__name__}.dataset('train') gives no batch to rehearse a step with")
    sample = real.micro_steps[0].batch
    micro_steps = tuple(replace(one, batch=make_fake(mode, one.batch)) for one in real.micro_steps)
    if own_step:
        forward = Forward(task, spread, lambda batch: (batch,))
        return replace(real, micro_steps=micro_steps), forward
    inputs, targets = resolve_inputs(task, spread.bare(), sample), resolve_targets(task, sample)
    counted = [targets.call(one.batch) if one.weight else 0 for one in real.micro_steps]
    micro_steps = tuple(replace(one, targets=n) for one, n in zip(micro_steps, counted, strict=True))
    if spread.context is not None:
        spread.context.meet(sample, inputs.call(sample), task.hints().sequence_dims)
    return replace(real, micro_steps=micro_steps), Forward(task, spread, inputs.call)
