"""What passes from stage to stage of a pipeline, where no stage is there to say so.

A rank learns from a header what the stage before it sends. Here the first stage's own step is rehearsed first, and what
it sends stands for what every stage is sent: stages begin at blocks of one kind. Where the activations that reach a
later stage have another shape, that is said, and nothing is guessed.
"""

from typing import Any, final

import torch

from allranks.errors import LayoutError
from allranks.parallel.pipeline import Pipeline
from allranks.parallel.stage_transport import Sent, Signature, Transport
from allranks.rehearsing.refusals import Unrehearsable


@final
class Crossings:
    """What the first stage has sent, by the signature of its inputs."""

    def __init__(self) -> None:
        self._sent: dict[Signature, tuple[Sent, ...]] = {}

    @property
    def known(self) -> bool:
        """Whether a first stage has been rehearsed."""
        return bool(self._sent)

    def hear(self, transport: Transport, stage: int, signature: Signature) -> tuple[Sent, ...]:
        """In place of `Transport.hear`."""
        own = transport.hear_own(stage, signature)
        if own is not None:
            return own
        for (sent_to, beside), found in transport.sent.items():
            if beside == signature and sent_to != stage:
                return found
        found_before = self._sent.get(signature)
        if found_before is None:
            raise LayoutError("the first stage of this pipeline was not rehearsed with inputs like these")
        return found_before

    def learn(self, transport: Transport) -> None:
        """Keep what was sent to the second stage."""
        self._sent |= {signature: found for (stage, signature), found in transport.sent.items() if stage == 1}


def check_entry(pipeline: Pipeline, stage: int, args: Any, kwargs: Any, received: tuple[torch.Tensor, ...]) -> None:
    """Unrehearsable where the stand-ins that reach `stage` have other shapes than what it was told to receive."""
    from torch.utils import _pytree as pytree

    leaves = pytree.tree_leaves((args, kwargs))
    for place, tensor in zip(pipeline.crossings[stage], received, strict=True):
        leaf = leaves[place] if place < len(leaves) else None
        if not isinstance(leaf, torch.Tensor) or leaf.shape != tensor.shape:
            shape = list(leaf.shape) if isinstance(leaf, torch.Tensor) else type(leaf).__name__
            raise Unrehearsable(
                f"stage {stage} of the pipeline begins with {shape} where the second one begins with "
                f"{list(tensor.shape)}: a dry run follows pipelines whose stages begin alike; rehearse another layout"
            )
