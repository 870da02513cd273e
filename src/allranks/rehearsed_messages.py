"""What moves in a rehearsed step: messages between ranks, and transfers between a device and its host. Values only."""

from dataclasses import dataclass, field
from typing import Final, final

COPIES_OF_EXPERTS: Final = "copies of experts"
"""The axis of what ranks that hold the same experts sum: with ep, of more data-parallel ranks than it has."""
ANY_RANK: Final = -1
"""Where a receive takes what comes first, from whichever rank."""


@final
@dataclass(frozen=True, slots=True)
class Collective:
    """Messages of one kind in one optimizer step.

    Attributes:
        axis: of the layout, several of them ("dp_replicate+cp"), or what the group is for (COPIES_OF_EXPERTS, "all").
        op: "all-gather", "reduce-scatter", "all-reduce", "all-to-all", "broadcast", "send", "receive".
        bytes: that this rank receives in all of them together (of an all-reduce 2 (n - 1) / n of its size; what it
            sends in a send); count: how many.
        ranks: of the group; members: which, "0-7", "0-56/8" (every eighth), "0,5,9".
        line: of the user's code or ours that asked for it, "file.py:12 name".
    """

    axis: str
    op: str
    bytes: int
    count: int
    ranks: int
    line: str
    members: str = ""


@final
@dataclass(frozen=True, slots=True)
class Message:
    """One collective as it was dispatched.

    Attributes:
        axis, op, line, members: as in `Collective`; num_bytes: of this one; ranks: of the group.
        once: whether it is one message also where the block it came in stands for several (a bucket of DDP).
        uneven: whether its size may differ by rank here alone (`world.gather`, where others' rows are unknown).
        terms: what every rank of the group has to say alike, besides: "float32", "int64 from member 0 of its group".
        even_bytes: of what is of one size on every rank of the group; None: of nothing.
        only: the ranks that have to execute it, where these are not all of a stage: of a group that is none of the
            layout's; of a send or receive that is not between stages or parts of a sequence, the rank itself.
        across: the ranks of its group, where these run several stages of a pipeline; () of one stage's, and of a send
            or receive.
        waits: whether the rank goes on only when the others have come.
        peer: of a send or receive, the rank at the other end, or ANY_RANK; None of all else.
        tag: of a send or receive; 0 where the backend has no tags (NCCL).
        own: whether it is a send or receive of the user's own.
        after: FLOPs of its stretch of the step that come before it; unit: whose parameters it gathers ahead of use, ""
            of all else. Neither has to be alike on all ranks.
    """

    axis: str
    op: str
    num_bytes: int
    ranks: int
    line: str
    once: bool = False
    members: str = ""
    uneven: bool = False
    terms: str = ""
    even_bytes: int | None = None
    only: tuple[int, ...] = ()
    across: tuple[int, ...] = ()
    waits: bool = False
    peer: int | None = None
    tag: int = 0
    own: bool = False
    after: float = field(default=0.0, compare=False)
    unit: str = field(default="", compare=False)

    @property
    def travels(self) -> bool:
        """Whether it brings anything: a barrier only waits."""
        return self.op != "barrier"


@final
@dataclass(frozen=True, slots=True)
class Transfer:
    """What crosses between a device and its host in one optimizer step, of one kind and in one direction.

    Attributes:
        what: "parameters", "gradients" or "activations"; to: "host" or "device".
        bytes: of all together; count: of tensors.
    """

    what: str
    to: str
    bytes: int
    count: int
