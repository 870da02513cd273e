"""Models as they were before they were spread: rank 0's copy, and by what it is seen that nobody has changed them."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, final

import torch.distributed as dist
from torch import nn

from allranks.free_memory import free_host_bytes
from allranks.parallel.spread import Spread
from allranks.stepping.alike import everyones
from allranks.units import format_bytes

LARGEST_SHARE = 0.5
"""Of what rank 0's host has free, for a copy of the model: the parts of the others may lie there, too."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_OTHERS = ("training", "_is_torch_compile")  # the mode, which is the same for both, and a mark of torch.compile
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


@final
@dataclass(frozen=True, slots=True)
class Whole:
    """Rank 0's copy of a model, taken before it was spread; on other ranks nothing.

    Attributes:
        module: the copy, on the host.
        missing: why there is none; "" where there is one, and on other ranks.
    """

    module: nn.Module | None = None
    missing: str = ""


def copy_whole(module: nn.Module) -> Whole:
    """The copy, if there is room for it and it can be made."""
    size = sum(tensor.nbytes for tensor in chain(module.parameters(), module.buffers()))
    free = free_host_bytes()
    if size > LARGEST_SHARE * free:
        return Whole(None, f"a copy takes {format_bytes(size)}, and {format_bytes(free)} are free on rank 0's host")
    try:
        return Whole(copy.deepcopy(module).cpu())
    except Exception as error:  # an open file, a lock, a tensor with a history: the loop itself may do without a copy
        first = next(iter(str(error).splitlines()), "")
        return Whole(None, f"rank 0 could not copy it ({type(error).__name__}: {first})")


@final
@dataclass(frozen=True, slots=True)
class Start:
    """A model as it was before it was spread, to compare with.

    Attributes:
        whole: rank 0's copy of it.
        sums: logical name -> the sum of what this rank holds of it, and that of its squares.
        settings: of each module what may change what it computes, beside its tensors.
    """

    whole: Whole
    sums: Mapping[str, tuple[float, float]]
    settings: Mapping[str, Mapping[str, object]]

    @classmethod
    def of(cls, spread: Spread, whole: Whole) -> "Start":
        """As it is now."""
        return cls(whole, _sums(spread), _settings(spread.bare()))

    def why_not(self, spread: Spread) -> str:
        """Why the spread model is not to be compared with the copy; "" on every rank, or the same; collective."""
        mine = self.whole.missing
        if not mine and self.sums != _sums(spread):
            mine = "its values are not those with which it was spread"
        mine = mine or self._changed(spread)
        return next(filter(None, everyones(mine, dist.group.WORLD, spread.device)), "")

    def _changed(self, spread: Spread) -> str:
        for name, now in _settings(spread.bare()).items():
            then = self.settings.get(name, {})
            changed = next((key for key in {**then, **now} if then.get(key) != now.get(key)), None)
            if changed is not None:
                what = "a hook" if changed in _HOOKS else changed
                return f"{what} of {name or 'the model'} was changed after it was spread"
        return ""


def _sums(spread: Spread) -> dict[str, tuple[float, float]]:
    found = {}
    for name in spread.map:
        part = spread.local(name).double()  # one at a time: all of them are twice the model in float32
        found[name] = float(part.sum()), float(part.square().sum())
    return found


def _settings(module: nn.Module) -> dict[str, dict[str, object]]:
    """By module: attributes of plain kinds but the mode, how many hooks there are, and which parameters are trained."""
    found: dict[str, dict[str, object]] = {}
    for name, part in module.named_modules():
        own: dict[str, Any] = vars(part)
        plain = {key: value for key, value in own.items() if isinstance(value, _PLAIN) and key not in _OTHERS}
        hooks = {key: len(own.get(key) or ()) for key in _HOOKS}
        trained = {f"requires_grad of {key}": p.requires_grad for key, p in part._parameters.items() if p is not None}
        found[name] = plain | hooks | trained
    return found
