"""Where the groups of an axis lie among a cluster's domains, whose ranks are numbered one domain after the other."""

import math
from collections import Counter
from functools import lru_cache
from itertools import product
from typing import NamedTuple, final

Steps = tuple[tuple[int, int], ...]
"""Of a group: (how many, how far apart), innermost first; each has as many of what stands before it."""


@final
class Places(NamedTuple):
    """Of all groups of an axis, whose ranks wait for each other, those that lie worst.

    Attributes:
        near: ranks of one group in one domain, the fewest; all of a group, where each stays in one domain.
        domains: over which a group is spread, that over the most.
    """

    near: int
    domains: int


@lru_cache(maxsize=65536)
def places_of(domain: int, world: int, steps: Steps) -> Places:
    """Of the groups of `steps` among `world` ranks, in domains of so many: arithmetic of the mesh, which numbers ranks
    row-major (parallel/mesh.py). Where a domain and the groups divide each other all lie alike.
    """
    if not steps:
        return Places(1, 1)
    *inner, (size, stride) = steps
    if size == 1 or stride % domain == 0:
        near, domains = places_of(domain, world, tuple(inner))
        return Places(near, domains * size)
    members, (room, left) = math.prod(many for many, _ in inner), divmod(domain, stride)
    if not left and room % size == 0:
        return Places(members * size, 1)
    if not left and size % room == 0:
        return Places(members * room, size // room)
    return _walk(domain, world, steps)


def _walk(domain: int, world: int, steps: Steps) -> Places:
    """The same of any: every group that begins elsewhere in a domain is laid once."""
    *inner, (size, stride) = steps
    offsets = [sum(place) for place in product(*(range(0, many * apart, apart) for many, apart in steps))]
    first = [rank for rank in range(stride) if all(rank // apart % many == 0 for many, apart in inner)]
    block = size * stride
    blocks = range(0, min(world, math.lcm(block, domain)), block)
    begins = {(start + rank) % domain for start in blocks for rank in first}
    laid = [Counter((begin + offset) // domain for offset in offsets) for begin in begins]
    return Places(min(min(ranks.values()) for ranks in laid), max(map(len, laid)))
