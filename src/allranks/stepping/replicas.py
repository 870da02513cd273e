"""Copies of a parameter that must be alike, compared by a digest: what a bit that flipped on one rank leaves behind.

Whatever the layout, a ParameterMap says which ranks hold the very same part of a parameter: those are compared, along
whichever axes. One number a rank and set of such ranks is exchanged; single tensors only where these differ. What all
copies have alike is not seen: an error before the gradients were reduced, in the data, or in the only copy.
"""

import socket
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch.distributed as dist

from allranks.checkpointing.parts import tensor_digest
from allranks.digest import mix
from allranks.parallel.spread import Spread
from allranks.stepping.alike import everyones

MASK = (1 << 64) - 1


@final
@dataclass(frozen=True, slots=True)
class Difference:
    """One part of a parameter that its holders do not have alike.

    Attributes:
        name: logical.
        holders: the global ranks that must have it alike.
        odd: those that most of the others outvote; () where there is no majority, as between two.
    """

    name: str
    holders: tuple[int, ...]
    odd: tuple[int, ...]


@final
@dataclass(frozen=True, slots=True)
class Comparison:
    """What differs, by name, and the host of every rank that is concerned."""

    differences: tuple[Difference, ...]
    hosts: Mapping[int, str]


def compare_replicas(spread: Spread, group: dist.ProcessGroup | None) -> Comparison | None:
    """Compare every parameter with those that hold the same part; None where all are alike. Collective.

    Args:
        group: all ranks; None for one, which has nobody to be compared with.
    """
    if group is None:
        return None
    digests = _digests(spread)
    parts = {name: spread.map[name].holders for name in digests}
    sums: dict[tuple[int, ...], int] = {}
    for name, digest in digests.items():
        # An odd key for each name: two errors cannot cancel each other by being equal.
        sums[parts[name]] = (sums.get(parts[name], 0) + digest * (mix(zlib.crc32(name.encode())) | 1)) & MASK
    told = everyones([[list(holders), f"{total:016x}"] for holders, total in sums.items()], group, spread.device)
    if not _differ(told):
        return None
    named = [[name, list(parts[name]), f"{digest & MASK:016x}"] for name, digest in digests.items()]
    every = everyones([socket.gethostname(), named], group, spread.device)
    return Comparison(find_differences([rank_parts for _, rank_parts in every]), dict(enumerate(h for h, _ in every)))


def find_differences(told: Sequence[Sequence[Sequence[Any]]]) -> tuple[Difference, ...]:
    """What differs among what the ranks tell, by rank: name, holders and digest of each of their parts."""
    found: dict[tuple[str, tuple[int, ...]], dict[int, str]] = {}
    for rank, parts in enumerate(told):
        for name, holders, digest in parts:
            found.setdefault((name, tuple(holders)), {})[rank] = digest
    return tuple(
        Difference(name, holders, _outvoted(digests))
        for (name, holders), digests in found.items()
        if len(set(digests.values())) > 1
    )


def _outvoted(digests: Mapping[int, str]) -> tuple[int, ...]:
    (digest, votes), *_ = Counter(digests.values()).most_common(1)
    if 2 * votes <= len(digests):
        return ()
    return tuple(rank for rank, other in digests.items() if other != digest)


def _differ(told: Sequence[Sequence[Sequence[Any]]]) -> bool:
    seen: dict[tuple[int, ...], str] = {}
    return any(seen.setdefault(tuple(holders), total) != total for sums in told for holders, total in sums)


def _digests(spread: Spread) -> dict[str, int]:
    """Logical name -> digest of this rank's part, of every parameter that others hold, too."""
    asked = (
        (name, entry)
        for name, entry in spread.map.items()
        if entry.kind == "parameter" and entry.alias_of is None and len(entry.holders) > 1
    )
    return {name: tensor_digest(spread.local(name), entry.box.offset) for name, entry in asked}
