"""PowerSGD: of each gradient matrix two thin factors travel; what they leave out is added to the next step's.

Source: Vogels, Karimireddy, Jaggi 2019 (arXiv 1905.13727), algorithm 1 and 2. With M the gradient plus what this rank
has not sent so far, P = M Q, orthonormalised after its sum over the ranks, and Q = M^T P, kept for the next step. Both
are linear in M, so that the result depends on the sum of all ranks' M alone, not on how many there are.

Not torch's `powerSGD_hook`: that keeps its state by bucket, and DDP changes its buckets after the first backward, so
that no checkpoint could take it back; over gloo it starts collectives from the threads that end others.
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
import torch.distributed as dist

from allranks.parameter_map import Box, Entry, one_of_each

ERROR, FACTOR = "optimizer.powersgd_error", "optimizer.powersgd_q"

# The thin factors of a matrix have to be at least so much smaller than it; what is not travels whole, as in torch.
SMALLEST_RATIO = 2


@final
@dataclass(slots=True)
class _Matrix:
    """One parameter's state: `error` [rows, columns], this rank's own; `q` [columns, rank], the same everywhere."""

    name: str
    error: torch.Tensor
    q: torch.Tensor


@final
class PowerSGD:
    """The state of every matrix that is worth it, and how a bucket of gradients travels by it.

    Args:
        parameters: logical name -> parameter; those of fewer than two dims travel whole.
        rank: of the factors.
        group: the ranks whose gradients are averaged; None: all.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], rank: int, group: dist.ProcessGroup | None) -> None:
        self._group, self._num_ranks = group, dist.get_world_size(group)
        self._matrices = {
            id(parameter): _begin(name, parameter, min(rank, *_matrix_shape(parameter)))
            for name, parameter in parameters.items()
            if parameter.dim() > 1 and _is_worth_it(*_matrix_shape(parameter), rank)
        }
        whole = [parameter for parameter in parameters.values() if id(parameter) not in self._matrices]
        self.whole_bytes = sum(parameter.nbytes for parameter in parameters.values())
        self.sent_bytes = sum(parameter.nbytes for parameter in whole) + sum(
            (len(matrix.error) + len(matrix.q)) * matrix.q.shape[1] * matrix.q.element_size()
            for matrix in self._matrices.values()
        )
        self.num_matrices, self.num_whole = len(self._matrices), len(whole)

    @torch.no_grad()
    def reduce(self, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        """Put what all ranks take for the mean into `gradients`; two messages; collective."""
        pairs = [(self._matrices.get(id(p)), gradient) for p, gradient in zip(parameters, gradients, strict=True)]
        low = [(matrix, gradient) for matrix, gradient in pairs if matrix is not None]
        whole = [gradient for matrix, gradient in pairs if matrix is None]
        for matrix, gradient in low:
            matrix.error += gradient.reshape(matrix.error.shape)  # M, until the end of this call
        products = [matrix.error @ matrix.q for matrix, _ in low]
        means, products = self._mean(whole, products)
        for gradient, mean in zip(whole, means, strict=True):
            gradient.copy_(mean)
        if not low:
            return
        bases = [torch.linalg.qr(product).Q for product in products]
        _, factors = self._mean([], [matrix.error.T @ basis for (matrix, _), basis in zip(low, bases, strict=True)])
        for (matrix, gradient), basis, factor in zip(low, bases, factors, strict=True):
            matrix.q.copy_(factor)
            sent = basis @ factor.T
            matrix.error -= sent
            gradient.copy_(sent.view(gradient.shape))

    @torch.no_grad()
    def begin_anew(self, where: torch.Tensor) -> None:
        """Forget what was not sent, and begin with the first columns, where the 0-dim `where` is 1.0.

        What is not finite would stay in both for ever.
        """
        for matrix in self._matrices.values():
            first, anew = _columns(matrix.name, *matrix.q.shape), where.to(matrix.q.device) > 0
            matrix.error.copy_(torch.where(anew, torch.zeros_like(matrix.error), matrix.error))
            matrix.q.copy_(torch.where(anew, first.to(matrix.q), matrix.q))

    def parts(self, entries: Mapping[str, Entry]) -> list[tuple[Entry, torch.Tensor]]:
        """The state under its names in a checkpoint; what each rank has not sent is one row of a tensor [ranks, ...].

        Args:
            entries: logical name -> who the parameter is.
        """
        found = []
        for matrix in self._matrices.values():
            entry, error = entries[matrix.name], matrix.error.view(1, *entries[matrix.name].shape)
            rank = dist.get_rank(self._group)
            mine = one_of_each(replace(entry, name=f"{ERROR}.{matrix.name}"), rank, self._num_ranks, (dist.get_rank(),))
            found.append((mine, error))
            shape = tuple(matrix.q.shape)
            found.append((replace(entry, name=f"{FACTOR}.{matrix.name}", shape=shape, box=Box.whole(shape)), matrix.q))
        return found

    def _mean(
        self, some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        tensors = [*some, *others]
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.all_reduce(flat, group=self._group)
        flat /= self._num_ranks
        parts = flat.split([tensor.numel() for tensor in tensors])
        means = [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
        return means[: len(some)], means[len(some) :]


def _matrix_shape(parameter: torch.Tensor) -> tuple[int, int]:
    rows = len(parameter)
    return rows, parameter.numel() // max(1, rows)


def _is_worth_it(rows: int, columns: int, rank: int) -> bool:
    return (rows + columns) * min(rank, rows, columns) * SMALLEST_RATIO < rows * columns


def _begin(name: str, parameter: torch.Tensor, rank: int) -> _Matrix:
    """Nothing unsent, and random columns, which are a function of the name: the same on every rank."""
    rows, columns = _matrix_shape(parameter)
    q = _columns(name, columns, rank)
    return _Matrix(name, parameter.new_zeros(rows, columns), q.to(dtype=parameter.dtype, device=parameter.device))


def _columns(name: str, num_rows: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(num_rows, rank, generator=generator, dtype=torch.float64)
