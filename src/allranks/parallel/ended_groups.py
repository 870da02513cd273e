"""The end of a process's groups, which nothing that still refers to one of them can hold up."""

import torch.distributed as dist

# Never let go: where a DDP module holds the last reference, its destructor waits, with Python's lock, for a thread of
# gloo's that may be waiting for this lock, and neither ever ends; or torch aborts the process (pytorch#190489).
_kept: list[dist.ProcessGroup] = []


def destroy_groups() -> None:
    """Destroy all process groups of this process, after the last collective; nothing where there are none."""
    if dist.is_initialized():
        _kept.extend(dist.distributed_c10d._world.pg_map)
        dist.destroy_process_group()
