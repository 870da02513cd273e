"""Which axis of a layout a process group goes along: known by the group itself, else by its ranks."""

import functools
from collections.abc import Sequence
from typing import final

import torch.distributed as dist

from allranks.parallel.mesh import DATA_AXES, MESH_AXES, Mesh, axes_of
from allranks.rehearsed_messages import COPIES_OF_EXPERTS


@final
class GroupNames:
    """Of the groups that the rank of `mesh` is in.

    A group over several axes has their names joined: "dp_replicate+cp". A group of the layout is known by torch's name
    of it: the experts' may have the ranks of a data axis, and is not its group. Any other one is known by its ranks, or
    as a part of those of another: the first and the last stage share a tied table along pp. Where several names fit, it
    gets the first: the single axes come before what is put together.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._by_ranks: dict[tuple[int, ...], str] = {}
        self._members: dict[str, str] = {}
        self._across: dict[str, tuple[int, ...]] = {}
        self._by_name: dict[str, str] = {}
        layout = mesh.layout
        self._num_stages = layout.pp
        axes = [axis for axis in MESH_AXES if getattr(layout, axis) > 1]
        for axis in axes:
            self._add(mesh.group(axis), axis)
        if layout.ep > 1:
            self._add(mesh.expert_group, "ep")
            self._add(mesh.twin_group, COPIES_OF_EXPERTS)
            if mesh.expert_mesh is not None:
                for dim in range(mesh.expert_mesh.ndim):
                    self._add(mesh.expert_mesh.get_group(dim), COPIES_OF_EXPERTS)
        data = [axis for axis in axes if axis in DATA_AXES]
        self._add(mesh.data_group, "+".join(data))
        over = [axis for axis in axes if axis in (*DATA_AXES, "cp")]
        self._add(mesh.gradient_group, "+".join(axis for axis in over if axis in mesh.gradient_axes))
        self._add(mesh.sample_group, "+".join(over))
        if mesh.folded is not None:
            for dim, name in enumerate(mesh.folded.mesh_dim_names or ()):
                self._add(mesh.folded.get_group(dim), "+".join(axes_of(name)))

    def members(self, group: dist.ProcessGroup) -> str:
        """The ranks of a group, as in `list_members`."""
        found = self._members.get(group.group_name)
        if found is None:
            found = self._members[group.group_name] = list_members(dist.get_process_group_ranks(group))
        return found

    def axis(self, group: dist.ProcessGroup) -> str:
        """The axis of a group; "all" of what is none."""
        known = self._by_name.get(group.group_name)
        if known is None:
            ranks = tuple(sorted(dist.get_process_group_ranks(group)))
            known = self._by_ranks.get(ranks) or next(
                (name for others, name in self._by_ranks.items() if set(ranks) <= set(others)), "all"
            )
        return known

    def only(self, group: dist.ProcessGroup) -> tuple[int, ...]:
        """The ranks of a group that is none of the layout's; () of one that is, and of all ranks."""
        if group.group_name in self._by_name or group.size() == dist.get_world_size():
            return ()
        return tuple(sorted(dist.get_process_group_ranks(group)))

    def across(self, group: dist.ProcessGroup) -> tuple[int, ...]:
        """The ranks of a group that run several stages of a pipeline; () of one within a stage."""
        found = self._across.get(group.group_name)
        if found is None:
            ranks = sorted(dist.get_process_group_ranks(group))
            each = dist.get_world_size() // self._num_stages  # pp is the outermost axis
            found = tuple(ranks) if ranks[0] // each < ranks[-1] // each else ()
            self._across[group.group_name] = found
        return found

    def _add(self, group: dist.ProcessGroup | None, name: str) -> None:
        if group is not None:
            self._by_name.setdefault(group.group_name, name)
            self._by_ranks.setdefault(tuple(sorted(dist.get_process_group_ranks(group))), name)


def list_members(ranks: Sequence[int]) -> str:
    """`0-7`, `0-56/8` (every eighth, as cron writes steps), `0-3,8-11`: short for groups of any size."""
    found: list[str] = []
    rest = sorted(ranks)
    while rest:
        step = rest[1] - rest[0] if len(rest) > 1 else 1
        number = next((n for n, rank in enumerate(rest) if rank != rest[0] + n * step), len(rest))
        if number < 3 and step > 1:  # two numbers are no row: the second may begin one
            number = 1
        last = rest[number - 1]
        found.append(f"{rest[0]}" + (f"-{last}" if number > 1 else "") + (f"/{step}" if number > 1 < step else ""))
        rest = rest[number:]
    return ",".join(found)


@functools.cache
def is_member(rank: int, members: str) -> bool:
    """Whether a rank is among those that `list_members` has written."""
    for part in filter(None, members.split(",")):
        ends, _, step = part.partition("/")
        first, _, last = ends.partition("-")
        if rank in range(int(first), int(last or first) + 1, int(step or 1)):
            return True
    return False
