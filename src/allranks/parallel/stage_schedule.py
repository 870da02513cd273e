"""In which order a rank runs the forwards and backwards of its stages: as torch's schedules say, or one after another.

torch's schedules need micro-steps of one shape, and as many as there are stages at least. What does not fit them (the
short last batch of an epoch, a comparison on one micro-batch) goes through in turn, all forwards before all backwards.

Source: https://docs.pytorch.org/docs/stable/distributed.pipelining.html
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn

from allranks import fault_points
from allranks.layout_refusals import SPLIT_BACKWARD
from allranks.parallel.mesh import Mesh
from allranks.parallel.own_checkpoints import noted
from allranks.parallel.pipeline import Pipeline
from allranks.parallel.stage_run import Payload
from allranks.parallel.stage_transport import Sent, Signature, Transport
from allranks.parallel.torch_stage import goes_past, mend

if TYPE_CHECKING:
    from allranks.parallel.stage_beside import Beside

CLASSES = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved": "Interleaved1F1B",
    "looped_bfs": "LoopedBFS",
    "interleaved_zb": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}

KNOWS_GRADIENTS = torch.__version__ >= "2.13.0a0"
"""Whether torch's stage knows what has a gradient and cuts a backward rightly; else it is `stage_beside`'s."""

SCHEDULES = 4
"""So many schedules stay with the buffers that their stages receive into: those that were used last."""
KINDS = 1 << 12
"""So many kinds of micro-steps are known at a time: where lengths change for ever, one of them takes some kB."""

# (micro-step, stage, what the stage received) -> what it sends on, or from the last one (the scaled loss,)
Compute = Callable[[int, int, Payload], Payload]


@final
class Scheduler:
    """Runs micro-steps through the stages of this rank, forward and backward.

    Args:
        pipeline: the stages.
        transport: between them.
        mesh: the layout over the ranks; its schedule is used where the micro-steps fit it.

    Attributes:
        transport: as given.
    """

    def __init__(self, pipeline: Pipeline, transport: Transport, mesh: Mesh, device: torch.device) -> None:
        self._pipeline = pipeline
        self.transport = transport
        self._mesh = mesh
        self._device = device
        # Both in the order of their last use, which all ranks of a pipeline have alike: so they forget alike.
        self._made: dict[tuple[int, Signature], _Made] = {}
        self._kinds: dict[Signature, None] = {}

    @property
    def received_into(self) -> list[torch.Tensor]:
        """What torch's stages keep from step to step to receive into."""
        stages = [stage for made in self._made.values() for stage in made.stages]
        infos = [info for stage in stages for info in (stage.args_recv_info, stage.grad_recv_info)]
        buffers = [getattr(one, "buffer", None) for info in infos for chunk in info.values() for one in chunk]
        beside = [view.beside for made in self._made.values() for view in made.views if view.beside is not None]
        buffers += [into for one in beside for some in one.arrives.values() for into in some]
        return [buffer for buffer in buffers if isinstance(buffer, torch.Tensor)]

    def forward(self, signatures: Sequence[Signature], compute: Compute) -> None:
        """Forwards alone, one micro-step after another; collective along pp."""
        self._note(signatures)
        for index, signature in enumerate(signatures):
            for stage in self._pipeline.stages:
                self._forward(index, stage, signature, compute)
        self.transport.drain()

    def fits(self, signatures: Sequence[Signature]) -> bool:
        """Whether micro-steps like these go through the layout's schedule."""
        return len(set(signatures)) == 1 and self._mesh.layout.fits_schedule(len(signatures))

    def run(self, signatures: Sequence[Signature], compute: Compute, *, scheduled: bool) -> None:
        """Forwards and backwards; gradients are added to what parameters have; collective along pp.

        Args:
            signatures: of each micro-step.
            scheduled: whether they go as the schedule says, which they have to fit and to be known for; else in turn.
        """
        self._note(signatures)
        if scheduled:
            self._run_scheduled(len(signatures), signatures[0], compute)
        else:
            self._run_in_turn(signatures, compute)

    def is_known(self, signature: Signature) -> bool:
        """Whether a micro-step of this kind has passed before, so that the shapes between the stages are known."""
        return all(
            (beside, signature) in self.transport.sent
            for stage in self._pipeline.stages
            for beside in (stage, stage + 1)
            if 0 < beside <= self._pipeline.last
        )

    def _note(self, signatures: Sequence[Signature]) -> None:
        """Micro-steps of these kinds pass now: of the others those go that have not for longest, where there are many.

        One that comes again is new, and made known as the first time.
        """
        now = dict.fromkeys(signatures)
        for kind in now:
            self._kinds.pop(kind, None)
        self._kinds |= now
        while len(self._kinds) > max(KINDS, len(now)):
            oldest = next(iter(self._kinds))
            del self._kinds[oldest]
            self.transport.forget(oldest)

    def _forward(self, index: int, stage: int, signature: Signature, compute: Compute) -> tuple[Payload, Payload]:
        received = self.transport.receive_on(stage, signature)
        output = compute(index, stage, received)
        if stage < self._pipeline.last:
            self.transport.send_on(stage + 1, output, signature)
        return received, output

    def _run_in_turn(self, signatures: Sequence[Signature], compute: Compute) -> None:
        kept = {
            (index, stage): self._forward(index, stage, signature, compute)
            for index, signature in enumerate(signatures)
            for stage in self._pipeline.stages
        }
        for index, signature in enumerate(signatures):
            for stage in reversed(self._pipeline.stages):
                received, output = kept.pop((index, stage))
                gradients: list[torch.Tensor | None] = [None] * len(output)
                if stage < self._pipeline.last:
                    gradients = self.transport.receive_back(stage + 1, signature)
                pairs = [(t, gradient) for t, gradient in zip(output, gradients, strict=True) if t.requires_grad]
                if pairs:
                    torch.autograd.backward([t for t, _ in pairs], [gradient for _, gradient in pairs])
                fault_points.reach("backward")
                self.transport.send_back(stage, received)
        self.transport.drain()

    def _run_scheduled(self, number: int, signature: Signature, compute: Compute) -> None:
        made = self._made.pop((number, signature), None) or self._make(number, signature)
        self._made[number, signature] = made
        if len(self._made) > SCHEDULES:
            self._made.pop(next(iter(self._made))).free()
        for view in made.views:
            view.compute = compute
        # Every stage looks its micro-step up by number; nothing of the batch travels.
        numbers = torch.arange(number)
        holds_first = 0 in self._pipeline.stages
        target = numbers if self._pipeline.last in self._pipeline.stages else None
        try:
            made.schedule.step(*([numbers] if holds_first else []), target=target, return_outputs=False, number=numbers)
        except RuntimeError as error:
            # torch wraps what a forward raises.
            if error.__cause__ is not None:
                raise error.__cause__ from None
            raise
        finally:
            for view in made.views:
                view.compute = None
                if view.beside is not None:
                    view.beside.leaves.clear()

    def _make(self, number: int, signature: Signature) -> "_Made":
        # Here, because it brings torch's compiler along, and half a second that only a pipeline should cost.
        from torch.distributed.pipelining.schedules import get_schedule_class

        layout = self._mesh.layout

        def check(stage: int, payload: Payload) -> None:
            self.transport.check_known(stage, payload, signature)

        views = {stage: View(self._pipeline, stage, check) for stage in self._pipeline.stages}
        stages = [self._stage(views, stage, signature) for stage in views]
        kind, one_each = get_schedule_class(CLASSES[layout.schedule]), layout.num_stages == layout.pp
        schedule: Any = kind(stages[0] if one_each else stages, number, loss_fn=_as_loss, scale_grads=False)
        return _Made(schedule, list(views.values()), stages)

    def _stage(self, views: Mapping[int, "View"], stage: int, signature: Signature) -> Any:
        """torch's PipelineStage with the shapes on both sides, so that it need not try them out."""
        from torch.distributed.pipelining import PipelineStage

        from allranks.parallel.stage_beside import Beside, BesideStage

        view, last = views[stage], self._pipeline.last
        # Of the first one torch makes the backward whole by itself.
        view.splits = KNOWS_GRADIENTS and stage > 0 and self._mesh.layout.schedule in SPLIT_BACKWARD
        received = self.transport.sent[stage, signature] if stage else ()
        sent = self.transport.sent[stage + 1, signature] if stage < last else ()
        kind: Any = PipelineStage
        if not KNOWS_GRADIENTS:
            view.beside = Beside(received, sent, self._device)
            before = views[stage - 1].beside if stage - 1 in views else None
            kind = partial(BesideStage, beside=view.beside, before=before)
            received, sent = (tuple(one for one in some if one.requires_grad) for some in (received, sent))
        loss = torch.zeros((), dtype=torch.float32, device="meta", requires_grad=True)
        made = kind(
            view,
            stage_index=stage,
            num_stages=last + 1,
            device=self._device,
            input_args=_metas(received) if stage else (torch.zeros(1, dtype=torch.int64, device="meta"),),
            output_args=_metas(sent) if stage < last else (loss,),
            group=self._mesh.group("pp"),
        )
        mend(made, view.whole)
        return made


