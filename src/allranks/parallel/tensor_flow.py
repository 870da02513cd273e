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


@final
class Flow:
    """What passes between the modules of one model during a forward.

    Args:
        group: the tp ranks.
        sequence: whether activations between cut layers are cut along the sequence.
    """

    def __init__(self, group: dist.ProcessGroup, *, sequence: bool) -> None:
        self.group = group
        self.sequence = sequence
        self.rank = dist.get_rank(group)
        self.regions = Regions(self.rank)
        self.length = 0
        self._entered: tuple[torch.Tensor, int, torch.Tensor] | None = None
        self._cut: dict[int, bool] = {}

    def begin(self, *_: object) -> None:
        """A forward begins: tensors are whole."""
        self.regions.inside = False
        self._entered = None

    def end(self, module: nn.Module, arguments: object, output: object) -> object:
        """A forward ends; whoever asked for it sees whole tensors."""
        self._entered = None
        if not (self.sequence and self.regions.inside):
            return output
        self.regions.exit()
        return pytree.tree_map_only(torch.Tensor, self._whole_output, output)

    def _whole_output(self, value: torch.Tensor) -> torch.Tensor:
        start, end = part_bounds(self.length, dist.get_world_size(self.group), self.rank)
        cut = value.is_floating_point() and value.ndim > 1 and value.shape[POSITIONS] == end - start
        return gather(value, self.group, POSITIONS, self.length) if cut else value

    def meets_positions(self, module: nn.Module) -> bool:
        """Whether `module` is given activations that are cut along the sequence.

        What its first forward saw holds for good: a recomputed block begins in the middle of a forward.
        """
        return self._cut.setdefault(id(module), self.sequence and self.regions.inside)

    def enter(self, value: torch.Tensor, *, cut: bool) -> torch.Tensor:
        """The input of a layer that is cut by columns; made once for all layers that share it (query, key, value).

        Args:
            cut: whether it has some of the positions only.
        """
        if self._entered is not None and self._entered[0] is value and self._entered[1] == value._version:
            return self._entered[2]
        whole = gather_sum(value, self.group, POSITIONS, self._length_of(value)) if cut else enter(value, self.group)
        self._entered = (value, value._version, whole)
        return whole

    def leave(self, partial_sum: torch.Tensor, *, opens: bool) -> torch.Tensor:
        """What each rank has a partial sum of: whole, or this rank's positions.

        Args:
            opens: whether activations were whole before.
        """
        self._entered = None
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
