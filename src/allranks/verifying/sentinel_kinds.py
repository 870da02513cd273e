"""Which of the kinds of silent wrongness the verdict of a sentinel names, the likeliest first.

A sentinel sees that ranks differ, or that something was moved; of what it sees only some kinds can be the cause. What
is said here follows from what each looks at and advises, not from programs in which it found something.
"""

from collections.abc import Mapping
from typing import Final

NAMED: Final[Mapping[str, tuple[str, ...]]] = {
    "replicas_differ": ("S39", "S11", "S32"),
    "shards_alike": ("S32",),
    "samples_wrong": ("S4", "S20"),
    "fed_apart": ("S7",),
    "fed_alike": ("S4",),
    "reseeded": ("S6",),
    "randomness_wrong": ("S5", "S6", "S7"),
    "optimizer_unlinked": ("S12",),
    "rate_moved": ("S22", "S23"),
    "steps_differ": ("S38", "S28", "S22"),
    "checkpoint_unproven": ("S17", "S31"),
    "gradients_differ": ("S39",),
}
"""Kind of a sentinel's verdict -> the kinds of `KINDS`."""

BUFFERS: Final = ("S25",)
"""What `replicas_differ` names where a buffer is what differs first."""


def kinds_named(verdict: str, what: str) -> tuple[str, ...]:
    """The kinds that a verdict of the kind `verdict`, which says `what`, names."""
    buffer = verdict == "replicas_differ" and ": buffer " in what
    return BUFFERS if buffer else NAMED[verdict]
