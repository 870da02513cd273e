"""Where groups lie: by hand, and beside a count of every rank of the mesh."""

from collections import Counter, defaultdict

import pytest

from allranks.even_cut import divisors
from allranks.planning.group_places import Places, Steps, places_of


def counted(domain: int, world: int, steps: Steps) -> Places:
    """Every rank in turn: a group's ranks have the same number but for their places along its steps."""
    groups: dict[int, Counter[int]] = defaultdict(Counter)
    for rank in range(world):
        begin = rank - sum(rank // stride % size * stride for size, stride in steps)
        groups[begin][rank // domain] += 1
    found = groups.values()
    return Places(min(min(ranks.values()) for ranks in found), max(map(len, found)))


def every_axis(world: int) -> list[Steps]:
    """(size, stride) of every axis that a layout of so many ranks can have."""
    return [((size, stride),) for stride in divisors(world) for size in divisors(world // stride)]


def test_six_neighbours_on_nodes_of_eight_are_split_two_and_four() -> None:
    """{0-5} lies in the first node, {6-11} has two ranks there and four in the second."""
    assert places_of(8, 24, ((6, 1),)) == Places(2, 2)
    assert places_of(8, 24, ((12, 1),)) == Places(4, 2)
    assert places_of(8, 24, ((3, 1),)) == Places(1, 2)
    assert places_of(8, 6, ((6, 1),)) == Places(6, 1)  # there are no others


def test_groups_that_line_up_lie_all_alike() -> None:
    assert places_of(8, 64, ((4, 1),)) == Places(4, 1)
    assert places_of(8, 64, ((4, 2),)) == Places(4, 1)
    assert places_of(8, 64, ((16, 1),)) == Places(8, 2)
    assert places_of(8, 64, ((8, 8),)) == Places(1, 8)
    assert places_of(8, 64, ((1, 4),)) == Places(1, 1)


@pytest.mark.parametrize(("world", "domain"), [(24, 8), (64, 8), (48, 6), (144, 72), (96, 36), (100, 72), (60, 1)])
def test_every_axis_is_laid_as_a_count_has_it(world: int, domain: int) -> None:
    for steps in every_axis(world):
        assert places_of(domain, world, steps) == counted(domain, world, steps), steps


def test_a_group_of_two_axes_has_those_between_left_out() -> None:
    """cp=2 and every second of the data-parallel ranks, which hold the same experts: {0, 1, 4, 5, 8, 9, 12, 13}."""
    assert places_of(8, 32, ((2, 1), (4, 4))) == Places(4, 2)
    for world, domain in ((32, 8), (48, 8), (96, 36), (64, 4)):
        for size, stride in ((2, 1), (2, 2), (3, 1), (4, 2)):
            for gap in (1, 2, 4):
                outer = size * stride * gap
                for many in divisors(world // outer) if world % outer == 0 else ():
                    steps = ((size, stride), (many, outer))
                    assert places_of(domain, world, steps) == counted(domain, world, steps), (world, domain, steps)
