"""The device mesh of a Layout, and where this rank stands in it."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from allranks.errors import LayoutError
from allranks.layout import Layout
from allranks.parallel.share import Share

DATA_AXES = ("dp_replicate", "dp_shard")

# Outermost first: neighbouring ranks share a tp group, whose traffic is the heaviest and wants the fastest links.
MESH_AXES = ("pp", *DATA_AXES, "cp", "tp")

# A gradient is summed over other samples, and over other positions of the same ones.
GRADIENT_AXES = (*DATA_AXES, "cp")

# Two neighbouring axes as one dim of a mesh, for `fully_shard`.
_FOLDED = {"dp_replicate_cp": ("dp_replicate", "cp"), "dp_shard_cp": ("dp_shard", "cp")}


@dataclass(frozen=True)
class Mesh:
    """A Layout laid over the ranks of the world.

    Attributes:
        layout: the degrees.
        rank: this process's global rank.
        device_mesh: torch's mesh with the data axes, and those others whose degree is above 1, in the order of
            MESH_AXES; None for one process, where no collective is needed.
        data_group: the ranks that see other samples and hold the same part of the model; None where this is one rank.
        expert_group: those of them, next to each other, over which the experts are cut; None without ep.
        twin_group: those of them that hold the same experts; None without ep, and where this is one rank.
        expert_mesh: these as `fully_shard` shards experts over them, in copies or not; None: experts are whole.
        sample_group: these, and the ranks that see other positions; None where this is one rank.
        gradient_group: those of them whose gradients are averaged; None where this is one rank.
        folded: the same mesh with cp folded into a data axis, where `fully_shard` needs it so.
        share: the devices of this process, where it has several; None: it has one, or nobody has said.
    """

    layout: Layout
    rank: int
    device_mesh: DeviceMesh | None
    data_group: dist.ProcessGroup | None = None
    expert_group: dist.ProcessGroup | None = None
    twin_group: dist.ProcessGroup | None = None
    expert_mesh: DeviceMesh | None = None
    gradient_group: dist.ProcessGroup | None = None
    folded: DeviceMesh | None = None
    sample_group: dist.ProcessGroup | None = None
    share: Share | None = None

    @property
    def dp(self) -> int:
        """Ranks that see different samples (D in law 2)."""
        return self.layout.dp

    @property
    def dp_rank(self) -> int:
        """This rank's coordinate among them."""
        return self.coordinate("dp_replicate") * self.layout.dp_shard + self.coordinate("dp_shard")

    @property
    def gradient_axes(self) -> tuple[str, ...]:
        """The axes over which gradients are averaged, as far as the layout has them."""
        return _gradient_axes(self.layout)

    @property
    def counts(self) -> bool:
        """Whether this rank speaks for its samples: of those that see the same, one tells, which has their loss."""
        return self.coordinate("cp") == 0 and self.adds_loss

    @property
    def adds_loss(self) -> bool:
        """Whether the loss that this rank computes is a part of the world's: each part of a sequence has one."""
        return self.coordinate("tp") == 0 and self.has_output

    @property
    def has_output(self) -> bool:
        """Whether this rank has the model's output: it runs the last stage, or there are none."""
        return self.coordinate("pp") == self.layout.stage_rank(self.layout.num_stages - 1)

    @property
    def first_of_stage(self) -> bool:
        """Whether it is the first of those ranks that hold parts of the same layers."""
        return self.rank == self.peers(("pp",))[0]

    @property
    def shard_mesh(self) -> DeviceMesh:
        """What `fully_shard` goes over: (copies, shards), or (shards) where there is one copy.

        The ranks of one sequence share a copy's parameters too; under sharding "none" they are copies as well.
        """
        mesh = self.device_mesh if self.folded is None else self.folded
        assert mesh is not None and mesh.mesh_dim_names is not None
        copies, shards = [name for name in mesh.mesh_dim_names if name.startswith(DATA_AXES)]
        if mesh.size(mesh.mesh_dim_names.index(copies)) == 1 or self.layout.local_sgd is not None:
            return mesh[shards]
        return mesh if mesh.mesh_dim_names == (copies, shards) else mesh[copies, shards]

    def coordinate(self, axis: str) -> int:
        """Where this rank stands along `axis`; 0 along one that the layout does not have."""
        if axis == "ep":
            return self.dp_rank % self.layout.ep
        if axis not in self._axes:
            return 0
        assert self.device_mesh is not None
        return int(self.device_mesh.get_local_rank(axis))

    def group(self, axis: str) -> dist.ProcessGroup:
        """The process group of this rank along `axis`; LayoutError where the layout has no such axis."""
        if axis == "ep" and self.expert_group is not None:
            return self.expert_group
        if self.device_mesh is None or axis not in self._axes:
            known = ", ".join(self._axes) or "none (one process)"
            raise LayoutError(f"no axis {axis!r} in layout {self.layout}: its axes are {known}")
        return self.device_mesh.get_group(axis)

    def peers(self, axes: Collection[str], pp_ranks: Collection[int] | None = None) -> tuple[int, ...]:
        """The global ranks, ascending, that have this rank's coordinates along `axes`.

        Args:
            pp_ranks: only those at these coordinates along pp; None: at any.
        """
        if self.device_mesh is None:
            return (self.rank,)
        ranks = self.device_mesh.mesh
        if pp_ranks is not None and "pp" in self._axes:
            ranks = ranks[sorted(pp_ranks)]  # pp is the outermost axis
        index = tuple(self.coordinate(axis) if axis in axes else slice(None) for axis in self._axes)
        found = {int(rank) for rank in ranks[index].flatten()}
        if "ep" in axes:
            found &= set(_data_ranks(self.device_mesh)[:, self.coordinate("ep") :: self.layout.ep].flatten().tolist())
        return tuple(sorted(found))

    @property
    def _axes(self) -> tuple[str, ...]:
        if self.device_mesh is None:
            return ()
        assert self.device_mesh.mesh_dim_names is not None
        return self.device_mesh.mesh_dim_names


