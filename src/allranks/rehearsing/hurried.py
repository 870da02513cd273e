"""What torch does over and over, done once or sooner while a model is rehearsed: what comes of it is the same.

Two things grow faster than the model, and of a model of 80 blocks they are half of all that a rehearsal takes:

    every one of n tensors of a fused update looks at the placements of all n    (torch 2.13, _sharding_prop.py)
    FSDP2 cuts each parameter for all ranks, and takes one part and one shape    (_fsdp_param.py)

What it knows of a tensor, by which it finds what an operator gave before, it writes down field by field, sizes number
by number (fake_tensor.py): here that is one tuple of the same values.

And one thing of ours every rank of a pipeline does alike: counting what the model computes between its cuts.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from operator import attrgetter
from typing import Any, final, overload

import torch
import torch.distributed.tensor._sharding_prop as sharding_prop
from torch import nn
from torch._subclasses.fake_tensor import TensorMetadata
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor.placement_types import _StridedShard

from allranks.rehearsing.world import replaced
from allranks.stepping import session

FLAG = "_propagate_use_strided_shard_flag"
CHUNKS = "_chunk_with_empty"
FLATTEN = "_flatten_into"


@contextmanager
def hurried() -> Iterator[None]:
    """Inside, it is done so."""
    with ExitStack() as stack:
        if hasattr(sharding_prop, FLAG):  # torch 2.11 has no such flag
            stack.enter_context(replaced(sharding_prop, FLAG, _looking_once(getattr(sharding_prop, FLAG))))
        stack.enter_context(replaced(_fsdp_param, CHUNKS, _cutting_late(getattr(_fsdp_param, CHUNKS))))
        stack.enter_context(replaced(TensorMetadata, FLATTEN, _at_once(getattr(TensorMetadata, FLATTEN))))
        yield


@contextmanager
def counting_once() -> Iterator[None]:
    """Inside, where the same model is rehearsed on many ranks, its operations are counted once for all."""
    count, known = vars(session)["count_between"], dict[Any, list[float]]()

    def look_up(
        task: Any, dataset: Any, seed: int, precision: Any, module: nn.Module, names: Sequence[str]
    ) -> list[float]:
        # A model that depends on the rank shall be seen to do so.
        key = tuple(names), tuple(tensor.shape for tensor in module.parameters())
        if key not in known:
            known[key] = count(task, dataset, seed, precision, module, names)
        return list(known[key])

    with replaced(session, "count_between", look_up):
        yield


def _at_once(flatten: Callable[..., None]) -> Callable[..., None]:
    take = attrgetter(*(field.name for field in fields(TensorMetadata)))

    def write(metadata: TensorMetadata, result: list[object], mode: Any, state: Any) -> None:
        if mode.shape_env is None:
            result.append(take(metadata))
        else:  # sizes may be symbols there
            flatten(metadata, result, mode, state)

    return write


def _looking_once(propagate: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """The same, where no placement is strided, after one look at those of an operator."""
    looked: Any = None
    strided = False

    def look(strategy: Any, schema: Any) -> None:
        nonlocal looked, strided
        if schema is not looked:
            specs = schema.args_spec
            looked, strided = schema, any(isinstance(p, _StridedShard) for spec in specs for p in spec.placements)
        if strided:
            propagate(strategy, schema)

    return look


def _cutting_late(cut: Callable[..., Sequence[torch.Tensor]]) -> Callable[..., Sequence[torch.Tensor]]:
    """The same parts, each of them made when it is asked for."""

    def parts(tensor: torch.Tensor, num_chunks: int, dim: int) -> Sequence[torch.Tensor]:
        return Parts(tensor, num_chunks, dim) if tensor.size(dim) else cut(tensor, num_chunks, dim=dim)

    return parts


@final
class Parts(Sequence[torch.Tensor]):
    """What torch.chunk makes of a tensor, and empty tensors where that are too few."""

    def __init__(self, tensor: torch.Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._number, self._dim = tensor, num_chunks, dim
        self._length = -(-tensor.size(dim) // num_chunks)

    def __len__(self) -> int:
        return self._number

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[torch.Tensor]: ...

    def __getitem__(self, index: int | slice) -> torch.Tensor | Sequence[torch.Tensor]:
        """One part, or several."""
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(self._number))]
        start = range(self._number)[index] * self._length
        left = self._tensor.size(self._dim) - start
        if left <= 0:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, min(left, self._length))
