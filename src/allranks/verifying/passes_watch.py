"""The passes of a run, watched: what they leave in the gradients is copied before anybody clips it."""

from collections.abc import Iterator
from typing import final

from torch.distributed.tensor import DTensor

from allranks.data.micro_step import StepBatch
from allranks.stepping.passes import Passes, Scale, StepSums
from allranks.stepping.scaler import Scaler
from allranks.stepping.session import Session
from allranks.verifying.recording import Part, Parts, StepRecord


@final
class WatchedPasses(Passes):
    """The run's own passes, and the step that they are recorded in."""

    def __init__(self, inner: Passes) -> None:
        self.inner = inner
        self.session: Session | None = None
        self.step = StepRecord()

    def run(self, batch: StepBatch, scale: Scale) -> Iterator[StepSums]:
        assert self.session is not None
        for sums in self.inner.run(batch, scale):
            self.step.raw |= gradients_of(self.session, sums)
            self.step.updates += 1
            yield sums


def gradients_of(session: Session, sums: StepSums) -> Parts:
    """This rank's parts of the gradients that an optimizer is about to get, before clipping."""
    spread = session.spread
    # Where the step itself counted its targets, its gradients are not divided yet.
    divide = 1.0 if sums.targets is None else spread.mesh.layout.sample_ranks / max(1.0, float(sums.targets))
    scaler = scaler_of(session)
    if scaler is not None:
        divide = spread.mesh.layout.sample_ranks / float(scaler.scale)
    due = {id(parameter) for parameter in session.optimizers.parameters(sums.which)}
    found = {}
    for name, tensor in spread.trainable().items():
        if tensor.grad is not None and id(tensor) in due:
            local = tensor.grad._local_tensor if isinstance(tensor.grad, DTensor) else tensor.grad
            found[name] = Part(spread.map[name].box, local.detach().cpu() * divide)
    return found


def scaler_of(session: Session) -> Scaler | None:
    """What scales the losses under float16; None where nothing does."""
    return next((other for other in session.beside if isinstance(other, Scaler)), None)
