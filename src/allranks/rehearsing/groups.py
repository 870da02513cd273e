"""Which axis of a layout a process group goes along, known by its ranks."""

from typing import final

import torch.distributed as dist

from allranks.parallel.mesh import DATA_AXES, MESH_AXES, Mesh


@final
class GroupNames:
    """Of the groups that the rank of `mesh` is in.

    A group over several axes has their names joined: "dp_replicate+cp". Equal groups under several names get the first
    that the layout has: the single axes come before what is put together.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._by_ranks: dict[tuple[int, ...], str] = {}
        layout = mesh.layout
        axes = [axis for axis in MESH_AXES if getattr(layout, axis) > 1]
        for axis in axes:
            self._add(mesh.group(axis), axis)
        if layout.ep > 1:
            self._add(mesh.expert_group, "ep")
            self._add(mesh.twin_group, "copies of experts")
        data = [axis for axis in axes if axis in DATA_AXES]
        self._add(mesh.data_group, "+".join(data))
        over = [axis for axis in axes if axis in (*DATA_AXES, "cp")]
        self._add(mesh.gradient_group, "+".join(axis for axis in over if axis in mesh.gradient_axes))
        self._add(mesh.sample_group, "+".join(over))
        if mesh.folded is not None:
            for dim, name in enumerate(mesh.folded.mesh_dim_names or ()):
                self._add(mesh.folded.get_group(dim), "dp_shard+cp" if name == "dp_shard_cp" else "dp_replicate+cp")

    def axis(self, group: dist.ProcessGroup) -> str:
        """The axis of a group; "all" of what is none."""
        return self._by_ranks.get(tuple(sorted(dist.get_process_group_ranks(group))), "all")

    def _add(self, group: dist.ProcessGroup | None, name: str) -> None:
        if group is not None:
            self._by_ranks.setdefault(tuple(sorted(dist.get_process_group_ranks(group))), name)
