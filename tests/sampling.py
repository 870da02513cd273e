"""`@pytest.mark.sample(n)`: of a function's cases one in n belongs to `make test`, and all to `make test-full`.

Those that the smoke subset names are among them, and then those with the smallest crc32 of their node id: a fixed rule,
under which a new case seldom changes which of the others are taken.
"""

import zlib
from collections import defaultdict
from collections.abc import Collection, Sequence

import pytest

from tests.smoke import CASES, is_case


def taken(node_ids: Collection[str], one_in: int) -> set[str]:
    """One in so many, rounded up, but all that the smoke subset names."""
    named = {node_id for node_id in node_ids if any(is_case(node_id, case) for case in CASES)}
    rest = sorted(set(node_ids) - named, key=lambda node_id: (zlib.crc32(node_id.encode()), node_id))
    return named | set(rest[: max(0, -(-len(node_ids) // one_in) - len(named))])


def left_to_full(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """What a sample leaves out, function by function; who asks for a single case gets it."""
    functions: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sample") is not None and item.get_closest_marker("full") is None:
            functions[item.nodeid.partition("[")[0]].append(item)
    left = list[pytest.Item]()
    for cases in functions.values():
        mark = cases[0].get_closest_marker("sample")
        assert mark is not None
        kept = taken([item.nodeid for item in cases], *mark.args)
        left += [item for item in cases if item.nodeid not in kept]
    return left
