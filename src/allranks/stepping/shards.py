"""Are parts that must differ different? Ranks that hold other parts of the same tensors must not hold the same numbers.

Layers that each rank has made for itself, from one seed, are as many copies of one part: the run has the width of one
rank, and looks well.
"""

import zlib
from collections.abc import Sequence
from typing import Any, ClassVar, final

import torch

from allranks.parallel.spread import Spread
from allranks.stepping.sentinel import RoundSentinel
from allranks.verdict import Verdict

SAMPLED = 256
"""So many elements of a part are looked at, evenly spaced."""
FEWEST = 2
"""Parameters whose parts are alike: of one alone that may be meant."""


@final
class Shards(RoundSentinel):
    """Compares a few numbers of every part of a parameter with those that hold other parts."""

    name: ClassVar[str] = "shards"

    def __init__(self, spread: Spread) -> None:
        self._spread = spread
        self._names = [
            name
            for name, entry in spread.map.items()
            if entry.kind == "parameter" and entry.sharded and entry.alias_of is None and entry.box.num_elements > 1
        ]

    def tell(self) -> list[int]:
        """[digest of which parts, of their numbers, how many they are], of those that are not one number all over."""
        which, numbers, count = 0, 0, 0
        for name, part in zip(self._names, self._samples(), strict=True):
            if not (part == part[0]).all():
                which = zlib.crc32(f"{name} {self._spread.map[name].box.offset}".encode(), which)
                numbers = zlib.crc32(part.tobytes(), zlib.crc32(name.encode(), numbers))
                count += 1
        return [which, numbers, count]

    def _samples(self) -> list[Any]:
        """A few numbers of each part, as numpy arrays of float64; fetched from the device together."""
        parts = [self._spread.local(name).reshape(-1) for name in self._names]
        chosen = [part[:: max(1, len(part) // SAMPLED)][:SAMPLED].to(self._spread.device) for part in parts]
        if not chosen:
            return []
        together = torch.cat([part.double() for part in chosen]).cpu()
        return [part.numpy() for part in together.split([len(part) for part in chosen])]

    def judge(self, told: Sequence[Any], step: int) -> Verdict | None:
        seen: dict[tuple[int, int], tuple[int, int]] = {}
        for rank, (which, numbers, count) in enumerate(told):
            if count < FEWEST:
                continue
            first, other = seen.setdefault((numbers, count), (rank, which))
            if other != which:
                what = (
                    f"after step {step} ranks {first} and {rank} hold the same numbers in all {count} parameters of "
                    "which they have different parts"
                )
                evidence = f"{SAMPLED} numbers of each part were compared"
                remedy = "let model() make whole tensors from one seed; never initialise a rank's part by itself"
                return Verdict("shards_alike", what, (evidence,), remedy)
        return None
