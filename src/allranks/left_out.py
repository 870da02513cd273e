"""Ranges of positions in the order of samples that a run never feeds: what `data.skip` names, as one value.

The order itself stays what it is, so that a position means the same sample with and without them. What is left out is
not seen: learning rate, steps and random numbers go on by the samples that were fed.
"""

import re
from dataclasses import dataclass
from typing import final

_RANGE = re.compile(r"(\d+):(\d+)")


@final
@dataclass(frozen=True, slots=True)
class LeftOut:
    """Disjoint ranges, ascending.

    Attributes:
        ranges: (first position, first position after it), each of at least one; () where all is fed.
    """

    ranges: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        """Raises ValueError, in words, for ranges that are empty or overlap."""
        reached = 0
        for first, past in self.ranges:
            if first >= past:
                raise ValueError(f"{first}:{past} holds no position: a range is FIRST:PAST, with PAST left in")
            if first < reached:
                raise ValueError(f"{first}:{past} begins before position {reached}: name ranges in order, none twice")
            reached = past

    @classmethod
    def parse(cls, text: str) -> "LeftOut":
        """From `64:96,128:160`; nothing from "". Raises ValueError, in words."""
        found = []
        for part in filter(None, (part.strip() for part in text.split(","))):
            match = _RANGE.fullmatch(part)
            if match is None:
                raise ValueError(f"{part!r} is no range of positions: expected FIRST:PAST, such as 64:96")
            found.append((int(match[1]), int(match[2])))
        return cls(tuple(found))

    def __str__(self) -> str:
        return ",".join(f"{first}:{past}" for first, past in self.ranges)

    def and_also(self, first: int, past: int) -> "LeftOut":
        """With one range more: what of it is left out already stays a range, which begins where the one before ends.

        So none becomes part of another, and their number tells how often something was left out.
        """
        apart = [one for one in self.ranges if one[1] <= first or past <= one[0]]
        within = [one for one in self.ranges if one not in apart]
        ends = [one[1] for one in within]
        if not ends or ends[-1] < past:
            ends.append(past)
        begins = [min(first, *(one[0] for one in within), first), *ends[:-1]]
        return LeftOut(tuple(sorted((*apart, *zip(begins, ends, strict=True)))))

    def covers(self, other: "LeftOut") -> bool:
        """Whether all that `other` leaves out is left out here, too."""
        return all(self.before(past) - self.before(first) == past - first for first, past in other.ranges)

    def beyond(self, position: int) -> int:
        """`position`, or the first one after it that is fed."""
        for first, past in self.ranges:
            if first <= position < past:
                position = past
        return position

    def before(self, position: int) -> int:
        """How many positions before `position` are left out."""
        return sum(min(past, position) - first for first, past in self.ranges if first < position)

    def next_after(self, position: int) -> int | None:
        """Where the next range begins, at `position` or after it; None: there is none."""
        return next((first for first, _ in self.ranges if first >= position), None)

    def misplaced(self, position: int, size: int) -> int | None:
        """The first position after `position` at which a range begins in the middle of a step; None: none does.

        Args:
            position: where a step begins.
            size: samples of a step.
        """
        for first, past in self.ranges:
            if first >= position:
                if (first - position) % size:
                    return first
                position = past
        return None
