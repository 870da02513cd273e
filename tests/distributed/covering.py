"""Which cases of a large table are run by every `make test`: few that cover every pair of values."""

import heapq
from collections.abc import Hashable, Sequence
from itertools import combinations
from typing import TypeVar

Case = tuple[Hashable, ...]
C = TypeVar("C", bound=Case)


def pairs(case: Case) -> set[tuple[int, Hashable, int, Hashable]]:
    """(column, value, column, value) of every two columns of a case."""
    return {(i, case[i], j, case[j]) for i, j in combinations(range(len(case)), 2)}


def covering_sample(cases: Sequence[C]) -> list[C]:
    """Cases that together hold every pair of values that any case holds, in the order of `cases`.

    Greedy, without chance: always the first of those that bring the most pairs that are still missing. What a case
    brings only ever shrinks, so a stale bound at the top of the heap is renewed until it stays there.
    """
    held = [pairs(case) for case in cases]
    missing = set().union(*held)
    heap = [(-len(held[index]), index) for index in range(len(cases))]
    heapq.heapify(heap)
    chosen: list[int] = []
    while missing:
        bound, index = heapq.heappop(heap)
        brings = len(held[index] & missing)
        if brings < -bound:
            heapq.heappush(heap, (-brings, index))
            continue
        chosen.append(index)
        missing -= held[index]
    return [cases[index] for index in sorted(chosen)]
