"""One batch for all data-parallel ranks, where all of them are to compute the same thing once."""

import json
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from allranks.checkpointing.exchange import broadcast_bytes
from allranks.errors import TaskError
from allranks.parallel.spread import Spread
from allranks.stepping.alike import everyones, on_any_rank


def is_alike(batch: Any, spread: Spread) -> bool:
    """Whether the batches of all data-parallel ranks are built alike, but for their sizes; collective over the world.

    Numbers and words in them are the same, too.
    """
    leaves, spec = pytree.tree_flatten(batch)
    kinds = [[str(leaf.dtype)] if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves]
    told = everyones([str(spec), kinds], spread.mesh.data_group, spread.device)
    return not on_any_rank(any(one != told[0] for one in told), spread.device, dist.group.WORLD)


def share_batch(batch: Any, spread: Spread) -> Any:
    """The first data-parallel rank's batch on all of them, whose own may have a sample more or less; collective.

    Raises:
        TaskError: on the rank whose batch is built otherwise.
    """
    group = spread.mesh.data_group
    if group is None:
        return batch
    leaves, spec = pytree.tree_flatten(batch)
    mine = [[list(leaf.shape), str(leaf.dtype)] if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
    theirs = json.loads(broadcast_bytes(json.dumps(mine).encode(), group, spread.device))
    if [kind and kind[1:] for kind in theirs] != [kind and kind[1:] for kind in mine]:
        raise TaskError(f"world.run: a batch on rank {spread.mesh.rank} is built otherwise than on another rank")
    first = dist.get_rank(group) == 0
    shared = list(leaves)
    for place, kind in enumerate(theirs):
        if kind is not None:
            own = leaves[place]
            shared[place] = own.contiguous() if first else own.new_empty(kind[0])
            # As bytes: neither NCCL nor gloo has integers of 16 bits, which a batch may hold.
            dist.broadcast(shared[place].detach().reshape(-1).view(torch.uint8), group=group, group_src=0)
    return pytree.tree_unflatten(shared, spec)
