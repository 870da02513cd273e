"""Whether the hosts have the memory that checkpoints are written from while the training goes on."""

import socket
from collections.abc import Sequence

import torch.distributed as dist

from allranks.checkpointing.peers import first_word
from allranks.free_memory import free_host_bytes
from allranks.stepping.world import Processes
from allranks.units import format_bytes

USABLE = 0.9
"""Of the memory that is free so much may go to copies: the run itself takes more now and then."""


def find_shortage(of_ranks: Sequence[int], processes: Processes) -> str:
    """Which host lacks room for what its ranks copy, in words, the same on every rank; "": none. Collective.

    Called before any rank makes its copy.

    Args:
        of_ranks: bytes of the copy of each rank.
    """
    beside = [0] if processes.host is None else dist.get_process_group_ranks(processes.host)
    needed, free = sum(of_ranks[rank] for rank in beside), free_host_bytes()
    word = ""
    if needed > USABLE * free:
        word = (
            f"a copy of what the {len(beside)} processes of {socket.gethostname()} write takes {format_bytes(needed)}, "
            f"and {format_bytes(free)} of its memory are free"
        )
    return first_word(word, processes.world_group, processes.device)
