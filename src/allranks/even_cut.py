"""Cut a row of costs into consecutive parts, so that the dearest part is as cheap as it can be.

The engine cuts a model's blocks into stages and devices with it, and the planner foresees the same cut. What divides a
number of samples or devices is found here, too.
"""

import math
from collections.abc import Iterator, Sequence

MOST_MICRO_STEPS = 100_000
"""Of a step: each has a place in memory, and more are a mistake."""


def divisors(number: int) -> list[int]:
    """All of them, ascending."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n < number]


def cut_evenly(costs: Sequence[float], num_parts: int) -> list[int]:
    """Where each of `num_parts` consecutive, non-empty parts of `costs` (none below 0) begins.

    Of equally good cuts it is the one whose last part begins first, then the one before it, and so on.
    """
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # Ends of what is cut so far -> its dearest part, where its parts begin.
    dearest, starts = {0: 0.0}, {0: list[int]()}
    for part in range(1, num_parts + 1):
        left = num_parts - part
        following: dict[int, float] = {}
        begins: dict[int, list[int]] = {}
        for end in range(part, len(costs) - left + 1):
            start = _best_start(dearest, sums, part - 1, end)
            following[end] = max(dearest[start], sums[end] - sums[start])
            begins[end] = [*starts[start], start]
        dearest, starts = following, begins
    return starts[len(costs)]


def cut_among(costs: Sequence[float], owners: Sequence[int]) -> list[int]:
    """Where each of `len(owners)` consecutive, non-empty parts begins, so that the dearest owner's parts are cheap.

    From the even cut one cost after another is handed from the dearest owner to another one, all borders between them
    moving by one, as long as that makes a cheaper whole. Where owners have one part each that is the even cut.

    Args:
        costs: none below 0.
        owners: who has each part.
    """
    starts = cut_evenly(costs, len(owners))
    if len(set(owners)) == len(owners):
        return starts
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    best = _dearness(starts, sums, owners)
    while True:
        better, found = min((_dearness(one, sums, owners), one) for one in _handed_on(starts, sums, owners))
        if better >= best:
            return starts
        best, starts = better, found


def _dearness(starts: Sequence[int], sums: Sequence[float], owners: Sequence[int]) -> tuple[list[float], float]:
    """What each owner has, the dearest first; then the dearest part."""
    parts = [sums[end] - sums[start] for start, end in zip(starts, [*starts[1:], len(sums) - 1], strict=True)]
    return sorted(_loads(parts, owners), reverse=True), max(parts)


def _loads(parts: Sequence[float], owners: Sequence[int]) -> list[float]:
    loads = dict.fromkeys(owners, 0.0)
    for part, owner in zip(parts, owners, strict=True):
        loads[owner] += part
    return list(loads.values())


def _handed_on(starts: list[int], sums: Sequence[float], owners: Sequence[int]) -> Iterator[list[int]]:
    """The cut as it is, and those with one cost less in a part of a dearest owner, and one more in another part."""
    yield starts
    ends = [*starts[1:], len(sums) - 1]
    parts = [sums[end] - sums[start] for start, end in zip(starts, ends, strict=True)]
    dearest = max(zip(_loads(parts, owners), dict.fromkeys(owners), strict=True))[1]
    for giver, owner in enumerate(owners):
        if owner != dearest or ends[giver] - starts[giver] == 1:
            continue
        for taker in range(len(owners)):
            if taker > giver:  # the borders between move back
                yield [start - (giver < part <= taker) for part, start in enumerate(starts)]
            elif taker < giver:
                yield [start + (taker < part <= giver) for part, start in enumerate(starts)]


def _best_start(dearest: dict[int, float], sums: list[float], first: int, end: int) -> int:
    """The first start of a last part that ends at `end` with which the dearest part is cheapest.

    The later it starts, the cheaper is that part, and the dearer are those before: the best is where both cross.
    """

    def whole(start: int) -> float:
        return max(dearest[start], sums[end] - sums[start])

    low, high = first, min(end - 1, max(dearest))
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if dearest[middle] >= sums[end] - sums[middle] else (middle + 1, high)
    found = low - 1 if low > first and whole(low - 1) <= whole(low) else low
    while found > first and whole(found - 1) == whole(found):
        found -= 1
    return found