def build_mesh(layout: Layout, device_type: str) -> Mesh:
    """The Mesh of `layout` over the initialised process group; collective. One process needs none."""
    if layout.world_size == 1:
        return Mesh(layout, 0, None)
    axes = tuple(axis for axis in MESH_AXES if axis in DATA_AXES or getattr(layout, axis) > 1)
    shape = tuple(getattr(layout, axis) for axis in axes)
    device_mesh = init_device_mesh(device_type, shape, mesh_dim_names=axes)
    data_group = sample_group = _group_over(DATA_AXES, device_mesh)
    folded = None
    if layout.cp > 1:
        sample_group = _group_over(GRADIENT_AXES, device_mesh)
        folded = _fold(layout, device_mesh) if layout.fully_sharded else None
    gradient_group = sample_group
    if layout.local_sgd is not None:
        gradient_group = _group_over(_gradient_axes(layout), device_mesh)
    experts = _expert_groups(layout, device_mesh)
    return Mesh(layout, dist.get_rank(), device_mesh, data_group, *experts, gradient_group, folded, sample_group)


def _gradient_axes(layout: Layout) -> tuple[str, ...]:
    among = GRADIENT_AXES if layout.local_sgd is None else GRADIENT_AXES[1:]
    return tuple(axis for axis in among if getattr(layout, axis) > 1)


def axes_of(dim_name: str) -> tuple[str, ...]:
    """The layout's axes that a dim of a mesh stands for."""
    return _FOLDED.get(dim_name, (dim_name,))


def _fold(layout: Layout, mesh: DeviceMesh) -> DeviceMesh:
    """`mesh` with cp as a part of dp_shard, its neighbour, or of dp_replicate, where dp_shard is 1."""
    target = "dp_shard" if layout.dp_shard > 1 else "dp_replicate"
    assert mesh.mesh_dim_names is not None
    sizes = dict(zip(mesh.mesh_dim_names, mesh.mesh.shape, strict=True))
    folded = {
        f"{name}_cp" if name == target else name: size * (layout.cp if name == target else 1)
        for name, size in sizes.items()
        if name != "cp"
    }
    return init_device_mesh(mesh.device_type, tuple(folded.values()), mesh_dim_names=tuple(folded))


