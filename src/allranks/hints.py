"""What a Task says of its model that allranks cannot find by looking at it: `Hints`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from allranks.errors import TaskError

__all__ = ["BatchStatistics", "Hints", "TensorStyle", "check_names"]

BatchStatistics = Literal["sync", "local", "broadcast"]
TensorStyle = Literal["colwise", "rowwise", "heads", "vocab", "sequence", "part", "replicate"]


@dataclass(frozen=True, slots=True)
class Hints:
    """What allranks cannot find by looking at the module. All fields are optional; names may be globs ("layers.*").

    Attributes:
        blocks: modules to be gathered, recomputed and compiled as one unit.
        tensor: module -> how tensor parallelism splits it.
        loss_parallel: whether logits stay cut over tp until `loss`, which uses `allranks.losses.cross_entropy`.
        split_before: modules before which a pipeline may be cut.
        sequence_dims: batch entry ("x", a tuple's "0", a nested "inputs.x") -> the dim of its positions, which cp cuts.
        optional: modules that a forward may leave out on some ranks; they get zero gradients then.
        small: settings that make the model small enough for `allranks verify`.
        batchnorm: whose samples a batch statistic sees, where `layout.batchnorm` does not say it.
    """

    blocks: Sequence[str] = ()
    tensor: Mapping[str, TensorStyle] = field(default_factory=dict)
    loss_parallel: bool = False
    split_before: Sequence[str] = ()
    sequence_dims: Mapping[str, int] = field(default_factory=dict)
    optional: Sequence[str] = ()
    small: Mapping[str, object] = field(default_factory=dict)
    batchnorm: BatchStatistics | None = None

    def __post_init__(self) -> None:
        """Raise TaskError where a value is of another kind than it should be."""
        lists = {"blocks": self.blocks, "split_before": self.split_before, "optional": self.optional}
        mappings = {"tensor": self.tensor, "sequence_dims": self.sequence_dims, "small": self.small}
        check_names("hints().{}", lists, mappings)
        known = get_args(BatchStatistics)
        if self.batchnorm is not None and self.batchnorm not in known:
            raise TaskError(f"hints().batchnorm is {self.batchnorm!r}: expected one of {', '.join(known)}, or None")


def check_names(source: str, lists: Mapping[str, object], mappings: Mapping[str, object]) -> None:
    """Refuse what is no list of names, a single string above all, which is a sequence too: of its letters.

    Args:
        source: how a field is written there, "hints().{}".
        lists: what should be sequences of names, by field.
        mappings: what should be mappings from names, by field.

    Raises:
        TaskError: one is something else.
    """
    for name, given in lists.items():
        written = source.format(name)
        if isinstance(given, str):
            raise TaskError(f"{written} is the string {given!r}: give a list, [{given!r}]")
        if not isinstance(given, Sequence) or not all(isinstance(one, str) for one in given):
            raise TaskError(f"{written} is {given!r}: give a list of modules' names")
    for name, given in mappings.items():
        if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
            raise TaskError(f"{source.format(name)} is {given!r}: give a dict whose keys are names")
