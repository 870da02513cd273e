"""Where a rank stands in a layout."""

import pytest
import torch.distributed as dist

from allranks.errors import LayoutError
from allranks.layout import Layout
from allranks.parallel.mesh import Mesh, build_mesh
from tests.distributed.pool import Pools


def test_one_process_needs_no_mesh() -> None:
    mesh = build_mesh(Layout(kind="single"), "cpu")
    assert (mesh.rank, mesh.dp, mesh.dp_rank, mesh.device_mesh) == (0, 1, 0, None)
    with pytest.raises(LayoutError, match=r"no axis 'dp_shard' in layout single: its axes are none \(one process\)"):
        mesh.group("dp_shard")


def look() -> tuple[int, int, int, list[int], list[int]]:
    mesh: Mesh = build_mesh(Layout(dp_replicate=2, dp_shard=2), "cpu")
    copies, shards = (dist.get_process_group_ranks(mesh.group(axis)) for axis in ("dp_replicate", "dp_shard"))
    return mesh.rank, mesh.dp, mesh.dp_rank, copies, shards


def refuse() -> None:
    build_mesh(Layout(dp_replicate=2), "cpu").group("tp")


@pytest.mark.distributed
def test_ranks_of_one_copy_are_neighbours(pool: Pools) -> None:
    """Shards of one copy talk most: they lie on one host."""
    assert pool(4).run(look) == [
        (0, 4, 0, [0, 2], [0, 1]),
        (1, 4, 1, [1, 3], [0, 1]),
        (2, 4, 2, [0, 2], [2, 3]),
        (3, 4, 3, [1, 3], [2, 3]),
    ]


def look_inside() -> tuple[int, int, bool, list[int], list[int], tuple[int, ...]]:
    mesh = build_mesh(Layout(dp_replicate=2, tp=2), "cpu")
    assert mesh.data_group is not None
    data, tensor = (dist.get_process_group_ranks(group) for group in (mesh.data_group, mesh.group("tp")))
    return mesh.dp_rank, mesh.coordinate("tp"), mesh.counts, data, tensor, mesh.peers(["tp"])


@pytest.mark.distributed
def test_ranks_that_share_layers_see_the_same_samples(pool: Pools) -> None:
    assert pool(4).run(look_inside) == [
        (0, 0, True, [0, 2], [0, 1], (0, 2)),
        (0, 1, False, [1, 3], [0, 1], (1, 3)),
        (1, 0, True, [0, 2], [2, 3], (0, 2)),
        (1, 1, False, [1, 3], [2, 3], (1, 3)),
    ]


def data_groups() -> tuple[int, list[int], object]:
    whole = build_mesh(Layout(dp_replicate=2, dp_shard=2), "cpu")
    alone = build_mesh(Layout(tp=4), "cpu")
    assert whole.data_group is not None
    return whole.dp_rank, dist.get_process_group_ranks(whole.data_group), alone.data_group


@pytest.mark.distributed
def test_one_data_rank_has_no_group(pool: Pools) -> None:
    assert pool(4).run(data_groups) == [(rank, [0, 1, 2, 3], None) for rank in range(4)]


@pytest.mark.distributed
def test_an_axis_that_is_not_there_is_named(pool: Pools) -> None:
    with pytest.raises(LayoutError, match="no axis 'tp' in layout dp_replicate=2: its axes are dp_replicate, dp_shard"):
        pool(2).run(refuse)


def look_at_experts(layout: Layout) -> tuple[int, list[int], list[int], tuple[int, ...], int]:
    mesh = build_mesh(layout, "cpu")
    sharing = dist.get_process_group_ranks(mesh.group("ep"))
    twins = [] if mesh.twin_group is None else dist.get_process_group_ranks(mesh.twin_group)
    peers = mesh.peers(["ep"])
    return mesh.coordinate("ep"), sharing, twins, peers, len(mesh.peers(["ep", "dp_replicate", "dp_shard", "tp"]))