def _group_over(axes: Sequence[str], mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The ranks that differ from this one along `axes` only, as one group; collective. None where this is one rank."""
    assert mesh.mesh_dim_names is not None
    dims = [dim for dim, name in enumerate(mesh.mesh_dim_names) if name in axes and mesh.mesh.shape[dim] > 1]
    size = math.prod(mesh.mesh.shape[dim] for dim in dims)
    if size == 1:
        return None
    if size == mesh.mesh.numel():
        return dist.group.WORLD
    if len(dims) == 1:
        return mesh.get_group(dims[0])
    # Several axes beside others.
    return _make_groups(mesh.mesh.movedim(dims, [dim - len(dims) for dim in range(len(dims))]).reshape(-1, size))


def _expert_groups(
    layout: Layout, mesh: DeviceMesh
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None, DeviceMesh | None]:
    """(those that share out the experts, those that hold the same ones): ep re-cuts D, the innermost ranks first.

    And these as a mesh, where experts are sharded over them.
    """
    if layout.ep == 1:
        return None, None, None
    # Groups of their own even where they are the whole world: what travels between experts must not wait in one queue
    # with the buckets that DDP reduces meanwhile.
    sharing = _make_groups(_data_ranks(mesh).reshape(-1, layout.ep))
    if layout.ep == layout.gradient_ranks:
        return sharing, None, None
    # The ranks of a sequence hold the same experts; so do copies, unless they train by themselves.
    among = ("cp",) if layout.local_sgd is None else ("dp_replicate", "cp")
    ranks = _data_ranks(mesh, *among).reshape(-1, layout.gradient_ranks // layout.ep, layout.ep)
    twins = ranks.mT.flatten(0, 1)
    group = _make_groups(twins)
    return sharing, group, None if layout.expert_shards == 1 else _expert_mesh(layout, mesh, twins, group)


def _expert_mesh(layout: Layout, mesh: DeviceMesh, twins: torch.Tensor, own: dist.ProcessGroup) -> DeviceMesh:
    """(copies, shards) of the experts of this rank, or (shards); collective.

    Args:
        twins: in each row ranks that hold the same experts; this rank is in one, whose group is `own`.
    """
    shards = "dp_shard" if layout.cp == 1 else "dp_shard_cp"
    if layout.expert_shards == twins.shape[1]:
        return DeviceMesh.from_group(own, mesh.device_type, mesh_dim_names=(shards,))
    # In the order of all ranks those of one copy are next to each other.
    ranks = twins.sort().values.reshape(len(twins), -1, layout.expert_shards)
    groups = [_make_groups(ranks.mT.flatten(0, 1)), _make_groups(ranks.flatten(0, 1))]
    mine = next(row for row in ranks if dist.get_rank() in row)
    return DeviceMesh.from_group(groups, mesh.device_type, mine, mesh_dim_names=("dp_replicate", shards))


def _data_ranks(mesh: DeviceMesh, *before: str) -> torch.Tensor:
    """[others, D]: in each row the ranks that see other samples, in the order of their dp_rank.

    Args:
        before: axes that a row holds, too, outside of these.
    """
    assert mesh.mesh_dim_names is not None
    names = mesh.mesh_dim_names
    dims = [names.index(axis) for axis in dict.fromkeys((*before, *DATA_AXES)) if axis in names]
    moved = mesh.mesh.movedim(dims, [dim - len(dims) for dim in range(len(dims))])
    return moved.reshape(-1, math.prod(moved.shape[-len(dims) :]))


def _make_groups(ranks: torch.Tensor) -> dist.ProcessGroup:
    """This rank's group of those in the rows: every rank makes every group, in one order."""
    mine: dist.ProcessGroup
    mine, _ = dist.new_subgroups_by_enumeration([sorted(row) for row in ranks.tolist()])
    return mine
