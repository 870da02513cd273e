"""The first and the last rank of some stages, and neighbours along each axis; of a model by name, two of one stage."""

import numpy as np
import pytest

from allranks.layout import Layout
from allranks.parallel.mesh import MESH_AXES
from allranks.rehearsing.world_of_ranks import choose_ranks


def test_kinds() -> None:
    assert choose_ranks("kinds", Layout()) == (0,)
    assert choose_ranks("kinds", Layout(dp_shard=8, tp=8)) == (0, 1, 8, 63)
    assert choose_ranks("kinds", Layout(dp_shard=64)) == (0, 1, 63)
    assert choose_ranks("kinds", Layout(pp=4, dp_shard=2, tp=8)) == (0, 1, 8, 15, 32, 47, 48, 49, 56, 63)
    assert choose_ranks("kinds", Layout(pp=2)) == (0, 1)


@pytest.mark.parametrize(
    "layout", [Layout(dp_replicate=2, dp_shard=3, cp=2, tp=4), Layout(pp=2, dp_shard=2, cp=2, tp=2)]
)
def test_a_neighbour_differs_along_one_axis(layout: Layout) -> None:
    axes = [axis for axis in MESH_AXES if axis != "pp" and getattr(layout, axis) > 1]
    shape = [getattr(layout, axis) for axis in axes]
    each = layout.world_size // layout.pp
    for first in {0, layout.world_size - each}:
        ranks = [rank - first for rank in choose_ranks("kinds", layout) if first < rank < first + each - 1]
        coordinates = {tuple(int(place) for place in np.unravel_index(rank, shape)) for rank in ranks}
        assert coordinates == {tuple(int(axis == other) for other in axes) for axis in axes}


def test_of_a_model_by_name_no_stage_depends_on_the_rank() -> None:
    assert choose_ranks("kinds", Layout(), of_a_user=False) == (0,)
    assert choose_ranks("kinds", Layout(dp_shard=64), of_a_user=False) == (0, 63)
    assert choose_ranks("kinds", Layout(pp=8, dp_shard=8), of_a_user=False) == (0, 7, 32, 56)
