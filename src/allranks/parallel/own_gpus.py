"""Whether each process of a world has a GPU of its own, where nobody but the GPUs says it.

A launcher may show each process one GPU, another one or the same (`srun --gpu-bind=single:1`, a wrapper around
`mpirun` that sets CUDA_VISIBLE_DEVICES): what a process sees is alike in both. So the processes compare the uuids.
"""

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from allranks.errors import ProcessError


def uuids_of(devices: Sequence[torch.device]) -> list[str]:
    """What the GPUs are called wherever they are seen from."""
    return [str(torch.cuda.get_device_properties(device).uuid) for device in devices]


def share_gpus(store: Store, uuids: Sequence[str], world_size: int, seconds: float) -> bool:
    """Whether any two processes of the world use one GPU; collective.

    Each counts its own GPUs, and who comes last knows. No rank reads what each of the others wrote.

    Args:
        store: the world's; no earlier attempt has written to it.
        uuids: of the GPUs that this process uses.
        seconds: how long to wait for the others.

    Raises:
        ProcessError: not all came in time.
    """
    if any(store.add(f"gpus/{uuid}", 1) > 1 for uuid in uuids):
        store.add("gpus/shared", 1)
    if store.add("gpus/arrived", 1) == world_size:
        store.set("gpus/verdict", "shared" if store.add("gpus/shared", 0) else "apart")
    try:
        store.wait(["gpus/verdict"], timedelta(seconds=seconds))
    except dist.DistError as error:
        arrived = store.add("gpus/arrived", 0)
        raise ProcessError(
            f"{arrived} of {world_size} ranks have come within {seconds:.0f} s; see what the others say"
        ) from error
    return store.get("gpus/verdict") == b"shared"
