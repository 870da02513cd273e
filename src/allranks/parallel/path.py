"""Which units this rank's forwards have entered and its backwards have reduced, in order.

Under FSDP entering a unit is a collective: ranks that enter different units gather parts of different parameters into
one, and compute with the mixture without a word; likewise they add up gradients of different parameters. So are the
statistics of a synchronised BatchNorm and the tokens of cut experts, under every layout. So the ranks compare their
paths, one step after the other; those of a pipeline within each stage.
"""

import zlib
from collections.abc import Callable, Sequence
from typing import Final, final

import torch.distributed as dist
from torch import nn

DIGEST_BITS = 16

STATISTICS: Final = "the statistics of "
"""Before the name of a BatchNorm, where the ranks take its statistics, or their gradients, together."""

EXPERTS: Final = "the experts "
"""Before the name of a module of experts, where the ranks exchange its tokens."""


@final
class Path:
    """What one rank has entered since it was last asked.

    Attributes:
        wait: how to wait for a collective that other ranks may not be about to join.
    """

    END: Final = "."  # of a forward of the model; no module has this name

    def __init__(self) -> None:
        self.wait: Callable[[dist.Work], object] = wait_plainly
        # (calls to `take`, what was entered before the last one, and since): one value, as another thread may look.
        self._noted: tuple[int, tuple[str, ...], list[str]] = (0, (), [])

    def follow(self, module: nn.Module, name: str) -> None:
        """Note every forward of `module` under `name`; the end of it, where that is the model ("")."""
        # First of all hooks: FSDP2's waits for the other ranks.
        module.register_forward_pre_hook(lambda *_: self._noted[2].append(name), prepend=True)
        if not name:
            module.register_forward_hook(lambda *_: self._noted[2].append(self.END))

    def note(self, reduced: str) -> None:
        """Note what the ranks are about to reduce together."""
        self._noted[2].append(reduced)

    def take(self) -> tuple[str, ...]:
        """The names since the last call, in order."""
        taken, _, entered = self._noted
        self._noted = (taken + 1, tuple(entered), [])
        return self._noted[1]

    def told(self) -> dict[int, tuple[tuple[str, ...], bool]]:
        """By the number of calls to `take` before: what was entered then, and whether it was taken; the last two."""
        taken, before, entered = self._noted
        now = {taken: (tuple(entered), False)}
        return now if not taken else {taken - 1: (before, True), **now}


def wait_plainly(work: dist.Work) -> None:
    """Wait for a collective, however long it takes."""
    work.wait()


def path_digest(path: Sequence[str]) -> int:
    """A number of 16 bits: its sum and the sum of its squares over many ranks are exact enough in float64."""
    return zlib.crc32("".join(f"{name}\n" for name in path).encode()) & ((1 << DIGEST_BITS) - 1)


def differ(num_ranks: float, total: float, squares: float) -> bool:
    """Whether the ranks' digests, of which these are the sums, are not all the same: their variance is not zero."""
    return num_ranks * squares - total * total > (num_ranks - 1) / 2
