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
LOOKED_AT = 16
"""Parameters, evenly spaced: what is told must stay short where ranks are many."""
FEWEST = 2
"""Parameters whose parts are alike: of one alone that may be meant."""


@final
class Shards(RoundSentinel):
    """Compares a few numbers of every part of a parameter with those that hold other parts."""

    name: ClassVar[str] = "shards"

    def __init__(self, spread: Spread) -> None:
        self._spread = spread
        names = [
            name
            for name, entry in spread.map.items()
            if entry.kind == "parameter" and entry.sharded and entry.alias_of is None and len(entry.shape) > 1
        ]
        self._names = names[:: -(-len(names) // LOOKED_AT) or 1]

    def tell(self) -> list[list[Any]]:
        """[name, offset of this rank's part, digest of its numbers], of those that are not one number all over."""
        return [
            [name, list(self._spread.map[name].box.offset), zlib.crc32(part.tobytes())]
            for name, part in zip(self._names, self._samples(), strict=True)
            if len(part) and not (part == part[0]).all()
        ]

    def judge(self, told: Sequence[Any], step: int) -> Verdict | None:
        first: dict[tuple[str, int], tuple[int, list[int]]] = {}
        alike: dict[tuple[int, int], list[str]] = {}
        for rank, parts in enumerate(told):
            for name, offset, numbers in parts:
                other, other_offset = first.setdefault((name, numbers), (rank, offset))
                if other_offset != offset:
                    alike.setdefault((other, rank), []).append(name)
        for (one, other), names in alike.items():
            if len(names) >= FEWEST and 2 * len(names) >= _num_apart(told[one], told[other]):
                return _explain(one, other, names, step)
        return None

    def _samples(self) -> list[Any]:
        """A few numbers of each part, as numpy arrays of float64; fetched from the device together."""
        parts = [self._spread.local(name).reshape(-1) for name in self._names]
        chosen = [part[:: max(1, len(part) // SAMPLED)][:SAMPLED].to(self._spread.device) for part in parts]
        if not chosen:
            return []
        together = torch.cat([part.double() for part in chosen]).cpu()
        return [part.numpy() for part in together.split([len(part) for part in chosen])]


def _num_apart(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Of how many parameters two ranks hold different parts."""
    offsets = {name: offset for name, offset, _ in one}
    return sum(offsets.get(name, offset) != offset for name, offset, _ in other)


def _explain(one: int, other: int, names: Sequence[str], step: int) -> Verdict:
    more = f" and in {len(names) - 1} more" if len(names) > 1 else ""
    what = f"after step {step} ranks {one} and {other} hold different parts of {names[0]}{more}, but the same numbers"
    evidence = f"up to {SAMPLED} numbers of each part were compared"
    remedy = "let the model make whole tensors from one seed; never initialise a rank's part by itself"
    return Verdict("shards_alike", what, (evidence,), remedy)
