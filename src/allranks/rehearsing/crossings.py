"""What passes from stage to stage of a pipeline, where no stage is there to say so.

A rank learns from a header what the stage before it sends. Here it learns that from a rank of the same pipeline that
was rehearsed before it and sends to it; and where there is none, from a walk: one rank runs every stage of its
pipeline, one after the other, forward alone, and what each hands to the next one is written down. So every stage begins
with what the program gives it, in any number of tensors of any shape and type.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import final

from allranks.errors import LayoutError
from allranks.layout import Layout
from allranks.parallel.stage_transport import Sent, Signature, Transport
from allranks.rehearsal import Finding

Entries = dict[tuple[int, Signature], tuple[Sent, ...]]
"""(Stage, signature of the model's inputs) -> what is sent to it."""


@final
class Crossings:
    """What the stages of each pipeline of a layout are sent: the ranks that are alike but for pp are one.

    Attributes:
        findings: where a rank has sent something else than the walk through its pipeline.
    """

    def __init__(self, layout: Layout) -> None:
        self.findings: list[Finding] = []
        self._layout = layout
        self._each = layout.world_size // layout.pp  # pp is the outermost axis
        self._known: defaultdict[int, Entries] = defaultdict(dict)

    def of(self, rank: int) -> Entries:
        """What the pipeline of a rank knows."""
        return self._known[rank % self._each]

    def lacks(self, rank: int) -> bool:
        """Whether a stage of this rank begins with what nobody has sent yet."""
        own = {stage for stage, of in enumerate(self._layout.stage_ranks) if of == rank // self._each}
        known = {stage for stage, _ in self.of(rank)}
        return any(stage > 0 and stage - 1 not in own and stage not in known for stage in own)

    def learn(self, rank: int, sent: Mapping[tuple[int, Signature], tuple[Sent, ...]], *, walked: bool = False) -> None:
        """Keep what was sent in a rehearsal of `rank`; what a stage of its own has sent counts more than a walk."""
        known = self.of(rank)
        for (stage, signature), now in sent.items():
            before = known.get((stage, signature), now)
            if [(one.shape, one.dtype) for one in before] != [(one.shape, one.dtype) for one in now]:
                self.findings.append(_differ(rank, stage, now, before))
        self._known[rank % self._each] = {**sent, **known} if walked else {**known, **sent}

    def bytes_to_stages(self) -> dict[int, tuple[int, int]]:
        """Stage -> bytes that it is sent for a micro-step, and of the gradients that it sends back."""
        found: dict[int, tuple[int, int]] = {}
        for entries in self._known.values():
            for (stage, _), sent in entries.items():
                sizes = [(math.prod(one.shape) * one.dtype.itemsize, one.requires_grad) for one in sent]
                both = sum(size for size, _ in sizes), sum(size for size, learns in sizes if learns)
                found.setdefault(stage, both)
        return dict(sorted(found.items()))


def _differ(rank: int, stage: int, now: Sequence[Sent], before: Sequence[Sent]) -> Finding:
    what = (
        f"stage {stage} of the pipeline begins with {describe(now)} on rank {rank}, and with {describe(before)} on "
        "another rank of the same pipeline: what the model makes depends on the rank"
    )
    return Finding("stages", what, "--ranks all rehearses each stage with what the one before it sends")


def describe(sent: Sequence[Sent]) -> str:
    """`float32 [4, 8] and bool [4, 1]`."""
    kinds = (f"{one.dtype} {list(one.shape)}".removeprefix("torch.") for one in sent)
    return " and ".join(kinds) or "nothing"


def hear(entries: Entries, transport: Transport, stage: int, signature: Signature) -> tuple[Sent, ...]:
    """In place of `Transport.hear`. LayoutError where it was never sent."""
    own = transport.hear_own(stage, signature)
    found = entries.get((stage, signature)) if own is None else own
    if found is None:
        raise LayoutError(f"no rank was rehearsed that sends stage {stage} of this pipeline inputs like these")
    return found
