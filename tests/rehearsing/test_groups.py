"""A process group is known by the axis that its ranks lie along."""

import torch.distributed as dist

from allranks.layout import Layout
from allranks.parallel.mesh import build_mesh
from allranks.rehearsing.groups import GroupNames, list_members
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
        assert names.across(dist.new_group([1, 3])) == () and names.across(dist.new_group([1, 4])) == (1, 4)
    with fake_world(0, 2, "gloo"):
        assert GroupNames(build_mesh(Layout(dp_shard=2), "cpu")).across(dist.group.WORLD) == ()  # type: ignore[arg-type]


def test_experts() -> None:
    with fake_world(5, 8, "gloo"):
        mesh = build_mesh(Layout(dp_shard=8, ep=4), "cpu")
        names = GroupNames(mesh)
        assert mesh.twin_group is not None
        assert (names.axis(mesh.group("ep")), names.axis(mesh.twin_group)) == ("ep", "copies of experts")


def test_members_are_short() -> None:
    written = {"5": [5], "0-7": range(8), "0-56/8": range(0, 64, 8), "0-3,8-11": [0, 1, 2, 3, 8, 9, 10, 11]}
    assert {list_members(list(ranks)): list(ranks) for ranks in written.values()} == {
        text: list(ranks) for text, ranks in written.items()
    }
    assert list_members([9, 0, 5]) == "0,5,9"
