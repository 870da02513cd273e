"""Forward and backward of one optimizer step, micro-step by micro-step.

`Passes.run` yields once for every optimizer that is due: gradients are then summed over the micro-steps and the
data-parallel ranks, and what follows (agree, clip, update) does not know how they were made.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch

from allranks import fault_points
from allranks.data.micro_step import MicroStep, StepBatch
from allranks.data.random_keys import generators_kept, seed_all
from allranks.digest import ledger_sum
from allranks.parallel.gather import RanksRows
from allranks.parallel.module_state import changed_attributes, put_attributes
from allranks.parallel.replicate import REPLICAS
from allranks.parallel.spread import Spread
from allranks.parallel.stage_run import Payload
from allranks.parallel.stage_transport import signature_of
from allranks.stepping.fed import fed
from allranks.task import Task
from allranks.task_world import rows_of

Scale = float | torch.Tensor
Arguments = tuple[object, ...] | Mapping[str, object]

# Up to two ranks a sum has one order; from three on it depends on DDP's buckets.
RANKS_WITH_ONE_ORDER = 2


@dataclass(frozen=True, slots=True)
class StepSums:
    """What one round of passes leaves behind, besides gradients.

    Attributes:
        which: the optimizer that is due ("" for a single one).
        loss: this rank's sum of losses over real samples, float64, 0-dim, on the device.
        targets: the world's targets where they were counted in the step itself (the gradients are then not yet
            divided), else None.
        ledger: this rank's 64-bit sum of hash(position, sample) over what it fed; 0 in all rounds but the first.
        expected: by what losses were divided before they were scaled, where the targets were not known yet; None: by
            the targets, or by nothing.
    """

    which: str
    loss: torch.Tensor
    targets: torch.Tensor | None
    ledger: int
    expected: torch.Tensor | None = None


class Passes(ABC):
    """The abstract pass over a step."""

    @abstractmethod
    def run(self, batch: StepBatch, scale: Scale) -> Iterator[StepSums]:
        """Run every micro-step of `batch`; `scale` multiplies each loss before its backward (law 3)."""


def call_with(module: Callable[..., object], arguments: Arguments) -> object:
    """What `module` gives for forward's arguments."""
    return module(**arguments) if isinstance(arguments, Mapping) else module(*arguments)


@dataclass(frozen=True)
class Forward:
    """The user's forward and loss under the run's precision, on the run's device.

    Attributes:
        inputs: batch -> forward's arguments, as `resolve_inputs` found them.
        call: (module, arguments) -> its output; another one only to look at what a module computes.
    """

    task: Task
    spread: Spread
    inputs: Callable[[object], Arguments]
    call: Callable[[Callable[..., object], Arguments], object] = call_with

    def place(self, batch: object) -> object:
        """The batch's tensors on the device (float64 where that is the precision), sequences cut as the layout says."""
        batch = self.on_device(batch)
        return batch if self.spread.context is None else self.spread.context.cut(batch)

    def on_device(self, batch: object) -> object:
        """The same, with sequences whole."""
        return self.spread.precision.place(batch, self.spread.device)

    def autocast(self) -> AbstractContextManager[object]:
        """The context of the user's forward."""
        return self.spread.precision.autocast(self.spread.device.type)

    def __call__(self, batch: object) -> object:
        """The single module's output for a placed batch, in at least float32."""
        return self.spread.precision.cast_output(self.raw(batch, self.spread.modules[""]))

    def raw(self, batch: object, module: Callable[..., object]) -> object:
        """The same of `module`, as it comes; None where another stage of a pipeline has it; collective along pp."""
        if self.spread.stages is not None:
            return self._through_stages(batch)
        arguments = self.inputs(batch)
        with self.autocast():
            return self.call(module, arguments)

    def run_stage(self, batch: object, stage: int, received: Payload) -> Any:
        """What a stage of a pipeline sends on, or the last one's output in at least float32."""
        assert self.spread.stages is not None
        pipeline = self.spread.stages.pipeline
        with self.autocast():
            output = pipeline.run(stage, self.inputs(batch), received)
        return self.spread.precision.cast_output(output) if stage == pipeline.last else output

    def _through_stages(self, batch: object) -> object:
        stages, found = self.spread.stages, list[object]()
        assert stages is not None

        def compute(index: int, stage: int, received: Payload) -> Payload:
            # The forwards of two stages of this rank begin at the same random number, as those of other ranks do.
            with generators_kept() if len(stages.pipeline.stages) > 1 else nullcontext():
                output = self.run_stage(batch, stage, received)
            if stage < stages.pipeline.last:
                sent: Payload = output
                return sent
            found.append(output)
            return ()

        with generators_kept():  # inputs may draw how long they are, and draws it again in the forward
            signature = signature_of(self.inputs(batch), self.spread.bare())
        stages.scheduler.forward([signature], compute)
        return found[0] if found else None


