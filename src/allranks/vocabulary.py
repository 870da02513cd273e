"""A vocabulary that is cut over ranks: each has the scores (logits) of some of its words.

The logits of a language model, [positions, vocabulary], need not be whole for a cross-entropy: each rank reduces its
words to two numbers a position, and those are agreed over the ranks. Source: Megatron-LM (arXiv 1909.08053, section 3).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch.utils import _pytree as pytree

from allranks.errors import LayoutError


class CutVocabulary(ABC):
    """The words of this rank among those of the others. Ranks have other words and the same positions.

    Attributes:
        start, end: this rank's words; there may be none.
        num_words: of all ranks.
        axis: the words' axis and its degree, for messages: "tp=2".
    """

    start: int
    end: int
    num_words: int
    axis: str

    @abstractmethod
    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, whose gradient each of them gets; collective."""

    @abstractmethod
    def largest(self, value: torch.Tensor) -> torch.Tensor:
        """The largest of the ranks' values, element by element, without a gradient; collective."""

    @abstractmethod
    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """All words of a tensor of which each rank has its own, [..., end - start] -> [..., num_words]; collective."""

    def find(self, targets: torch.Tensor, ignored: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Which targets are words of this rank, and their places among them (0 where they are not).

        Raises:
            IndexError: one is neither a word of any rank nor `ignored` (on CUDA the device says so later).
        """
        valid = ((targets == ignored) | ((targets >= 0) & (targets < self.num_words))).all()
        if targets.device.type != "cpu":
            torch._assert_async(valid)
        elif not valid:
            raise IndexError(f"a target outside of 0 to {self.num_words - 1}")
        here = (targets >= self.start) & (targets < self.end) & (targets != ignored)
        return here, torch.where(here, targets - self.start, 0)

    def log_sum(self, of_part: torch.Tensor) -> torch.Tensor:
        """The log of the sum of exponentials over all words, from that over each rank's; -inf is a rank without any."""
        largest = self.largest(of_part.detach())
        # Where all is infinite nothing may be taken from it: the outcome is then what torch's logsumexp gives.
        largest = torch.where(largest.abs() == math.inf, 0.0, largest)
        return self.sum((of_part - largest).exp()).log() + largest


@final
@dataclass(frozen=True, slots=True, eq=False)
class CutLogits:
    """What a last layer returns under `hints().loss_parallel`: the logits of this rank's words, and whose they are.

    `allranks.losses.cross_entropy` takes it in the place of logits. It is no tensor: whoever takes it for one is told.

    Attributes:
        part: [..., end - start].
        vocabulary: which words those are.
    """

    part: torch.Tensor
    vocabulary: CutVocabulary

    def whole(self) -> torch.Tensor:
        """The logits of all words, [..., num_words], with gradients; collective over the ranks that share them."""
        return self.vocabulary.whole(self.part)

    def __getattr__(self, name: str) -> Any:
        """Raise LayoutError for what a tensor has."""
        if name.startswith("_") or not hasattr(torch.Tensor, name):
            raise AttributeError(f"{type(self).__name__} has no {name}")
        raise LayoutError(_advise(f".{name}", self.vocabulary))

    def __getitem__(self, place: object) -> torch.Tensor:
        """Raise LayoutError."""
        raise LayoutError(_advise("[...]", self.vocabulary))

    @classmethod
    def __torch_function__(
        cls, function: Any, types: object, arguments: Sequence[Any] = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        """Raise LayoutError, which names the torch function that was given cut logits."""
        cut = find_cut((arguments, named or {}))[0]
        raise LayoutError(_advise(f"{getattr(function, '__name__', function)}()", cut.vocabulary))


pytree.register_pytree_node(
    CutLogits,
    lambda logits: ([logits.part], logits.vocabulary),
    lambda parts, vocabulary: CutLogits(next(iter(parts)), vocabulary),
    serialized_type_name="allranks.vocabulary.CutLogits",
)


def find_cut(value: object) -> list[CutLogits]:
    """Those in a pytree."""
    leaves = pytree.tree_leaves(value, is_leaf=lambda leaf: isinstance(leaf, CutLogits))
    return [leaf for leaf in leaves if isinstance(leaf, CutLogits)]


def whole_logits(output: Any) -> Any:
    """The pytree `output` with whole tensors in the place of cut logits; collective where there are such."""

    def make_whole(leaf: Any) -> Any:
        return leaf.whole() if isinstance(leaf, CutLogits) else leaf

    return pytree.tree_map(make_whole, output, is_leaf=lambda leaf: isinstance(leaf, CutLogits))


def _advise(what: str, vocabulary: CutVocabulary) -> str:
    return (
        f"{what} meets logits of which this process has words {vocabulary.start} to {vocabulary.end - 1} of "
        f"{vocabulary.num_words} ({vocabulary.axis}), because hints().loss_parallel says so: give them to "
        "allranks.losses.cross_entropy as they are, or leave that hint out"
    )
