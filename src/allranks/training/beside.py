"""What a checkpoint holds besides model and optimizer: a Task's own values, and tensors under prefixes of their own."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from allranks.parameter_map import Entry
from allranks.verdict import Decision

PREFIXES = {
    "ema.": "the average of the parameters",
    "scaler.": "the scale of the loss",
    "spikes.": "the window of norms",
    "losses.": "the window of losses",
}
"""Every prefix that a checkpoint may have besides `model.` and `optimizer.`, in words."""


class Stateful(Protocol):
    """What a Task offers: JSON values, and taking them back."""

    def state_dict(self) -> dict[str, Any]:
        """JSON values to remember."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse."""


class Beside(Protocol):
    """What has tensors of its own.

    Attributes:
        prefix: how their names begin, one of PREFIXES.
    """

    @property
    def prefix(self) -> str:
        """How their names begin."""

    def parts(self) -> list[tuple[Entry, torch.Tensor]]:
        """Every tensor as this rank holds it."""

    def aliases(self) -> dict[str, str]:
        """Tied names."""

    def begin(self) -> None:
        """Begin anew, from a model that was just read: the checkpoint has none of these tensors."""


@dataclass(frozen=True)
class Change:
    """What a run has otherwise than its checkpoint, after `--change`.

    Attributes:
        begins: prefixes of which the checkpoint has nothing.
        left: names in the checkpoint that this run has no use for.
        decisions: this, for whoever announces the resume.
    """

    begins: tuple[str, ...]
    left: set[str]
    decisions: tuple[Decision, ...]


def compare_beside(beside: Sequence[Beside], names: Iterable[str]) -> Change:
    """Compare what this run has with the tensors' names in a checkpoint."""
    ours, theirs = {other.prefix for other in beside}, dict[str, set[str]]()
    for name in names:
        prefix = f"{name.partition('.')[0]}."
        if prefix in PREFIXES:
            theirs.setdefault(prefix, set()).add(name)
    begins = tuple(sorted(ours - theirs.keys()))
    gone = sorted(theirs.keys() - ours)
    said = [Decision(f"{PREFIXES[prefix]} begins here", "the checkpoint has none") for prefix in begins]
    said += [Decision(f"{PREFIXES[prefix]} ends here", "the configuration no longer asks for it") for prefix in gone]
    return Change(begins, {name for prefix in gone for name in theirs[prefix]}, tuple(said))
