"""Whether the modules that spread a model are called themselves in a step, or only what lies inside of them."""

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any, final

import torch
from torch import nn

WORDS = ("Parallel", "FSDP")
"""In the names of the classes that spread a model: torch's, and most of others."""


@final
class WrapperWatch:
    """Notes the forwards, with gradients, of those outermost modules that spread a model.

    Args:
        modules: of what is trained, by name; "" of a single one. What is compiled is not watched.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._called = set[str]()
        self._watched = [name for name, module in modules.items() if _spreads(module)]
        self._hooks = [modules[name].register_forward_pre_hook(partial(self._note, name)) for name in self._watched]

    def take(self) -> tuple[str, ...]:
        """The names of those that nobody has called since the last time."""
        past = tuple(name for name in self._watched if name not in self._called)
        self._called.clear()
        return past

    def remove(self) -> None:
        """Watch no longer."""
        for hook in self._hooks:
            hook.remove()

    def _note(self, name: str, module: nn.Module, arguments: Any) -> None:
        if torch.is_grad_enabled():  # a look at the outputs synchronises nothing
            self._called.add(name)


def _spreads(module: nn.Module) -> bool:
    return any(word in type(module).__name__ for word in WORDS) and module._compiled_call_impl is None


def is_below(name: str, modules: Collection[str]) -> bool:
    """Whether a parameter is one of these modules'."""
    return any(not module or name.startswith(f"{module}.") for module in modules)
