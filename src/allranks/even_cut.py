"""Cut a row of costs into consecutive parts, so that the dearest part is as cheap as it can be.

The engine cuts a model's blocks into stages and devices with it, and the planner foresees the same cut.
"""

from collections.abc import Sequence


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
