"""What tensor parallelism adds to one operation on a measured processor: its moves as parallel/tensor_ops makes them.

A move is a collective, as gloo was measured, and the copies around it: one into its buffer, one out of it.
"""

from typing import final

from allranks.cluster import Device
from allranks.model_profile import Operation
from allranks.planning.collectives import Group, all_gather_seconds, all_reduce_seconds, reduce_scatter_seconds
from allranks.planning.processor import passing_seconds
from allranks.planning.setting import Setting

WIDTH = 4.0
"""Bytes of a gradient."""


def tensor_seconds(operation: Operation, setting: Setting, group: Group, device: Device) -> float:
    """Seconds of its forward and backward on one rank, for one micro-step.

    Between layers activations are whole (Shoeybi et al. 1909.08053): a sum after a product that is cut by rows, and in
    the backward one before the layer that is cut by columns. Or they are cut along the sequence (2205.05198): then each
    of both is a gather and a scatter. Parameters that every rank has, in front of cut activations, have their gradients
    summed.
    """
    moves = _Moves(setting, group, device)
    size = operation.output_bytes * setting.micro_batch / setting.cp
    along, cut, kind = setting.sequence_parallel, operation.cut, operation.kind
    if cut == "row":
        seconds = 2 * (moves.gather(size) + moves.scatter(size)) if along else 2 * moves.sum(size)
        return seconds + (moves.sum(WIDTH * _bias(operation)) if along and _bias(operation) else 0.0)
    if cut == "vocab" and kind == "embedding":
        return moves.scatter(size) + moves.gather(size) if along else moves.sum(size)
    if cut == "vocab" and kind == "matmul":
        entry = size * operation.shape[2] / operation.shape[1] if len(operation.shape) == 3 else 0.0
        entered = moves.gather(entry) + moves.scatter(entry) if along else moves.sum(entry)
        return entered + (moves.gather(size) if operation.gathered else 0.0)
    if cut == "sequence" and operation.parameters and operation.trained and along:
        return moves.sum(WIDTH * operation.parameters)
    return 0.0


@final
class _Moves:
    """Seconds of each move of so many bytes, the whole tensor's."""

    def __init__(self, setting: Setting, group: Group, device: Device) -> None:
        self._group, self._device, self._size = group, device, setting.tp
        self._fixed = setting.mechanisms.fixed.move

    def sum(self, size: float) -> float:
        """Of the ranks' values, into a copy (parallel/tensor_ops.py)."""
        return all_reduce_seconds(self._group, size) + self._copied(2 * size, 1) + self._fixed

    def gather(self, size: float) -> float:
        """Of the ranks' parts: a part is made contiguous, and the whole brought into the order of its dims.

        As parallel/tensor_ops.py does it; a copy reads and writes (arithmetic).
        """
        return all_gather_seconds(self._group, size) + self._copied(2 * size * (1 + 1 / self._size), 2) + self._fixed

    def scatter(self, size: float) -> float:
        """Of the sum: the whole is made contiguous, and the part brought into the order of its dims, as `gather`
        does it the other way round (parallel/tensor_ops.py).
        """
        copied = self._copied(2 * size * (1 + 1 / self._size), 2)
        return reduce_scatter_seconds(self._group, size) + copied + self._fixed

    def _copied(self, moved_bytes: float, kernels: int) -> float:
        return passing_seconds(self._device, moved_bytes, kernels)


def _bias(operation: Operation) -> float:
    """Its elements; 0 where the product has none, or its shape is not known."""
    if len(operation.shape) != 3:
        return 0.0
    _, out, into = operation.shape
    return max(0.0, operation.parameters - out * into)
