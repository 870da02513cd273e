"""What some keep for themselves (`NAME@each`, a row each), read back by others, by more or fewer, or by one.

Exact where as many come back. Otherwise every one begins with the mean of what was kept, and where one value stands
for all, with that.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from allranks.checkpointing.checkpoint import Checkpoint
from allranks.checkpointing.index import Index, read_index
from allranks.checkpointing.restore import fill
from allranks.parameter_map import EACH, Box, Entry
from allranks.verdict import Decision

Pair = tuple[Entry, torch.Tensor]

OPTIONAL = (
    *("optimizer.powersgd_error.", "optimizer.powersgd_q."),
    *("optimizer.outer_momentum.", "optimizer.copy."),
)
"""What a run may begin with in the middle, and end with: it belongs to how replicas speak, not to the model."""


@dataclass(frozen=True)
class Adapted:
    """What is left to do after `adapt`.

    Attributes:
        fitting: parts that stand in the checkpoint as they are here, to be restored as usual.
        leftover: names in the checkpoint that are none of these.
        averaged: names here that took a mean over others.
        decisions: what goes on otherwise than it was.
    """

    fitting: list[Pair]
    leftover: frozenset[str]
    decisions: tuple[Decision, ...]


def adapt(
    checkpoint: Checkpoint,
    parts: Iterable[Pair],
    everywhere: Callable[[Iterable[str]], set[str]] = set,
    index: Index | None = None,
) -> Adapted:
    """Fill those of `parts` (this rank's) that the checkpoint has otherwise, and say what is left.

    OPTIONAL ones that it does not have stay as they are.

    Args:
        everywhere: names -> those of the other stages of a pipeline, too; called three times on every rank.
        index: the checkpoint's, where it has been read.
    """
    tensors = checkpoint.manifest.tensors
    fitting, read, begun = list[Pair](), set[str](), set[str]()
    for entry, tensor in parts:
        name = entry.name
        source = _source(name, tensors)
        if source == name and tensors[name].shape == entry.shape:
            fitting.append((entry, tensor))
        elif source is not None and _counts(entry, source, tensors[source].shape):
            index = read_index(checkpoint.path, checkpoint.manifest) if index is None else index
            _read(checkpoint, index, source, entry, tensor)
            read.add(source)
        elif name.startswith(OPTIONAL):
            begun.add(name)
        else:
            fitting.append((entry, tensor))  # where it is refused, with the numbers
    here, read, begun = everywhere(entry.name for entry, _ in fitting), everywhere(read), everywhere(begun)
    leftover = {name for name in tensors if name.startswith(OPTIONAL) or name.endswith(EACH)} | read
    leftover -= here
    return Adapted(fitting, frozenset(leftover), _describe(checkpoint, read, begun, leftover - read))


def _describe(
    checkpoint: Checkpoint, read: Collection[str], begun: Collection[str], dropped: Collection[str]
) -> tuple[Decision, ...]:
    found = []
    kinds = sorted({_kind(name) for name in read if name.endswith(EACH)})
    if kinds:
        number = checkpoint.manifest.tensors[next(name for name in read if name.endswith(EACH))].shape[0]
        what = f"{', '.join(kinds)} go on from the mean"
        found.append(Decision(what, f"{number} have saved their own, and others go on"))
    if begun:
        what = f"{', '.join(sorted({_kind(name) for name in begun}))} begin anew"
        found.append(Decision(what, "the checkpoint has none that fit"))
    kinds = sorted({_kind(name) for name in dropped})
    if kinds:
        found.append(Decision(f"{', '.join(kinds)} of the checkpoint are left out", "this layout has no use for them"))
    return tuple(found)


def _kind(name: str) -> str:
    """`exp_avg` of `optimizer.exp_avg.layers.0.weight@each`."""
    return name.split(".")[1]


def _source(name: str, tensors: Any) -> str | None:
    """Under which name the checkpoint has it."""
    twin = name.removesuffix(EACH) if name.endswith(EACH) else name + EACH
    return name if name in tensors else twin if twin in tensors else None


def _counts(entry: Entry, source: str, shape: Sequence[int]) -> bool:
    """Whether the two are alike but for how many rows there are, or whether there are rows at all."""
    if not (entry.name + source).count(EACH):
        return False
    mine = entry.shape[1:] if entry.name.endswith(EACH) else entry.shape
    return tuple(shape[1:] if source.endswith(EACH) else shape) == tuple(mine)


def _read(checkpoint: Checkpoint, index: Index, source: str, entry: Entry, tensor: torch.Tensor) -> None:
    """The box of `tensor`, from the one value there is, or as the mean over the rows."""
    target, box = tensor.detach(), entry.box
    if entry.name.endswith(EACH):
        target, box = target[0], Box(box.offset[1:], box.shape[1:])
    if not source.endswith(EACH):
        fill(checkpoint, ((part, box, target) for part in index[source]))
        return
    number = checkpoint.manifest.tensors[source].shape[0]
    total = torch.zeros_like(target, dtype=torch.float64)
    row = target.new_empty((1, *target.shape))
    for at in range(number):
        place = Box((at, *box.offset), (1, *box.shape))
        fill(checkpoint, ((part, place, row) for part in index[source]))
        total += row[0]
    target.copy_(total / number)