@pytest.mark.distributed
def test_experts_are_shared_by_neighbours_among_the_data_ranks(pool: Pools) -> None:
    """Ranks of several copies too, where ep and dp_shard do not fit into each other."""
    for rank, found in enumerate(pool(6).run(look_at_experts, Layout(dp_replicate=2, dp_shard=3, ep=2))):
        first, twins = rank // 2 * 2, list(range(rank % 2, 6, 2))
        assert found == (rank % 2, [first, first + 1], twins, tuple(twins), 1)
    for rank, found in enumerate(pool(4).run(look_at_experts, Layout(dp_replicate=2, tp=2, ep=2))):
        data = [rank % 2, rank % 2 + 2]
        assert found == (rank // 2, data, [], tuple(range(4))[rank // 2 * 2 :][:2], 1)


def data_queue_is_its_own() -> bool:
    mesh = build_mesh(Layout(dp_replicate=2, ep=2), "cpu")
    return mesh.expert_group is not mesh.data_group


@pytest.mark.distributed
def test_tokens_do_not_wait_behind_ddps_buckets(pool: Pools) -> None:
    assert pool(2).run(data_queue_is_its_own) == [True, True]


def reduce_over(layout: Layout) -> tuple[bool, bool, list[int] | None, list[int] | None, list[list[int]]]:
    """Who tells of samples and of losses; the groups of data and of gradients; those that fully_shard goes over."""
    mesh = build_mesh(layout, "cpu")
    groups = mesh.data_group, mesh.gradient_group
    data, gradient = (None if group is None else dist.get_process_group_ranks(group) for group in groups)
    shards = mesh.shard_mesh
    over = [dist.get_process_group_ranks(shards.get_group(dim)) for dim in range(shards.ndim)]
    return mesh.counts, mesh.adds_loss, data, gradient, over


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("layout", "size", "rank", "expected"),
    [
        (Layout(dp_shard=2, cp=2), 4, 3, (False, True, [1, 3], [0, 1, 2, 3], [[0, 1, 2, 3]])),
        (Layout(dp_shard=2, tp=2), 4, 3, (False, False, [1, 3], [1, 3], [[1, 3]])),
        (Layout(dp_shard=2, cp=2, tp=2), 8, 2, (False, True, [2, 6], [0, 2, 4, 6], [[0, 2, 4, 6]])),
        (
            Layout(dp_replicate=2, dp_shard=2, cp=2),
            8,
            4,
            (True, True, [0, 2, 4, 6], [*range(8)], [[0, 4], [4, 5, 6, 7]]),
        ),
        (Layout(dp_replicate=2, dp_shard=2, tp=2), 8, 1, (False, False, [1, 3, 5, 7], [1, 3, 5, 7], [[1, 5], [1, 3]])),
        (Layout(dp_replicate=2, cp=2, sharding="none"), 4, 2, (True, True, [0, 2], [0, 1, 2, 3], [[0, 1, 2, 3], [2]])),
    ],
)
def test_positions_are_reduced_over_as_samples_are(
    pool: Pools, layout: Layout, size: int, rank: int, expected: object
) -> None:
    assert pool(size).run(reduce_over, layout)[rank] == expected


def sharded_over(layout: Layout) -> list[list[int]] | None:
    """In a worker: the ranks that this one's experts are copied over, and sharded over."""
    mesh = build_mesh(layout, "cpu").expert_mesh
    return None if mesh is None else [dist.get_process_group_ranks(mesh.get_group(dim)) for dim in range(mesh.ndim)]


@pytest.mark.distributed
def test_experts_are_sharded_within_a_copy_over_those_who_hold_the_same(pool: Pools) -> None:
    over = pool(4).run(sharded_over, Layout(dp_shard=4, ep=2))
    assert over == [[[0, 2]], [[1, 3]], [[0, 2]], [[1, 3]]]
    over = pool(8).run(sharded_over, Layout(dp_replicate=2, dp_shard=4, ep=2))
    assert over[1] == [[1, 5], [1, 3]] and over[6] == [[2, 6], [4, 6]]
    over = pool(8).run(sharded_over, Layout(dp_replicate=2, dp_shard=4, ep=2, local_sgd=5))
    assert over[1] == [[1, 3]] and over[6] == [[4, 6]]
    over = pool(8).run(sharded_over, Layout(dp_shard=2, cp=2, tp=2, ep=2))
    assert over[0] == [[0, 2]] and over[7] == [[5, 7]], "of one sequence, and at one place in tp"


@pytest.mark.distributed
@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp_replicate=2, dp_shard=2, ep=2),
        Layout(dp_shard=4, ep=4),
        Layout(dp_replicate=4, ep=2),
        Layout(dp_shard=4, ep=2, sharding="optimizer"),
        Layout(dp_replicate=4, ep=2, sharding="none"),
    ],
    ids=str,
)
def test_other_experts_are_whole(pool: Pools, layout: Layout) -> None:
    assert pool(4).run(sharded_over, layout) == [None] * 4


def twins(local_sgd: int | None) -> list[int]:
    layout = Layout(dp_replicate=2, dp_shard=4, ep=2, local_sgd=local_sgd)
    group = build_mesh(layout, "cpu").twin_group
    return [] if group is None else dist.get_process_group_ranks(group)


@pytest.mark.distributed
def test_copies_that_train_by_themselves_have_experts_of_their_own(pool: Pools) -> None:
    assert pool(8).run(twins, 5) == [[0, 2], [1, 3], [0, 2], [1, 3], [4, 6], [5, 7], [4, 6], [5, 7]]
    assert pool(8).run(twins, None) == [[0, 2, 4, 6], [1, 3, 5, 7]] * 4
