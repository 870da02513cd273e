"""The forward of a model that a loop of one's own calls, in the precision of its world (law 7)."""

from contextlib import AbstractContextManager
from typing import Any, final

from torch import nn

from allranks.parallel.precision import Precision


@final
class Lowered:
    """Has a module's forwards run under autocast, with an output in float32, as a Task's do.

    Hooks, and not another `forward`: what the user holds stays the module, whose signature and copies are its own.
    """

    def __init__(self, precision: Precision, device_type: str) -> None:
        self._precision, self._device_type = precision, device_type
        self._entered: list[AbstractContextManager[object]] = []

    def watch(self, called: nn.Module) -> None:
        """From here on, all forwards of `called`."""
        # First and last: a wrapper's own hooks, of FSDP say, run inside, as they do in a Task's forward.
        called.register_forward_pre_hook(self._enter, prepend=True)
        called.register_forward_hook(self._leave, always_call=True)

    def _enter(self, *_: Any) -> None:
        context = self._precision.autocast(self._device_type)
        context.__enter__()
        self._entered.append(context)

    def _leave(self, module: nn.Module, arguments: Any, output: Any) -> Any:
        if not self._entered:  # a hook before `_enter` has raised
            return output
        self._entered.pop().__exit__(None, None, None)
        return self._precision.cast_output(output)
