"""Looking at a program that knows nothing of it: parts of tensors by logical name, samples, generators."""

import random
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from allranks.parameter_map import Box
from allranks.seeds import seed_plain
from allranks.verifying.loader_watch import torch_digest
from allranks.verifying.recording import Part, Parts

SIGNED = {torch.bool: torch.int8, torch.uint8: torch.int16} | dict.fromkeys(
    (torch.uint16, torch.uint32, torch.uint64), torch.int64
)
WRAPPERS = ("_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module")


def logical_name(root: nn.Module, name: str) -> str:
    """The name of a tensor or module inside of `root` without what DDP, FSDP, compile and checkpoint put into it.

    A wrapper by hand leaves none in them either. A model's own child may be called `module`, too: its names are shorter
    then, on both sides; but where one of them is also the model's own, all keep the word.
    """
    owner: Any = root
    kept = list[str]()
    for part in name.split("."):
        if part not in WRAPPERS and not (part == "module" and _wraps(owner)):
            kept.append(part)
        owner = getattr(owner, part, None)
    return ".".join(kept)


def _wraps(owner: Any) -> bool:
    """Whether the names of its `module` can do without that word: DDP's can, others' where that merges no two."""
    if isinstance(owner, DistributedDataParallel | nn.DataParallel):
        return True
    return isinstance(owner, nn.Module) and _heads(owner.module).isdisjoint(_own_heads(owner))


def _heads(module: Any) -> set[str]:
    """With what logical names inside of it begin."""
    inner = {"module"} if "module" in module._modules else set[str]()
    if inner and _wraps(module):
        inner = _heads(module.module)
    return inner | _own_heads(module)


def _own_heads(module: Any) -> set[str]:
    """The same, but for what lies in its `module`."""
    held = module._parameters.keys(), module._buffers.keys(), module._modules.keys()  # None and shared ones as well
    own = set(chain(*held)) - {"module", *WRAPPERS}
    return own.union(*(_heads(module._modules[word]) for word in WRAPPERS if word in module._modules))


def logical_parameters(model: nn.Module | Mapping[str, nn.Module]) -> dict[str, nn.Parameter]:
    """Every parameter by its logical name; a tied one under each of its names."""
    return dict(_walk(model, lambda module: module.named_parameters(remove_duplicate=False)))


def logical_buffers(model: nn.Module | Mapping[str, nn.Module]) -> dict[str, torch.Tensor]:
    """Every buffer by its logical name."""
    return dict(_walk(model, lambda module: module.named_buffers()))


def modules_of(model: Any) -> dict[str, nn.Module]:
    """The modules of what `build` returned, by name: "" for a single one."""
    if isinstance(model, nn.Module):
        return {"": model}
    if isinstance(model, Mapping):
        return {str(name): module for name, module in model.items()}
    return {str(index): module for index, module in enumerate(model)}


def _walk(model: Any, items: Callable[[nn.Module], Any]) -> Iterator[tuple[str, Any]]:
    for which, module in modules_of(model).items():
        prefix = f"{which}." if which else ""
        seen = set()
        for name, tensor in items(module):
            logical = prefix + logical_name(module, name)
            if logical not in seen:
                seen.add(logical)
                yield logical, tensor


def part_of(tensor: torch.Tensor) -> Part:
    """A copy of what this process holds of a tensor, as numbers that can be subtracted, and where it lies in the whole.

    A sum that is not reduced yet is reduced: collective then.
    """
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return Part(None, comparable(tensor))
    if any(placement.is_partial() for placement in tensor.placements):
        return Part(Box.whole(tuple(tensor.shape)), comparable(tensor.full_tensor()))
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Part(Box(tuple(offset), tuple(shape)), comparable(tensor.to_local()))


