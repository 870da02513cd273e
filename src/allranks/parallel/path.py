"""Which units this rank's forwards have entered, in order.

Under FSDP entering a unit is a collective: ranks that enter different units gather parts of different parameters into
one, and compute with the mixture without a word. So the ranks compare their paths, one step after the other.
"""

import zlib
from collections.abc import Sequence
from typing import final

from torch import nn

DIGEST_BITS = 16


@final
class Path:
    """What one rank has entered since it was last asked."""

    def __init__(self) -> None:
        self._entered: list[str] = []

    def follow(self, module: nn.Module, name: str) -> None:
        """Note every forward of `module` under `name`."""
        module.register_forward_pre_hook(lambda *_: self._entered.append(name))

    def take(self) -> tuple[str, ...]:
        """The names since the last call, in order."""
        entered, self._entered = tuple(self._entered), []
        return entered


def path_digest(path: Sequence[str]) -> int:
    """A number of 16 bits: its sum and the sum of its squares over many ranks are exact enough in float64."""
    return zlib.crc32("".join(f"{name}\n" for name in path).encode()) & ((1 << DIGEST_BITS) - 1)


def differ(num_ranks: float, total: float, squares: float) -> bool:
    """Whether the ranks' digests, of which these are the sums, are not all the same: their variance is not zero."""
    return num_ranks * squares - total * total > (num_ranks - 1) / 2
