"""What recompute repeats of a block's forward, operation by operation, and which results it keeps instead."""

from collections.abc import Iterator
from typing import NamedTuple, final

from allranks.kept_products import keeps_product
from allranks.model_profile import Block, Operation
from allranks.planning.mechanisms import Mechanisms
from allranks.planning.operation_times import is_product


@final
class Repeats(NamedTuple):
    """Of one operation: the share of its forward that recompute=full runs again, the share that torch's selective one
    does, and the share of its results that the latter keeps.
    """

    full: float
    selective: float
    kept: float


def repeats_of(block: Block, how: Mechanisms) -> Iterator[Repeats]:
    """Of each of the block's operations, in their order: what parallel/recompute.py does with it.

    torch.utils.checkpoint ends a repeated forward with the last tensor that the backward asks for, and cuts from
    compiled code what nobody asks for (selective); `Mechanisms.recomputes_to_last_kept` says whether full does so, too.
    Fused attention and convolutions are kept, and of the matrix products those of `keeps_product`. Of a router, most of
    whose time is no product, the scores are kept and all of its time is repeated.
    """
    end = ending(block)
    passed, number = False, 0
    for operation in block.operations:
        passed = passed or operation is end
        kept = float(operation.kind == "conv" or (operation.kind == "attention" and how.fused_attention))
        if _is_numbered(operation):
            parts = operation.parts or (1,)
            kept = sum(part for place, part in enumerate(parts, number + 1) if keeps_product(place)) / sum(parts)
            number += len(parts)
        again = 1.0 if operation.kind == "route" else 1.0 - kept
        yield Repeats(float(not (passed and how.recomputes_to_last_kept)), 0.0 if passed else again, kept)


def ending(block: Block) -> Operation | None:
    """The block's last product, where nothing behind it keeps anything for its backward: no repeated forward needs it.

    What experts give is weighted, and so kept, before it is added up (models/moe.py).
    """
    for operation in reversed(block.operations):
        if is_product(operation):
            return None if operation.cut == "expert" else operation
        if operation.saved_bytes:
            return None
    return None


def _is_numbered(operation: Operation) -> bool:
    """Whether it is one of the engine's MATRIX_PRODUCTS, or several: experts' grouped ones are not, a router's is."""
    return operation.kind in ("matmul", "route") and len(operation.shape) == 3 and operation.cut != "expert"