def comparable(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU, dense, whose differences are right: bool has none, and those of unsigned numbers wrap."""
    copied = tensor.cpu().to_dense() if tensor.layout is not torch.strided else tensor.cpu()
    signed = SIGNED.get(copied.dtype)
    return copied.clone() if signed is None else copied.to(signed)


def parts_of(tensors: Mapping[str, torch.Tensor]) -> Parts:
    """`part_of` of each."""
    return {name: part_of(tensor) for name, tensor in tensors.items()}


def has_moved(models: Mapping[str, nn.Module], before: Parts) -> bool:
    """Whether a buffer is not what it was `before`; those by which experts are balanced are moved by the step."""
    parts = [part for module in models.values() for part in module.modules() if hasattr(part, "update_balance")]
    balanced = {id(buffer) for part in parts for buffer in part.buffers()}
    now = {name: buffer for name, buffer in logical_buffers(models).items() if id(buffer) not in balanced}
    return any(not torch.equal(part_of(now[name]).value, before[name].value) for name in now.keys() & before.keys())


def rows_of(batches: Any) -> list[int]:
    """Digests of the samples of a batch: of every row of its tensors, where these have one length.

    What repeats at the end of a row of numbers does not count: batches are padded to different lengths. Of a batch
    without rows (`has_rows`) there is one digest, of all of it.
    """
    tensors = _tensors_of(batches)
    if not has_rows(batches):
        return [_digest([_bytes(tensor) for tensor in tensors] or [repr(batches).encode()])]
    return [_digest([_bytes(_unpadded(tensor[row])) for tensor in tensors]) for row in range(len(tensors[0]))]


def has_rows(batches: Any) -> bool:
    """Whether the tensors of a batch have one length, that of its samples; not where these are packed one behind the
    other, as graphs are, so that what a part of them is can be told by the program alone.
    """
    lengths = {tensor.shape[0] if tensor.dim() else -1 for tensor in _tensors_of(batches)}
    return len(lengths) == 1 and lengths != {-1}


def _tensors_of(batches: Any) -> list[torch.Tensor]:
    leaves = [leaf for leaf in pytree.tree_leaves(batches) if isinstance(leaf, torch.Tensor | np.ndarray)]
    return [torch.as_tensor(leaf).detach().cpu() for leaf in leaves]


def values_of(batch: Any) -> list[tuple[int, int]]:
    """(digest of its shapes, of its values) of each sample of a batch; [] where its tensors have no row for each."""
    tensors = [leaf.detach().cpu() for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    lengths = {tensor.shape[0] if tensor.dim() else -1 for tensor in tensors}
    if len(lengths) != 1 or lengths == {-1}:
        return []
    shapes = zlib.crc32(repr([(tensor.shape[1:], tensor.dtype) for tensor in tensors]).encode())
    return [(shapes, _digest([_bytes(tensor[row]) for tensor in tensors])) for row in range(lengths.pop())]


def _unpadded(row: torch.Tensor) -> torch.Tensor:
    if row.dim() != 1 or len(row) < 2:
        return row
    other = (row != row[-1]).nonzero()
    return row[: int(other[-1]) + 2] if len(other) else row[:1]


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _digest(parts: Sequence[bytes]) -> int:
    value = 0
    for part in parts:
        value = (value * 0x9E3779B97F4A7C15 + zlib.crc32(part) + (zlib.adler32(part) << 32)) % (1 << 64)
    return value


def generator_digests() -> tuple[int, int, int]:
    """Digests of the states of torch's, numpy's and python's generators."""
    numpy_state: Any = np.random.get_state()
    return (
        torch_digest(),
        zlib.crc32(numpy_state[1].tobytes() + bytes([numpy_state[2] % 251])),
        zlib.crc32(repr(random.getstate()).encode()),
    )


def seed_everything(seed: int) -> None:
    """Seed torch, numpy and python."""
    torch.manual_seed(seed)
    seed_plain(seed)


@torch.no_grad()
def shake(parameters: Mapping[str, torch.Tensor], seed: int, dtype: torch.dtype | None = None) -> None:
    """Move every parameter by up to an ulp of `dtype`; None: of its own precision."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in {id(p): p for p in parameters.values()}.values():
        if parameter.is_floating_point():
            noise = torch.rand(parameter.shape, generator=generator, dtype=torch.float64) * 2 - 1
            parameter.mul_(1 + noise.to(parameter.dtype) * torch.finfo(dtype or parameter.dtype).eps)
