"""A dispatch mode under which products of matrices in a low precision are rounded otherwise, and nothing else changes.

A product is cut into pieces of its inner dim, each of which is rounded before they are added up, as tensor parallelism,
accumulation and other kernels do it. The mode lies below autograd, so that products of a backward are cut as well.
"""

from collections.abc import Callable, Iterable
from functools import reduce
from operator import add
from typing import Any, Final, final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

LOW: Final = (torch.bfloat16, torch.float16)
_ATEN: Final = torch.ops.aten
_PRODUCTS: Final = (_ATEN.mm, _ATEN.bmm, _ATEN.mv)
_ADDED: Final = {_ATEN.addmm: _ATEN.mm, _ATEN.baddbmm: _ATEN.bmm}  # to what is added, a product
_WHOLE: Final = (_ATEN.convolution, _ATEN.convolution_backward)


@final
class Pieces(TorchDispatchMode):
    """Inside, products are computed in `number` pieces; 1: as they are.

    Attributes:
        cut: products that were.
        whole: convolutions in a low precision, which nothing cuts.
    """

    def __init__(self, number: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cut = self.whole = 0
        self._number = number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute, a product in pieces."""
        packet = func.overloadpacket
        if not kwargs and packet in _PRODUCTS and self._cuts(args[0], args[1]):
            return _in_pieces(packet, args[0], args[1], self._number)
        if not kwargs and packet in _ADDED and len(args) == 3 and self._cuts(args[1], args[2]):
            return _in_pieces(_ADDED[packet], args[1], args[2], self._number) + args[0]
        self.whole += packet in _WHOLE and any(_is_low(value) for value in args)
        return func(*args, **(kwargs or {}))

    def _cuts(self, left: torch.Tensor, right: torch.Tensor) -> bool:
        cuts = self._number > 1 and _is_low(left) and _is_low(right) and left.shape[-1] >= self._number
        self.cut += cuts
        return cuts


def _in_pieces(product: Callable[..., Any], left: torch.Tensor, right: torch.Tensor, number: int) -> torch.Tensor:
    inner = -2 if right.dim() > 1 else -1
    pairs = zip(left.tensor_split(number, -1), right.tensor_split(number, inner), strict=True)
    rounded: Iterable[torch.Tensor] = (product(a, b) for a, b in pairs)
    return reduce(add, rounded)


def _is_low(value: Any) -> bool:
    """Whether it is here (no DTensor, nothing fake) and of a low precision."""
    return type(value) is torch.Tensor and value.dtype in LOW
