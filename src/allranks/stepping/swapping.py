"""A batch for another's: each rank of a group hands its batch to the next one, and gets that of the one before.

What travels is the stretch of memory under each tensor, and a line of JSON that says how it lies there: kernels are
chosen by strides and alignment, so that the receiver's tensors have to lie as the sender's. Nothing is unpickled: a
batch of which a leaf is neither a plain tensor nor a JSON value stays at home, and its receiver hears so.
"""

import json
from collections.abc import Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from allranks.checkpointing.exchange import tensor_of

JSON_TYPES = (str, int, float, bool, type(None))
MOST_SPANNED = 2
"""A tensor that spans more times its own size, as a column of a large table, travels without what lies between."""


@final
class Parcel:
    """A batch as bytes, and as the batch that they give on whatever rank they are unpacked.

    Args:
        batch: a pytree; it travels if its leaves are plain tensors and JSON values.
        extra: whole numbers of 64 bits that go with it.
    """

    def __init__(self, batch: object, extra: Sequence[int]) -> None:
        self._batch, self._extra = batch, list(extra)
        self._leaves, self._spec = pytree.tree_flatten(batch)
        self._travels = all(_is_plain(leaf) for leaf in self._leaves)

    def again(self) -> Any:
        """The batch as its receiver sees it, in the same layout of memory; the batch itself where it cannot travel."""
        if not self._travels:
            return self._batch
        described, content = self._pack()
        return pytree.tree_unflatten(_decode(described, content), self._spec)

    def swap(self, group: dist.ProcessGroup, device: torch.device) -> tuple[Any, list[int]]:
        """(the batch, the numbers beside it) of the rank before this one; collective over `group`.

        The batch is None where it cannot travel, or has another structure than this rank's.

        Args:
            device: where the group's backend wants its tensors.
        """
        described, content = self._pack() if self._travels else (None, tensor_of(b""))
        header = json.dumps({"leaves": described, "spec": str(self._spec), "extra": self._extra}).encode()
        lengths = torch.tensor([len(header), len(content)], dtype=torch.int64)
        received = _pass_on(lengths, torch.zeros(2, dtype=torch.int64), group, device).tolist()
        said = _pass_on(tensor_of(header), torch.empty(received[0], dtype=torch.uint8), group, device)
        bytes_of = _pass_on(content, torch.empty(received[1], dtype=torch.uint8), group, device)
        told = json.loads(said.numpy().tobytes())
        if told["leaves"] is None or told["spec"] != str(self._spec):
            return None, told["extra"]
        return pytree.tree_unflatten(_decode(told["leaves"], bytes_of), self._spec), told["extra"]

    def _pack(self) -> tuple[list[dict[str, Any]], torch.Tensor]:
        """What the leaves are, and the bytes of those that are tensors, one after the other."""
        described, parts = list[dict[str, Any]](), [tensor_of(b"")]
        for leaf in self._leaves:
            if not isinstance(leaf, torch.Tensor):
                described.append({"value": leaf})
                continue
            memory, strides = _spread_out(leaf.detach().cpu())
            described.append({"shape": list(leaf.shape), "strides": list(strides), "dtype": str(leaf.dtype)})
            described[-1]["numbers"] = len(memory)
            parts.append(memory.view(torch.uint8))
        return described, torch.cat(parts)


def _is_plain(leaf: object) -> bool:
    """Whether it is a JSON value, or a tensor whose bytes say all but how they lie and what they are."""
    if type(leaf) is not torch.Tensor:
        return type(leaf) in JSON_TYPES
    special = leaf.is_complex() or leaf.is_neg() or leaf.is_quantized or leaf.requires_grad
    return leaf.layout is torch.strided and not special


def _spread_out(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """The numbers in the memory that `tensor` spans, from its first one on, and its strides over them."""
    spanned = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if not tensor.numel() or spanned > MOST_SPANNED * tensor.numel():
        tensor = tensor.contiguous()
        spanned = tensor.numel()
    return tensor.as_strided((spanned,), (1,)).contiguous(), tensor.stride()


def _decode(described: Sequence[Any], content: torch.Tensor) -> list[Any]:
    """The leaves, each tensor in memory of its own, which begins where allocations do."""
    found: list[Any] = []
    for one in described:
        if "value" in one:
            found.append(one["value"])
            continue
        dtype: torch.dtype = getattr(torch, one["dtype"].removeprefix("torch."))
        length = one["numbers"] * dtype.itemsize
        taken, content = content[:length], content[length:]
        found.append(taken.clone().view(dtype).as_strided(one["shape"], one["strides"]))
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
