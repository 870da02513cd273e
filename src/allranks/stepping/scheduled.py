"""Passes through a pipeline: the micro-steps of a step in the order of its schedule, each stage on its own rank."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from allranks import fault_points
from allranks.data.micro_step import MicroStep, StepBatch
from allranks.data.random_keys import seed_all
from allranks.errors import LayoutError
from allranks.parallel.stage_run import Payload
from allranks.parallel.stage_transport import Signature, signature_of
from allranks.stepping.fed import fed
from allranks.stepping.passes import (
    Forward,
    Passes,
    Scale,
    StepSums,
    buffers_kept,
    ledger_of,
    micro_forward,
    tell_nonfinite,
)

Loss = Callable[[Any, Any], torch.Tensor]


def agree_on(flags: Sequence[bool], group: dist.ProcessGroup, device: torch.device) -> list[bool]:
    """Whether each of the flags is set on all ranks of `group`; collective."""
    told = torch.tensor([float(flag) for flag in flags], device=device)
    dist.all_reduce(told, dist.ReduceOp.MIN, group)
    return [bool(flag) for flag in told.tolist()]


class ScheduledPasses(Passes):
    """One forward and one loss a micro-step, spread over the stages of a pipeline.

    Every rank has every batch of its samples: the first stage takes the inputs from it, the last one what the loss
    needs, and any stage the masks and positions that it makes by itself.
    """

    def __init__(self, forward: Forward) -> None:
        assert forward.spread.stages is not None
        self._forward = forward
        self._spread = forward.spread
        self._stages = forward.spread.stages

    def run(self, batch: StepBatch, scale: Scale, losses: Sequence[Loss] | None = None) -> Iterator[StepSums]:
        """As `Passes.run`; `losses`: one for each micro-step, where they are not the Task's."""
        own = [self._forward.task.loss] * len(batch.micro_steps) if losses is None else losses
        placed = self._place(batch.micro_steps)
        signatures = [self._sign(micro_step, one) for micro_step, one in zip(batch.micro_steps, placed, strict=True)]
        fits, known = self._decide(signatures)
        if fits and not known:
            self._make_known(batch.micro_steps[0], placed[0], signatures[0], own[0])
        self._spread.synchronise(last=True)
        found: list[torch.Tensor] = []

        def compute(index: int, stage: int, received: Payload) -> Payload:
            micro_step = batch.micro_steps[index]
            output = self._compute(micro_step, placed[index], own[index], stage, received)
            if stage < self._stages.pipeline.last:
                return output
            (loss,) = output
            if micro_step.weight:  # a filler adds nothing, not even 0 * nan
                found.append(loss.detach().double())
                loss = loss * tell_nonfinite(loss)
            return (loss * (scale * micro_step.weight),)

        self._stages.scheduler.run(signatures, compute, scheduled=fits)
        self._spread.reduce_scalars()
        self._spread.reduce_replicated()
        self._stages.reduce_shared()
        self._spread.align_copies()
        # In the order of the micro-steps, whatever the schedule: every last stage has run them so.
        total = torch.zeros((), dtype=torch.float64, device=self._spread.device)
        for loss in found:
            total = total + loss
        yield StepSums("", total, None, ledger_of(batch))

    def _sign(self, micro_step: MicroStep, placed: Any) -> Signature:
        seed_all(micro_step.random_key)  # inputs may draw how long they are
        return signature_of(self._forward.inputs(placed), self._spread.bare())

    def _place(self, micro_steps: Sequence[MicroStep]) -> list[Any]:
        placed, lengths, context = [], set[int](), self._spread.context
        for micro_step in micro_steps:
            placed.append(self._forward.place(micro_step.batch))
            lengths.add(0 if context is None else context.length)
        if len(lengths) > 1:
            raise LayoutError(
                f"{self._spread.mesh.layout} has sequences of {' and '.join(map(str, sorted(lengths)))} positions in "
                "one step, whose micro-steps are on their way together: give all samples one length, or leave cp out"
            )
        return placed

    def _compute(self, micro_step: MicroStep, placed: Any, loss: Loss, stage: int, received: Payload) -> Payload:
        """What a stage sends on, or the last one's loss."""
        fault_points.reach("forward")
        # On all stages alike: what modules draw is apart (parallel/stage_draws.py).
        seed_all(micro_step.random_key)
        with fed(micro_step), micro_forward(self._spread, micro_step.weight):
            output = self._forward.run_stage(placed, stage, received)
            if stage < self._stages.pipeline.last:
                found: Payload = output
                return found
            return (loss(output, placed),)

    def _decide(self, signatures: Sequence[Signature]) -> tuple[bool, bool]:
        """(whether the micro-steps fit the schedule, whether they are known to it), on all ranks of this stage alike.

        Where forwards meet in collectives, a rank with other shapes than the others' must not go another way.
        """
        scheduler, layout, norms = self._stages.scheduler, self._spread.mesh.layout, self._spread.batch_norms
        found = scheduler.fits(signatures), all(map(scheduler.is_known, signatures))
        group = self._spread.mesh.data_group
        if group is None or not (layout.fully_sharded or layout.ep > 1 or norms.mode in ("sync", "broadcast")):
            return found
        fits, known = agree_on(found, group, self._spread.device)
        return fits, known

    def _make_known(self, micro_step: MicroStep, placed: Any, signature: Signature, loss: Loss) -> None:
        """Have a new kind of micro-step pass once, so that the schedule knows what travels; nothing of it stays."""
        with buffers_kept(self._spread, unless=False):
            self._stages.scheduler.forward([signature], partial(self._compute_alone, micro_step, placed, loss))
        self._spread.reshard()

    def _compute_alone(
        self, micro_step: MicroStep, placed: Any, loss: Loss, _: int, stage: int, received: Payload
    ) -> Payload:
        return self._compute(micro_step, placed, loss, stage, received)
