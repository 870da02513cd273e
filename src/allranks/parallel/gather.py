"""Rows of all ranks in one tensor, with gradients, however many each rank brings."""

import zlib
from typing import Any, final

import torch
import torch.distributed as dist
from torch.autograd.function import FunctionCtx, once_differentiable

from allranks.errors import TaskError


@final
class RanksRows:
    """The rows of the ranks of a group, in one forward of theirs.

    Args:
        group: None for one rank.
        counts: whether this rank's rows count. Those of a filler do not: no other rank sees them, and it finds its own
            behind everybody's, so that what compares its samples with all has them among all.

    Attributes:
        asked: whether anything was gathered.
    """

    def __init__(self, group: dist.ProcessGroup | None, *, counts: bool = True) -> None:
        self._group = group
        self._counts = counts
        self.asked = False

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """`gather_rows` of what counts; collective, and its backward too."""
        self.asked = True
        if self._counts:
            return gather_rows(rows, self._group)
        return torch.cat([gather_rows(rows[:0], self._group), rows])

    def offset(self, rows: torch.Tensor) -> int:
        """Where this rank's rows begin in `gather(rows)`; collective."""
        if self._group is None:
            return 0
        counts = _counts(rows if self._counts else rows[:0], self._group)
        return sum(counts[: dist.get_rank(self._group)]) if self._counts else sum(counts)


def gather_rows(rows: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The rows (dim 0) of every rank of `group`, in rank order; collective, and its backward too.

    The gradient of a row is the sum of what all ranks' losses say of it, as if one process had computed the sum of
    these losses.

    Args:
        rows: any number of them, also none; dtype and the other dims are the same on every rank.
        group: None: this process alone.

    Raises:
        TaskError: on every rank, where dtype or dims differ.
    """
    if rows.dim() == 0:
        raise TaskError("gather takes rows: a tensor of at least one dim; a number becomes one by .reshape(1)")
    gathered: torch.Tensor = rows if group is None else _Gather.apply(rows, group)  # type: ignore[no-untyped-call]
    return gathered


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        counts = _counts(rows, group)
        first = sum(counts[: dist.get_rank(group)])
        ctx.group, ctx.mine = group, slice(first, first + len(rows))  # type: ignore[attr-defined]
        return _all_gather(rows, counts, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradient.clone(memory_format=torch.contiguous_format)
        if total.numel():
            dist.all_reduce(total, group=ctx.group)
        return total[ctx.mine], None


def _counts(rows: torch.Tensor, group: dist.ProcessGroup) -> list[int]:
    """How many rows each rank brings."""
    kind = f"{rows.dtype}{tuple(rows.shape[1:])}"
    mine = torch.tensor([len(rows), zlib.crc32(kind.encode())], dtype=torch.int64, device=rows.device)
    table = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(table, mine, group=group)
    counts, kinds = zip(*torch.stack(table).tolist(), strict=True)
    if len(set(kinds)) > 1:
        where = dist.get_rank(group)
        raise TaskError(f"gather: dtype and dims after the first differ over the ranks; rank {where} has {kind}")
    return list(counts)


def _all_gather(rows: torch.Tensor, counts: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    # As bytes, padded to the longest: every dtype travels, and nothing is rounded.
    row_bytes = rows[:1].numel() * rows.element_size() if len(rows) else rows.new_empty(rows.shape[1:]).nbytes
    padded = torch.zeros(max(counts), row_bytes, dtype=torch.uint8, device=rows.device)
    if rows.numel():
        padded[: len(rows)] = rows.detach().contiguous().view(len(rows), -1).view(torch.uint8)
    if not padded.numel():
        return rows.new_empty((sum(counts), *rows.shape[1:]))
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded, group=group)
    whole = torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
    return whole.view(rows.dtype).view(sum(counts), *rows.shape[1:])