class PlainPasses(Passes):
    """One forward and one loss a micro-step."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._spread = forward.spread
        self._settled = not _must_settle(forward.spread)

    def run(self, batch: StepBatch, scale: Scale) -> Iterator[StepSums]:
        if not self._settled:
            self._settle(batch.micro_steps[0])
        total: torch.Tensor | None = None
        last = len(batch.micro_steps) - 1
        with nullcontext() if self._spread.hook is None else self._spread.hook.within(batch.step):
            for index, micro_step in enumerate(batch.micro_steps):
                self._spread.synchronise(index == last)
                loss = self._backward(micro_step, scale)
                total = loss if total is None else total + loss
        self._spread.check_reduced()
        self._spread.reduce_scalars()
        assert total is not None
        yield StepSums("", total, None, ledger_of(batch))

    def _backward(self, micro_step: MicroStep, scale: Scale) -> torch.Tensor:
        fault_points.reach("forward")
        seed_all(micro_step.random_key)
        with fed(micro_step), micro_forward(self._spread, micro_step.weight):
            batch = self._forward.place(micro_step.batch)
            loss = self._forward.task.loss(self._forward(batch), batch)
        fault_points.reach("backward")
        # A filler's loss counts nothing, but its backward runs: every rank takes part in every collective.
        (loss * (scale * micro_step.weight)).backward(tell_nonfinite(loss) if micro_step.weight else None)
        total = loss.detach().double()
        return total if micro_step.weight else torch.zeros_like(total)

    def backward_alone(self, micro_step: MicroStep) -> None:
        """Leave the gradients of one micro-step on the parameters: this rank's own, not divided, and not reduced.

        What is fully sharded no rank has whole: that is reduced, or, where there are copies, held back with the sum
        over each copy's ranks (`Spread.take_held_back`). Collective where forwards are. DDP has made a pass before.
        """
        layout = self._spread.mesh.layout
        sharded = layout.fully_sharded
        if sharded and layout.copies > 1:
            self._spread.hold_back()
            self._backward(micro_step, 1.0)
            return
        self._spread.synchronise(last=sharded)
        self._backward(micro_step, 1.0)
        if sharded:
            self._spread.check_reduced()
            self._spread.reduce_scalars()

    def _settle(self, micro_step: MicroStep) -> None:
        """Two discarded passes, after which DDP's buckets have their final order (law 8); a static graph needs both."""
        with buffers_kept(self._spread, unless=False):
            for _ in range(2):
                self._spread.synchronise(last=True)
                self._backward(micro_step, 0.0)
                for parameter in self._spread.trainable().values():
                    parameter.grad = None
        self._settled = True


def tell_nonfinite(loss: torch.Tensor) -> torch.Tensor:
    """1.0, exactly, but nan where the loss is not finite: the gradient with which its backward begins.

    A loss can be infinite while its gradients are not. So all of them are not, and every rank hears of it by the norm.
    """
    return loss.detach() * 0.0 + 1.0


def ledger_of(batch: StepBatch) -> int:
    """This rank's 64-bit sum of hash(position, sample) over what `batch` feeds (law 12); fillers have no positions."""
    # ledger_sum takes arrays too, and says so in words only.
    pairs = [(cast("Sequence[int]", m.positions), cast("Sequence[int]", m.samples)) for m in batch.micro_steps]
    return sum(ledger_sum(positions, samples) for positions, samples in pairs) % (1 << 64)


@contextmanager
def micro_forward(spread: Spread, weight: int) -> Iterator[RanksRows]:
    """Around the forward of a micro-step: one of weight 0, a filler, leaves no trace.

    It counts no row in synchronised statistics or what a Task gathers, and its buffers go back to their values; those
    which all ranks have learnt together take part in what the others have learnt. Collective where all follow the first
    rank's.
    """
    rows = RanksRows(spread.mesh.data_group, counts=weight > 0)
    with rows_of(rows):
        if weight > 0:
            yield rows
        else:
            with spread.batch_norms.counting(False), buffers_kept(spread, unless=False, but=spread.batch_norms.alike):
                yield rows
    spread.batch_norms.follow_first()


@contextmanager
def buffers_kept(spread: Spread, *, unless: bool, but: Collection[str] = ()) -> Iterator[None]:
    """Put every buffer back to its value afterwards, `unless` told otherwise: for passes that do not count.

    A forward may have put another tensor in its place: what no checkpoint holds, a table that follows the length of the
    sequences. An attribute beside it may say for which length it is, and goes back with it. Where none has changed,
    somebody else knows the length: a table of another shape stays then.

    Args:
        but: names of buffers that stay as they are then.
    """
    buffers = (name for name, entry in spread.map.items() if entry.kind == "buffer" and name not in but)
    names = [] if unless else list(buffers)
    kept = [(*spread.tensors.place_of(name), spread.tensors[name], spread.tensors[name].clone()) for name in names]
    tables = [(o, leaf, buffer) for o, leaf, buffer, _ in kept if leaf in o._non_persistent_buffers_set]
    attributes = {owner: dict(vars(owner)) for owner, *_ in tables}
    try:
        yield
    finally:
        replaced = {owner for owner, leaf, buffer in tables if owner._buffers[leaf] is not buffer}
        changed = {owner: changed_attributes(attributes[owner], owner) for owner in replaced}
        for owner, leaf, buffer, value in kept:
            now = owner._buffers[leaf]
            transient = leaf in owner._non_persistent_buffers_set and not changed.get(owner)
            if now is not None and now.shape != value.shape and transient:
                continue
            # Through .data: the backward that still comes may have saved the buffer, and must not find it changed.
            buffer.data.copy_(value)
            owner._buffers[leaf] = buffer
        for owner, earlier in changed.items():
            put_attributes(owner, earlier)


def _must_settle(spread: Spread) -> bool:
    # DDP rebuilds its buckets after its first backward. A static graph cannot begin with a pass that does not reduce.
    layout = spread.mesh.layout
    replicated = any(isinstance(module, REPLICAS) for module in spread.modules.values())
    return replicated and (layout.gradient_ranks > RANKS_WITH_ONE_ORDER or layout.static_graph)
