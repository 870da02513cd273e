"""This rank's tensors beside their Entries: which of them a checkpoint holds, and what they add to a digest."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from allranks.checkpointing.tensor_file import DTYPES
from allranks.digest import DEVICE_BLOCK, HOST_BLOCK, part_digest
from allranks.errors import CheckpointError
from allranks.parameter_map import Entry

Parts = Sequence[tuple[Entry, torch.Tensor]]

_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32}
_WORD_BYTES = 4


def stored_parts(parts: Parts) -> list[tuple[Entry, torch.Tensor]]:
    """Those that a checkpoint holds: persistent, each tied tensor under its own name only, and none packed.

    Raises:
        CheckpointError: a tensor is not what its Entry says, or of a dtype that has no place in a file.
    """
    if sys.byteorder != "little":
        raise CheckpointError("checkpoints are little-endian, this machine is not: read and write them on one that is")
    stored = [(entry, tensor) for entry, tensor in parts if entry.persistent and entry.alias_of is None]
    for entry, tensor in stored:
        dtype = str(tensor.dtype).removeprefix("torch.")
        if (dtype, tuple(tensor.shape)) != (entry.dtype, tuple(entry.box.shape)):
            said = f"{entry.dtype}{list(entry.box.shape)}"
            raise CheckpointError(
                f"{entry.name!r}: the local tensor is {dtype}{list(tensor.shape)}, its entry says {said}"
            )
        if dtype not in DTYPES or tensor.layout is not torch.strided or tensor.is_quantized:
            raise CheckpointError(f"{entry.name!r}: a {tensor.layout} tensor of {dtype} has no place in a checkpoint")
    return [piece for entry, tensor in stored for piece in _unpacked(entry, tensor)]


def tensor_digest(tensor: torch.Tensor, offset: Sequence[int]) -> int:
    """The share, in [0, 2**64), that the local part `tensor`, which begins at `offset` of the logical tensor, adds to
    its digest.

    The bits count, on any device: -0.0 is not 0.0, and NaNs differ by their payload.
    """
    if tensor.numel() == 0:
        return 0
    local = tensor.detach().resolve_conj().resolve_neg()
    position = tuple(offset)
    if local.dim() == 0:
        local, position = local.reshape(1), (0,)
    size = local.element_size()
    if size in _SIGNED:
        words = local.view(_SIGNED[size])
    else:
        words = local.contiguous().view(torch.int32)  # a last dim of several words an element
        position = (*position[:-1], position[-1] * (size // _WORD_BYTES))
    arange = partial(torch.arange, device=local.device)
    return part_digest(words, position, arange, HOST_BLOCK if local.is_cpu else DEVICE_BLOCK)


def _unpacked(entry: Entry, tensor: torch.Tensor) -> list[tuple[Entry, torch.Tensor]]:
    """It, or where its box is packed, views of it in boxes as a checkpoint has them."""
    if entry.box.packed == 1:
        return [(entry, tensor)]
    return [(replace(entry, box=box), tensor.detach()[place]) for box, place in entry.box.pieces(entry.shape)]
