"""Two of each kind: the first and the last rank of some stages; of a model by name, two of the first stage."""

from allranks.layout import Layout
from allranks.rehearsing.world_of_ranks import choose_ranks


def test_kinds() -> None:
    assert choose_ranks("kinds", Layout()) == (0,)
    assert choose_ranks("kinds", Layout(dp_shard=8, tp=8)) == (0, 63)
    assert choose_ranks("kinds", Layout(pp=4, dp_shard=2, tp=8)) == (0, 15, 32, 47, 48, 63)
    assert choose_ranks("kinds", Layout(pp=2)) == (0, 1)


def test_of_a_model_by_name_no_stage_depends_on_the_rank() -> None:
    assert choose_ranks("kinds", Layout(), of_a_user=False) == (0,)
    assert choose_ranks("kinds", Layout(dp_shard=64), of_a_user=False) == (0, 63)
    assert choose_ranks("kinds", Layout(pp=8, dp_shard=8), of_a_user=False) == (0, 7, 32, 56)
