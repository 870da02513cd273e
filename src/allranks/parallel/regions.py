"""Random numbers under tensor parallelism (law 6): one stream where tensors are whole, one a rank where they are cut.

Dropout on a whole activation has to draw the same mask on every rank of a tp group; on a cut one each rank has other
elements, and one mask for all would repeat it. What is drawn depends on nothing but the generator's state, so that a
recomputed forward draws the same.
"""

from typing import final

import torch

from allranks.seeds import part_key

_LARGEST_DRAW = 1 << 62


@final
class Regions:
    """Where a forward stands: in code that sees whole tensors, or in a region that sees this rank's part.

    Args:
        coordinate: of this rank along the axis over which tensors are cut.
    """

    def __init__(self, coordinate: int) -> None:
        self.inside = False
        self._coordinate = coordinate
        self._common = 0

    def begin(self) -> None:
        """A forward begins, whole: one before it may have failed in a region, or a recomputation have ended in one.

        Who has seeded the generator since then, or put it back, is not overruled.
        """
        self._look()
        self.exit()

    def enter(self) -> None:
        """What follows is cut; nothing where it is already.

        A recomputed block that opens a region may come after another that has ended in its own.
        """
        self._look()
        if not self.inside:
            self.inside = True
            self._common = int(torch.randint(_LARGEST_DRAW, ()))
            _seed(self._key(self._coordinate + 1))

    def exit(self) -> None:
        """What follows is whole again; nothing where it is already."""
        if self.inside:
            self.inside = False
            _seed(self._key(0))

    def _look(self) -> None:
        """It is left where the generator has another seed than the region's."""
        if self.inside and torch.default_generator.initial_seed() != self._key(self._coordinate + 1):
            self.inside = False

    def _key(self, index: int) -> int:
        return part_key(self._common, index)


def _seed(key: int) -> None:
    torch.default_generator.manual_seed(key)
    if torch.cuda.is_initialized():
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(key)
