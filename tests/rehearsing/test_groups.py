"""A process group is known by the axis that its ranks lie along."""

import pytest
import torch.distributed as dist

from allranks.layout import Layout
from allranks.parallel.mesh import build_mesh
from allranks.rehearsing.groups import GroupNames, is_member, list_members
from allranks.rehearsing.world import fake_world


def test_axes_and_what_is_put_together() -> None:
    with fake_world(0, 16, "gloo"):
        mesh = build_mesh(Layout(dp_replicate=2, dp_shard=2, cp=2, tp=2), "cpu")
        names = GroupNames(mesh)
        for axis in ("dp_replicate", "dp_shard", "cp", "tp"):
            assert names.axis(mesh.group(axis)) == axis
        assert mesh.data_group is not None and names.axis(mesh.data_group) == "dp_replicate+dp_shard"
        assert mesh.gradient_group is not None
        assert names.axis(mesh.gradient_group) == "dp_replicate+dp_shard+cp"
        assert names.axis(dist.group.WORLD) == "all"  # type: ignore[arg-type]
        assert names.members(mesh.group("dp_shard")) == "0,4"
        assert names.only(mesh.group("dp_shard")) == () == names.only(dist.group.WORLD)  # type: ignore[arg-type]
        own = dist.new_group([0, 4])
        assert names.only(own) == (0, 4) and names.axis(own) == "dp_shard"


def test_groups_over_several_stages() -> None:
    with fake_world(1, 8, "gloo"):
        mesh = build_mesh(Layout(pp=2, dp_shard=4), "cpu")
        names = GroupNames(mesh)
        assert names.across(mesh.group("pp")) == (1, 5) and names.across(mesh.group("dp_shard")) == ()
        assert names.across(dist.group.WORLD) == tuple(range(8))  # type: ignore[arg-type]
        assert names.axis(dist.new_group([1, 7])) == "all", "of no axis"
        assert names.across(dist.new_group([1, 3])) == () and names.across(dist.new_group([1, 4])) == (1, 4)
    with fake_world(0, 8, "gloo"):
        names = GroupNames(build_mesh(Layout(pp=4, dp_shard=2), "cpu"))
        assert names.axis(dist.new_group([0, 6])) == "pp", "the ends of a pipeline, which share a tied table"
    with fake_world(0, 2, "gloo"):
        assert GroupNames(build_mesh(Layout(dp_shard=2), "cpu")).across(dist.group.WORLD) == ()  # type: ignore[arg-type]


def test_experts() -> None:
    with fake_world(5, 8, "gloo"):
        mesh = build_mesh(Layout(dp_shard=8, ep=4), "cpu")
        names = GroupNames(mesh)
        assert mesh.twin_group is not None
        assert (names.axis(mesh.group("ep")), names.axis(mesh.twin_group)) == ("ep", "copies of experts")
    with fake_world(5, 16, "gloo"):
        mesh = build_mesh(Layout(dp_replicate=2, dp_shard=8, ep=4), "cpu")
        names = GroupNames(mesh)
        assert mesh.expert_mesh is not None
        assert [names.axis(mesh.expert_mesh.get_group(dim)) for dim in (0, 1)] == ["copies of experts"] * 2


@pytest.mark.parametrize(
    ("layout", "axis"),
    [
        (Layout(dp_replicate=4, ep=4), "dp_replicate"),
        (Layout(dp_replicate=4, tp=2, ep=4), "dp_replicate"),
        (Layout(dp_replicate=2, dp_shard=2, ep=2), "dp_shard"),
        (Layout(dp_replicate=2, cp=2, ep=2), "dp_replicate"),
    ],
)
def test_experts_along_a_whole_data_axis_are_not_called_by_it(layout: Layout, axis: str) -> None:
    """The ranks of both are the same, and each has a group of its own; one that is none of the layout's is data's."""
    with fake_world(1, layout.world_size, "gloo"):
        mesh = build_mesh(layout, "cpu")
        names, ranks = GroupNames(mesh), dist.get_process_group_ranks(mesh.group("ep"))
        assert ranks == dist.get_process_group_ranks(mesh.group(axis))
        assert (names.axis(mesh.group("ep")), names.axis(mesh.group(axis))) == ("ep", axis)
        assert names.axis(dist.new_group(ranks)) == axis
        if mesh.twin_group is not None:
            assert names.axis(mesh.twin_group) == "copies of experts"
        assert mesh.data_group is not None and names.axis(mesh.data_group).startswith("dp_replicate")


def test_a_mesh_in_which_cp_is_folded_names_its_other_dims_as_they_are() -> None:
    with fake_world(0, 8, "gloo"):
        mesh = build_mesh(Layout(dp_shard=2, cp=2, tp=2), "cpu")
        assert mesh.folded is not None and mesh.folded.mesh_dim_names is not None
        names = GroupNames(mesh)
        found = {name: names.axis(mesh.folded.get_group(name)) for name in mesh.folded.mesh_dim_names}
        assert found == {"dp_replicate": "dp_replicate", "dp_shard_cp": "dp_shard+cp", "tp": "tp"}


def test_members_are_short() -> None:
    written = {"5": [5], "0-7": range(8), "0-56/8": range(0, 64, 8), "0-3,8-11": [0, 1, 2, 3, 8, 9, 10, 11]}
    assert {list_members(list(ranks)): list(ranks) for ranks in written.values()} == {
        text: list(ranks) for text, ranks in written.items()
    }
    assert list_members([9, 0, 5]) == "0,5,9"
    for text, ranks in written.items():
        assert [rank for rank in range(64) if is_member(rank, text)] == [*ranks]
    assert not is_member(0, "")