@final
class View(nn.Module):
    """One stage as torch's schedules see it: a module of its own, though all stages of a rank are in one.

    Attributes:
        splits: whether torch cuts its backward in two; whole: the micro-steps of which it cannot.
    """

    _pipeline: Pipeline  # no module: torch would move, scan and synchronise what belongs to the other stages, too
    stage: int

    def __init__(self, pipeline: Pipeline, stage: int, check: Callable[[int, Payload], None]) -> None:
        """`check`: raises where what is sent to a stage is not what that expects."""
        super().__init__()
        self._pipeline, self._check = pipeline, check
        self.stage = stage
        self.compute: Compute | None = None
        self.beside: Beside | None = None
        self.splits = False
        self.whole: set[int] = set()

    def forward(self, *received: torch.Tensor, number: torch.Tensor) -> Any:
        """What the stage sends on, as far as torch's stage does; or the loss."""
        assert self.compute is not None
        index, beside = self.which(number), self.beside
        payload = received if self.stage else ()
        with noted() as checkpoints:
            found = self.compute(index, self.stage, payload if beside is None else beside.join(index, payload))
        if self.splits:
            (self.whole.add if checkpoints.any or goes_past(payload, found) else self.whole.discard)(index)
        if self.stage < self._pipeline.last:
            self._check(self.stage + 1, found)
            sent = tuple(tensor.contiguous() for tensor in found)  # gloo sends no others
            return sent if beside is None else beside.part(index, sent)
        # torch 2.11 wants of the loss the type that was declared; its backward begins with the same 1 in either type.
        return found[0].type(torch.float32)

    def which(self, number: torch.Tensor) -> int:
        """The micro-step that comes next."""
        return int(number)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Those of the stage."""
        return iter(self._pipeline.parameters(self.stage))


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Made:
    """A schedule of torch's for micro-steps of one kind, with what computes for its stages, and torch's stages."""

    schedule: Any
    views: list[View]
    stages: list[Any]

    def free(self) -> None:
        """Let the memory go that is received into: the stages are in cycles of references, which take their time."""
        for stage in self.stages:
            stage.args_recv_info.clear()
            stage.grad_recv_info.clear()
        for view in self.views:
            if view.beside is not None:
                view.beside.arrives.clear()


def _metas(sent: Sequence[Sent]) -> tuple[torch.Tensor, ...]:
    return tuple(one.empty("meta").requires_grad_(one.requires_grad) for one in sent)


def _as_loss(loss: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return loss
