"""What one worker is told, from what torchelastic has agreed on for it."""

import os
from dataclasses import replace

from torch.distributed.elastic.agent.server.api import Worker, WorkerGroup

from allranks.process_environment import num_cores
from allranks.surviving.child import WorkerStart


def start_of(worker: Worker, group: WorkerGroup, attempt: int, fixed: WorkerStart) -> WorkerStart:
    """The start of one worker, with the environment of torchrun.

    Args:
        attempt: how often workers have been started before.
        fixed: what all workers of this host are told alike; `environ` has what goes beyond this process's.
    """
    local_world_size = group.spec.local_world_size
    environ = {
        "RANK": worker.global_rank,
        "LOCAL_RANK": worker.local_rank,
        "GROUP_RANK": group.group_rank,
        "WORLD_SIZE": worker.world_size,
        "LOCAL_WORLD_SIZE": local_world_size,
        "GROUP_WORLD_SIZE": group.group_world_size,
        "MASTER_ADDR": group.master_addr,
        "MASTER_PORT": group.master_port,
        "TORCHELASTIC_RESTART_COUNT": attempt,
        "TORCHELASTIC_MAX_RESTARTS": group.spec.max_restarts,
        "TORCHELASTIC_RUN_ID": group.spec.rdzv_handler.get_run_id(),
        "TORCHELASTIC_USE_AGENT_STORE": group.spec.rdzv_handler.use_agent_store,
        "ALLRANKS_AGENT": fixed.agent_pid,
    }
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return replace(
        fixed,
        rank=worker.global_rank,
        environ=os.environ | {name: str(value) for name, value in environ.items()} | dict(fixed.environ),
        num_threads=int(asked) if asked.isdecimal() else max(1, num_cores() // local_world_size),
        slot=worker.local_rank,
    )
