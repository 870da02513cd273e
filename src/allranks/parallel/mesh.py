"""The device mesh of a Layout, and where this rank stands in it."""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from allranks.errors import LayoutError
from allranks.layout import Layout

DATA_AXES = ("dp_replicate", "dp_shard")


@dataclass(frozen=True)
class Mesh:
    """A Layout laid over the ranks of the world.

    Attributes:
        layout: the degrees.
        rank: this process's global rank.
        device_mesh: torch's mesh with the axes (dp_replicate, dp_shard), or None for one process, where no collective
            is needed.
    """

    layout: Layout
    rank: int
    device_mesh: DeviceMesh | None

    @property
    def dp(self) -> int:
        """Ranks that see different samples (D in law 2)."""
        return self.layout.dp

    @property
    def dp_rank(self) -> int:
        """This rank's coordinate among them."""
        if self.device_mesh is None:
            return 0
        replicate, shard = (self.device_mesh.get_local_rank(axis) for axis in DATA_AXES)
        return replicate * self.layout.dp_shard + shard

    def group(self, axis: str) -> dist.ProcessGroup:
        """The process group of this rank along `axis`; LayoutError where the layout has no such axis."""
        if self.device_mesh is None or axis not in DATA_AXES:
            known = ", ".join(DATA_AXES) if self.device_mesh is not None else "none (one process)"
            raise LayoutError(f"no axis {axis!r} in layout {self.layout}: its axes are {known}")
        return self.device_mesh.get_group(axis)


def build_mesh(layout: Layout, device_type: str) -> Mesh:
    """The Mesh of `layout` over the initialised process group; collective. One process needs none."""
    if layout.world_size == 1:
        return Mesh(layout, 0, None)
    shape = (layout.dp_replicate, layout.dp_shard)
    return Mesh(layout, dist.get_rank(), init_device_mesh(device_type, shape, mesh_dim_names=DATA_AXES))
