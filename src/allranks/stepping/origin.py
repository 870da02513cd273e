"""Where the first number came from that was not finite: the step is made once more, and watched.

A reduction spreads one rank's nan to all, and looking at every rank's own gradients in every step would cost. So the
passes of a step that was skipped are run again, one micro-step after the other, with the samples and the random numbers
that it had, and what they leave behind is dropped. What does not show again then was a fault that passes, or stood on
the edge: the parameters may be one step further than they were.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
import torch.distributed as dist

from allranks.data.micro_step import StepBatch
from allranks.parallel.first_nonfinite import FirstNonfinite
from allranks.parallel.spread import Spread
from allranks.stepping.alike import everyones
from allranks.stepping.passes import Passes, Scale, buffers_kept

SHOWN = 8
"""Sample numbers that are shown of a micro-step."""


@final
@dataclass(frozen=True, slots=True)
class Origin:
    """What one rank saw of it.

    Attributes:
        rank: global.
        kind: of the sighting, or "loss".
        name: the module or parameter; "" for the whole model.
        type: the module's class.
        positions, samples: what the micro-step fed: places in the global order (the ledger's), and sample numbers.
    """

    rank: int
    kind: str
    name: str
    type: str
    positions: tuple[int, ...]
    samples: tuple[int, ...]

    @property
    def words(self) -> str:
        """What was seen first there."""
        module = f"{self.name or 'the model'} ({self.type})" if self.type else self.name or "the model"
        return {
            "input": f"in what goes into {self.name or 'the model'}: look at the data",
            "output": f"in what comes out of {module}",
            "loss": "in the loss; all that comes before it is finite",
            "output_gradient": f"in the gradient of what comes out of {module}",
            "parameter_gradient": f"in the gradient of {self.name}",
        }[self.kind]

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.samples[:SHOWN])) + (", ..." if len(self.samples) > SHOWN else "")
        fed = f"samples {shown} (positions {self.positions[0]} to {self.positions[-1]})" if self.samples else "a filler"
        return f"rank {self.rank}: first seen {self.words}; it was fed {fed}"


def find_origin(
    passes: Passes,
    spread: Spread,
    batch: StepBatch,
    scale: Scale,
    group: dist.ProcessGroup | None,
) -> tuple[Origin, ...]:
    """What each rank saw in the first micro-step in which one saw anything; () where it does not show again.

    Collective. Parameters, buffers and optimizers are as before afterwards; gradients are gone.

    Args:
        batch: the step's, on this rank.
        scale: that its losses had.
        group: all ranks; None for one.
    """
    hook, spread.hook = spread.hook, None  # gradients travel whole: what a hook keeps is no concern of these passes
    stance: Any = torch.compiler.set_stance("force_eager")  # compiled blocks would not call the hooks
    try:
        with buffers_kept(spread, unless=False), stance:
            for part in _parts(batch, whole=spread.stages is not None):
                seen = _watch(passes, spread, part, scale)
                told = [one for one in everyones(seen, group, spread.device) if one is not None]
                if told:
                    return tuple(_origin(one) for one in told)
        return ()
    finally:
        spread.hook = hook
        spread.path.take()
        for parameter in spread.trainable().values():
            parameter.grad = None


def _parts(batch: StepBatch, *, whole: bool) -> Sequence[StepBatch]:
    """One micro-step each; a pipeline's pass together."""
    return [batch] if whole else [replace(batch, micro_steps=(one,)) for one in batch.micro_steps]


def _watch(passes: Passes, spread: Spread, part: StepBatch, scale: Scale) -> list[Any] | None:
    """As JSON: rank, kind, name, type, positions, samples."""
    watch, loss_is_bad = FirstNonfinite(), False
    with watch.watching(spread.modules):
        for sums in passes.run(part, scale):
            loss_is_bad = loss_is_bad or not bool(sums.loss.isfinite())
            for parameter in spread.trainable().values():
                parameter.grad = None
    found: tuple[str, str, str] | None = (
        None if watch.found is None else (watch.found.kind, watch.found.name, watch.found.type)
    )
    # Of a bad loss every gradient is bad; what the forward has seen came earlier.
    if loss_is_bad and (found is None or found[0].endswith("gradient")):
        found = ("loss", "", "")
    if found is None:
        return None
    positions = [int(p) for one in part.micro_steps for p in one.positions]
    samples = [int(s) for one in part.micro_steps for s in one.samples]
    rank = dist.get_rank() if dist.is_initialized() else 0
    return [rank, *found, positions, samples]


def _origin(told: Sequence[Any]) -> Origin:
    rank, kind, name, type_, positions, samples = told
    return Origin(rank, kind, name, type_, tuple(positions), tuple(samples))
