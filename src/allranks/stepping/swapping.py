"""A batch for another's: each rank of a group hands its batch to the next one, and gets that of the one before.

What travels is the tensors' bytes and a line of JSON about them. Nothing is unpickled: a batch of which a leaf is
neither a tensor nor a JSON value stays at home, and its receiver hears so.
"""

import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

JSON_TYPES = (str, int, float, bool, type(None))


def swap(batch: object, extra: Sequence[int], group: dist.ProcessGroup, device: torch.device) -> tuple[Any, list[int]]:
    """(the batch, the numbers beside it) of the rank before this one; the batch is None where it cannot travel.

    Collective over `group`.

    Args:
        batch: of one structure on all ranks: a pytree whose leaves are tensors and JSON values.
        extra: whole numbers of 64 bits that go with it.
        device: where the group's backend wants its tensors.
    """
    leaves, spec = pytree.tree_flatten(batch)
    header, content = _encode(leaves, str(spec), extra)
    lengths = torch.tensor([len(header), len(content)], dtype=torch.int64)
    received = _pass_on(lengths, torch.zeros(2, dtype=torch.int64), group, device).tolist()
    said = _pass_on(_tensor(header), torch.empty(received[0], dtype=torch.uint8), group, device)
    bytes_of = _pass_on(content, torch.empty(received[1], dtype=torch.uint8), group, device)
    told = json.loads(said.numpy().tobytes())
    if told["leaves"] is None or told["spec"] != str(spec):
        return None, told["extra"]
    return pytree.tree_unflatten(_decode(told["leaves"], bytes_of, leaves), spec), told["extra"]


def _encode(leaves: Sequence[Any], spec: str, extra: Sequence[int]) -> tuple[bytes, torch.Tensor]:
    travels = all(isinstance(leaf, JSON_TYPES) or _is_plain(leaf) for leaf in leaves)
    tensors = [leaf for leaf in leaves if travels and isinstance(leaf, torch.Tensor)]
    described = [
        {"shape": list(leaf.shape)} if isinstance(leaf, torch.Tensor) else {"value": leaf} for leaf in leaves if travels
    ]
    header = {"leaves": described if travels else None, "spec": spec, "extra": list(extra)}
    parts = [tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
    return json.dumps(header).encode(), torch.cat([torch.empty(0, dtype=torch.uint8), *parts])


def _is_plain(leaf: object) -> bool:
    """Whether it is a tensor whose bytes say all but its shape and type."""
    return isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and not leaf.is_complex()


def _decode(described: Sequence[Any], content: torch.Tensor, own: Sequence[Any]) -> list[Any]:
    """The leaves; types are those of this rank's own, which come from the same collate."""
    found: list[Any] = []
    for one, mine in zip(described, own, strict=True):
        if "value" in one:
            found.append(one["value"])
            continue
        shape = one["shape"]
        length = torch.Size(shape).numel() * mine.element_size()
        taken, content = content[:length], content[length:]
        found.append(taken.clone().view(mine.dtype).reshape(shape))
    return found


def _pass_on(
    mine: torch.Tensor, received: torch.Tensor, group: dist.ProcessGroup, device: torch.device
) -> torch.Tensor:
    ranks, index = dist.get_process_group_ranks(group), dist.get_rank(group)
    following, before = ranks[(index + 1) % len(ranks)], ranks[index - 1]
    sent, received = mine.to(device), received.to(device)
    work = [
        dist.P2POp(op, tensor, peer, group)
        for op, tensor, peer in ((dist.isend, sent, following), (dist.irecv, received, before))
        if tensor.numel()
    ]
    for one in dist.batch_isend_irecv(work) if work else ():
        one.wait()
    return received.cpu()


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
