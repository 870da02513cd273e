"""Two of each kind: the first and the last rank of some stages."""

from allranks.layout import Layout
from allranks.rehearsing.world_of_ranks import choose_ranks


def test_kinds() -> None:
    assert choose_ranks("kinds", Layout()) == (0,)
    assert choose_ranks("kinds", Layout(dp_shard=8, tp=8)) == (0, 63)
    assert choose_ranks("kinds", Layout(pp=4, dp_shard=2, tp=8)) == (0, 15, 32, 47, 48, 63)
    assert choose_ranks("kinds", Layout(pp=2)) == (0, 1)
