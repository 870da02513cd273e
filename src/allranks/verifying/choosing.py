"""A dispatch mode that sees where a model chooses: torch.topk, sort, argsort, max and argmax over a last dim.

What counts as routing is read off shapes, not names: scores with one row for each row that some module around them was
given, a token's say. The mode lies below autograd and autocast, so that gradients follow what is chosen in the end.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from allranks.verifying.observation import logical_name
from allranks.verifying.routing import Place

MOST_CANDIDATES: Final = 1024  # what chooses among more, as of a vocabulary, is no router
# What they return: values and places, or places alone.
_PAIRS: Final = (torch.ops.aten.topk, torch.ops.aten.sort, torch.ops.aten.max)
_PLACES: Final = (torch.ops.aten.argsort, torch.ops.aten.argmax)

Decide = Callable[[Place, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor | None]


@final
@dataclass(frozen=True)
class _Choice:
    """A call that chooses.

    Attributes:
        scores: [..., candidates].
        chosen: [..., number], a dim of 1 put back where the call has left it out.
        result: of the call.
        paired: whether that is (values, places).
    """

    scores: torch.Tensor
    chosen: torch.Tensor
    result: Any
    paired: bool

    def replaced(self, chosen: torch.Tensor) -> Any:
        """What the call would have returned, had it chosen `chosen` [rows, number]."""
        chosen = chosen.view(self.chosen.shape)
        values = self.scores.gather(-1, chosen)
        shape = (self.result[1] if self.paired else self.result).shape
        if not self.paired:
            return chosen.view(shape)
        return values.view(shape), chosen.view(shape)


class Choosing(TorchDispatchMode):
    """While `within`, what a model chooses goes through `decide` (of a Recorder or a Replayer)."""

    def __init__(self, decide: Decide) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._decide = decide
        self._names: dict[int, str] = {}
        self._inside: list[tuple[str, list[torch.Tensor]]] = []

    @contextmanager
    def within(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Around the forwards and backwards (which may compute a forward again) of these modules, by name."""
        for which, module in modules.items():
            prefix = f"{which}." if which else ""
            for name, member in module.named_modules():
                # What a wrapper holds has the name of the wrapper.
                self._names[id(member)] = prefix + logical_name(module, name)
        entering = register_module_forward_pre_hook(self._enter)
        leaving = register_module_forward_hook(self._leave, always_call=True)
        try:
            with self:
                yield
        finally:
            entering.remove()
            leaving.remove()
            self._inside.clear()

    def _enter(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        name = self._names.get(id(module))
        if name is not None:
            self._inside.append((name, [one for one in arguments if _has_rows(one)]))

    def _leave(self, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        if id(module) in self._names and self._inside:
            self._inside.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute; where that chooses inside of a module, ask."""
        result = func(*args, **(kwargs or {}))
        choice = _choice(func, args, kwargs or {}, result) if self._inside else None
        if choice is None:
            return result
        scores, chosen = choice.scores.flatten(0, -2), choice.chosen.flatten(0, -2)
        for name, given in reversed(self._inside):
            for rows in (one.detach().flatten(0, -2) for one in given):
                if len(rows) == len(scores):
                    place = Place(name, scores.shape[1], chosen.shape[1])
                    other = self._decide(place, rows, scores, chosen)
                    return result if other is None else choice.replaced(other)
        return result


def _choice(func: Any, args: Any, kwargs: Any, result: Any) -> _Choice | None:
    """The call as one that chooses; None where it does not, or where nobody can say for whom."""
    packet = func.overloadpacket
    paired = packet in _PAIRS
    if not paired and packet not in _PLACES:
        return None
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    scores, dim = given["self"], given.get("dim", None if packet is torch.ops.aten.argmax else -1)
    if not _has_rows(scores) or not 1 < scores.shape[-1] <= MOST_CANDIDATES:
        return None
    if not isinstance(dim, int) or dim % scores.dim() != scores.dim() - 1:
        return None
    if paired and not isinstance(result, tuple | list):
        return None  # max of two tensors, or of all elements
    chosen = result[1] if paired else result
    return _Choice(scores, chosen if chosen.dim() == scores.dim() else chosen.unsqueeze(-1), result, paired)


def _has_rows(value: Any) -> bool:
    """Whether it is [..., width] of floating numbers, all of which are here (no DTensor, nothing fake)."""
    return type(value) is torch.Tensor and value.is_floating_point() and value.dim() > 1
