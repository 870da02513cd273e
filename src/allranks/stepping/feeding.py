"""Are the right samples fed: other ones to ranks that share out a step, the same ones to ranks that share a layer?

The ledger proves positions: what all ranks have fed in a step must be the samples that the order puts there, each once.
The values prove the dataset: one that shards itself wrongly gives two ranks the same samples, one that draws from a
generator of its own gives the ranks of one layer different ones. Only batches on the host are looked at.
"""

import zlib
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, final

import numpy as np
import torch
from torch.utils import _pytree as pytree

from allranks.data.micro_step import StepBatch
from allranks.data.stream import DataStream
from allranks.digest import ledger_sum
from allranks.parallel.mesh import Mesh
from allranks.stepping.passes import ledger_of
from allranks.stepping.sentinel import RoundSentinel, StepSentinel
from allranks.verdict import Verdict

ROWS, ROW_BYTES = 16, 1 << 14
"""So many rows of the first forward are read, and so much of each."""
ENOUGH, DISTINCT = 8, 4
"""Rows that are alike, in rounds one after another, and different ones among them: less may be chance."""
MODULUS = 1 << 64
SEEDED = (
    "draw in the dataset from the global generators of python, numpy or torch alone, which are seeded by the position "
    "of the sample, and not from the clock or a generator of its own"
)


@final
class Feeding(StepSentinel, RoundSentinel):
    """Looks at what is fed in a step after which the ranks are compared.

    Args:
        mesh: who sees which samples.
        stream: their order.
        due: whether the ranks are compared after a step (from 1).
    """

    name: ClassVar[str] = "samples"

    def __init__(self, mesh: Mesh, stream: DataStream, due: Callable[[int], bool]) -> None:
        self._mesh, self._stream, self._due = mesh, stream, due
        self._rows: list[int] = []
        self._ledger = self._expected = 0
        self._alike: dict[tuple[int, int], list[int]] = {}  # pair of ranks -> the rows that both have had

    def look(self, which: str, batch: StepBatch) -> None:
        if not self._due(batch.step + 1):
            return
        first = batch.micro_steps[0]
        self._rows = rows_of(first.batch) if first.weight else []
        self._ledger = ledger_of(batch) if self._mesh.counts else 0
        if self._stream.order == "map":
            positions = np.arange(batch.position, batch.position + batch.size)
            self._expected = ledger_sum(positions, self._stream.samples_at(positions))  # type: ignore[arg-type]

    def tell(self) -> dict[str, Any]:
        return {"dp": self._mesh.dp_rank, "rows": self._rows, "ledger": self._ledger}

    def judge(self, told: Sequence[Any], step: int) -> Verdict | None:
        expected = self._expected
        # A round that no look came before, as at the end of a loop, has nothing new: rows told twice would count twice.
        self._rows, self._ledger, self._expected = [], 0, 0
        if self._stream.order == "map" and sum(one["ledger"] for one in told) % MODULUS != expected:
            what = f"step {step}: what the ranks have fed are not the samples of this step, each once"
            return Verdict(
                "samples_wrong", what, (), "this is a fault of allranks: please report it, with the run's config"
            )
        return self._apart(told, step) or self._repeated(told, step)

    def _apart(self, told: Sequence[Any], step: int) -> Verdict | None:
        first: dict[int, int] = {}
        for rank, one in enumerate(told):
            other = first.setdefault(one["dp"], rank)
            if told[other]["rows"] != one["rows"]:
                what = f"step {step}: ranks {other} and {rank} have to see the same samples, and were fed other values"
                return Verdict("fed_apart", what, ("the first rows of the first forward were compared",), SEEDED)
        return None

    def _repeated(self, told: Sequence[Any], step: int) -> Verdict | None:
        first, alike = dict[tuple[int, ...], int](), dict[tuple[int, int], list[int]]()
        for rank, one in enumerate(told):
            rows = one["rows"]
            other = first.setdefault(tuple(rows), rank)
            if rows and told[other]["dp"] != one["dp"]:
                alike[other, rank] = [*self._alike.get((other, rank), ()), *rows]
        self._alike = alike
        for (one, other), rows in alike.items():
            if len(rows) >= ENOUGH and len(set(rows)) >= DISTINCT:
                what = f"step {step}: ranks {one} and {other} are fed the same samples: {len(rows)} rows were alike"
                remedy = "a dataset with order='sharded' has to give each rank a part of its own (RANK and WORLD_SIZE)"
                return Verdict("fed_alike", what, (f"{len(set(rows))} different ones, in the same order",), remedy)
        return None


def rows_of(batch: object) -> list[int]:
    """A digest of each of the first rows, over all tensors on the host that have as many rows as the first one."""
    tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor) and _is_plain(leaf)]
    if not tensors:
        return []
    tensors = [tensor for tensor in tensors if len(tensor) == len(tensors[0])]
    return [_digest([tensor[row] for tensor in tensors]) for row in range(min(ROWS, len(tensors[0])))]


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it has rows whose bytes can be read, on the host."""
    readable = tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized or tensor.is_complex())
    return tensor.device.type == "cpu" and readable and tensor.dim() > 0


def _digest(values: Sequence[torch.Tensor]) -> int:
    total = 0
    for value in values:
        flat = value.detach().reshape(-1).contiguous()[: max(1, ROW_BYTES // value.element_size())]
        total = zlib.crc32(flat.view(torch.uint8).numpy().tobytes(), total)
    return total
