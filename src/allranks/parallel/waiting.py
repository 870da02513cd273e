"""How long a rank waits in a collective: in every group as in the world's.

torch gives a new group ten or thirty minutes, whatever the world has. Over NCCL the host runs ahead of the device, so
that the time of a collective begins when it is enqueued: a peer that loads, compiles or saves for as long as it may
would have its partners ended.
"""

from datetime import timedelta

import torch.distributed as dist


def wait_of_world() -> timedelta | None:
    """How long the world's collectives wait; None where its backends do not tell (a fake one, MPI)."""
    world = dist.group.WORLD
    assert world is not None
    options = [getattr(world._get_backend(device), "options", None) for device in world._device_types]
    return max((told for one in options if (told := getattr(one, "_timeout", None)) is not None), default=None)


def wait_alike() -> None:
    """Give all groups that this process is in the time of the world's; call it when groups were made."""
    wait = wait_of_world()
    if wait is not None:
        for group in list(dist.distributed_c10d._world.pg_map):
            dist.distributed_c10d._set_pg_timeout(wait, group)
