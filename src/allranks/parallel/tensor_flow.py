"""What passes between the cut layers of a model: whole activations, or this rank's positions of a sequence."""

from typing import final

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from allranks.errors import LayoutError
from allranks.parallel.regions import Regions
from allranks.parallel.tensor_ops import enter, gather, gather_sum, leave, part_bounds, split, sum_split

POSITIONS = -2  # the dim of an activation that is cut along the sequence: [..., positions, channels]
CHANNELS = -1
POSITIONS_AND_CHANNELS = 2


@final
class Flow:
    """What passes between the modules of one model during a forward.

    Args:
        group: the tp ranks.
        sequence: whether activations between cut layers are cut along the sequence.
        loss_parallel: whether a last layer returns the logits of this rank's words only.
    """

    def __init__(self, group: dist.ProcessGroup, *, sequence: bool, loss_parallel: bool = False) -> None:
        self.group = group
        self.sequence = sequence
        self.loss_parallel = loss_parallel
        self.rank = dist.get_rank(group)
        self.regions = Regions(self.rank)
        self.length = 0
        self.ended = False
        self._entered: tuple[torch.Tensor, tuple[int, bool], torch.Tensor] | None = None
        self._cut: dict[int, bool] = {}

    def begin(self, *_: object) -> None:
        """A forward begins: tensors are whole, whatever became of the one before."""
        self.regions.begin()
        self.ended = False
        self._entered = None

    def end(self, module: nn.Module, arguments: object, output: object) -> object:
        """A forward ends; whoever asked for it sees whole tensors."""
        self._entered = None
        leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        if self.sequence and (self.regions.inside or any(map(self._is_cut, leaves))):
            raise LayoutError(
                f"what {type(module).__name__} returns is cut along the sequence: under sequence rules the model ends "
                "with a vocab layer, and returns its output only; leave sequence out of hints().tensor"
            )
        return output

    def _is_cut(self, value: torch.Tensor) -> bool:
        """Whether it looks like an activation of this rank's positions: [..., positions, channels]."""
        start, end = part_bounds(self.length, dist.get_world_size(self.group), self.rank)
        mine = value.ndim > POSITIONS_AND_CHANNELS and value.shape[POSITIONS] == end - start
        return value.is_floating_point() and mine and end - start != self.length

    def pass_head(self) -> None:
        """A vocab layer has made activations whole: under sequence rules nothing that is cut may come after it."""
        self.ended = self.sequence
        self.regions.exit()

    def meets_positions(self, module: nn.Module) -> bool:
        """Whether `module` is given activations that are cut along the sequence.

        What its first forward saw holds for good: a recomputed block begins in the middle of a forward.
        """
        if id(module) in self._cut:
            return self._cut[id(module)]
        if self.ended:
            raise LayoutError(
                f"{type(module).__name__} runs after the model's vocab layer, where activations are cut along the "
                "sequence: leave sequence out of hints().tensor"
            )
        return self._cut.setdefault(id(module), self.sequence and self.regions.inside)

    def enter(self, value: torch.Tensor, *, cut: bool) -> torch.Tensor:
        """The input of a layer that is cut by columns; made once for all layers that share it (query, key, value).

        Args:
            cut: whether it has some of the positions only.
        """
        # One that was made without gradients has none to hand on.
        state = (0 if value.is_inference() else value._version, torch.is_grad_enabled())
        if self._entered is not None and self._entered[0] is value and self._entered[1] == state:
            return self._entered[2]
        whole = gather_sum(value, self.group, POSITIONS, self._length_of(value)) if cut else enter(value, self.group)
        self._entered = (value, state, whole)
        return whole

    def forget(self) -> None:
        """No layer shares an input with those before: said before the product by rows.

        A block's recomputation ends where it has computed what its backward reads, which is in that product: what was
        remembered then would keep the activations of the block until another one is computed again.
        """
        self._entered = None

    def leave(self, partial_sum: torch.Tensor, *, opens: bool) -> torch.Tensor:
        """What each rank has a partial sum of: whole, or this rank's positions.

        Args:
            opens: whether activations were whole before.
        """
        if not self.sequence:
            return leave(partial_sum, self.group)
        self.length = partial_sum.shape[POSITIONS]
        if opens:
            self.regions.enter()
        return sum_split(partial_sum, self.group, POSITIONS)

    def cut_positions(self, value: torch.Tensor) -> torch.Tensor:
        """This rank's positions of a whole activation."""
        self.length = value.shape[POSITIONS]
        return split(value, self.group, POSITIONS)

    def whole_positions(self, value: torch.Tensor) -> torch.Tensor:
        """The inverse; what is no activation stays as it is."""
        return gather(value, self.group, POSITIONS, self._length_of(value)) if value.is_floating_point() else value

    def _length_of(self, value: torch.Tensor) -> int:
        start, end = part_bounds(self.length, dist.get_world_size(self.group), self.rank)
        if value.shape[POSITIONS] != end - start:
            raise LayoutError(
                f"a rank has {value.shape[POSITIONS]} positions of a sequence of {self.length} cut over tp: two "
                "sequences of unequal length cannot be cut in one model; leave sequence out of hints().tensor"
            )
        return self.length
