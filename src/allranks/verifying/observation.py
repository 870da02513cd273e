"""Looking at a program that knows nothing of it: parts of tensors by logical name, samples, dropouts, clipping."""

import random
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final
from unittest.mock import patch

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils import _pytree as pytree

from allranks.parameter_map import Box
from allranks.verifying.early_names import renaming
from allranks.verifying.loader_watch import LoaderWatch, torch_digest
from allranks.verifying.recording import Draw, Part, Parts

WRAPPERS = ("module.", "_fsdp_wrapped_module.", "_orig_mod.", "_checkpoint_wrapped_module.")
NOISE = ("randn", "rand", "randn_like", "rand_like")
DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


def logical_name(name: str) -> str:
    """The name of a parameter without what DDP, FSDP, compile and checkpoint put into it."""
    for wrapper in WRAPPERS:
        name = name.removeprefix(wrapper).replace(f".{wrapper}", ".")
    return name


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
            logical = prefix + logical_name(name)
            if logical not in seen:
                seen.add(logical)
                yield logical, tensor


def part_of(tensor: torch.Tensor) -> Part:
    """A copy of what this process holds of a tensor, and where it lies in the whole.

    A sum that is not reduced yet is reduced: collective then.
    """
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return Part(None, tensor.cpu().clone())
    if any(placement.is_partial() for placement in tensor.placements):
        return Part(Box.whole(tuple(tensor.shape)), tensor.full_tensor().cpu().clone())
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Part(Box(tuple(offset), tuple(shape)), tensor.to_local().cpu().clone())


def parts_of(tensors: Mapping[str, torch.Tensor]) -> Parts:
    """`part_of` of each."""
    return {name: part_of(tensor) for name, tensor in tensors.items()}


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
    np.random.seed(seed % (1 << 32))
    random.seed(seed)


@torch.no_grad()
def shake(parameters: Mapping[str, torch.Tensor], seed: int, dtype: torch.dtype | None = None) -> None:
    """Move every parameter by up to an ulp of `dtype`; None: of its own precision."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in {id(p): p for p in parameters.values()}.values():
        if parameter.is_floating_point():
            noise = torch.rand(parameter.shape, generator=generator, dtype=torch.float64) * 2 - 1
            parameter.mul_(1 + noise.to(parameter.dtype) * torch.finfo(dtype or parameter.dtype).eps)


@final
@dataclass
class Observer:
    """What a program's calls of torch tell while it runs.

    Attributes:
        drops: whether dropouts drop; if not, they are recorded, draw their numbers, and let everything pass.
        draws: the dropouts so far.
        rows: gives digests of the samples in work; noise with a row for each of them (torch.randn and the like) is then
            a function of the sample, so that it does not depend on who draws it.
        own_noise: whether that holds of generators of the program's own, too; these draws are recorded.
        on_clip: called with (parameters, norm) before torch's clipping scales gradients.
        loaders: what torch's loaders and samplers do.
        drawing: whether it draws itself at this moment, in place of the program and without any effect on it.
    """

    drops: bool = False
    draws: list[Draw] = field(default_factory=list)
    rows: Callable[[], Sequence[int]] = lambda: ()
    on_clip: Callable[[Sequence[torch.Tensor], torch.Tensor], None] = lambda parameters, norm: None
    loaders: LoaderWatch = field(default_factory=LoaderWatch)
    own_noise: bool = False
    drawing: bool = False
    _calls: int = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, torch's dropouts and clipping tell."""
        functional: Any = torch.nn.functional
        clip_grad: Any = torch.nn.utils.clip_grad
        clip, attention = clip_grad._clip_grads_with_norm_, functional.scaled_dot_product_attention

        def clipping(parameters: Any, max_norm: float, total_norm: torch.Tensor, foreach: bool | None = None) -> None:
            held = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            self.on_clip(held, total_norm)
            clip(held, max_norm, total_norm, foreach)

        def attending(query: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
            rest = list(args)
            probability = rest[3] if len(rest) > 3 else options.get("dropout_p", 0.0)
            if probability and not self.drops:
                self._draw(query)
                if len(rest) > 3:
                    rest[3] = 0.0
                else:
                    options["dropout_p"] = 0.0
            elif probability:
                self._note(query.shape)
            found: torch.Tensor = attention(query, *rest, **options)
            return found

        replaced = {attention: attending}
        replaced |= {getattr(functional, name): self._dropping(getattr(functional, name)) for name in DROPOUTS}
        replaced |= {getattr(torch, name): self._by_sample(getattr(torch, name)) for name in NOISE}
        with ExitStack() as stack:
            stack.enter_context(self.loaders.watching())
            stack.enter_context(patch.object(clip_grad, "_clip_grads_with_norm_", clipping))
            stack.enter_context(renaming(replaced))
            for owner, names in ((functional, ("scaled_dot_product_attention", *DROPOUTS)), (torch, NOISE)):
                for name in names:
                    stack.enter_context(patch.object(owner, name, replaced[getattr(owner, name)]))
            yield

    def feed(self, rows: Sequence[int] | Callable[[], Sequence[int]], draws: list[Draw] | None = None) -> None:
        """Samples with these digests are in work from now on, and dropouts are noted in `draws`."""
        self.begin_forward(rows)
        self.draws = [] if draws is None else draws

    def begin_forward(self, rows: Sequence[int] | Callable[[], Sequence[int]] | None = None) -> None:
        """A forward begins: noise is counted from the first on. `rows`: its samples, where they are others."""
        self._calls = 0
        if rows is not None:
            self.rows = rows if callable(rows) else partial(list, rows)

    def _by_sample(self, original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        plain: Any = {"randn_like": torch.randn, "rand_like": torch.rand}.get(original.__name__, original)

        def drawn(*args: Any, **options: Any) -> torch.Tensor:
            like = args[0] if args and isinstance(args[0], torch.Tensor) else None
            sizes = like.shape if like is not None else args[0] if args and not isinstance(args[0], int) else args
            shape = tuple(options.get("size", sizes))
            rows = self.rows()
            by_row = len(rows) > 0 and len(shape) > 1 and shape[0] == len(rows)
            own = options.get("generator")
            if not by_row or (own is not None and not self.own_noise):
                return original(*args, **options)
            self.drawing = True
            if own is not None:
                self._note(shape, own)
                original(*args, **options)  # what it draws next is what it would have been
            if like is not None:
                options = {"dtype": like.dtype, "device": like.device} | options
            options = {k: value for k, value in options.items() if k not in ("size", "memory_format", "generator")}
            self._calls += 1
            keys = [(row + self._calls * 0x9E3779B97F4A7C15) % (1 << 63) for row in rows]
            seeded = (torch.Generator().manual_seed(key) for key in keys)
            made = torch.stack([plain(shape[1:], generator=generator, **options) for generator in seeded])
            self.drawing = False
            return made

        return drawn

    def _dropping(self, original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
            if training and p > 0.0 and not self.drops:
                self._draw(input)
                # A mask that lets everything pass: it is kept for the backward as a real one is, or made again there.
                return input * torch.ones_like(input)
            if training and p > 0.0:
                self._note(input.shape)
            return original(input, p, training, inplace)

        return dropout

    def _draw(self, input: torch.Tensor) -> None:
        self._note(input.shape)
        self.drawing = True
        torch.rand(input.numel())
        self.drawing = False

    def _note(self, shape: Sequence[int], own: torch.Generator | None = None) -> None:
        again = bool(torch._C._current_graph_task_id() != -1)
        self.draws.append(Draw(torch_digest(own), tuple(shape), again, own is not None))
