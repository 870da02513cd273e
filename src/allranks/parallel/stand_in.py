"""Zeros in place of what the modules of other stages of a pipeline return.

Their shapes are found on the meta device, once for each kind of call.
"""

import copy
from typing import Any, final

import torch
from torch import nn
from torch.utils import _pytree as pytree

from allranks.errors import LayoutError
from allranks.parallel.stage_draws import drawing_aside

SHAPES = 1 << 13
"""So many calls are remembered, those that came last: where lengths change for ever, one of them takes some kB."""


@final
class StandIns:
    """What has been found of each module and kind of call."""

    def __init__(self) -> None:
        self._shapes: dict[object, Any] = {}  # in the order of their last use

    def make(self, name: str, twin: nn.Module, training: bool, args: Any, kwargs: Any) -> Any:
        """Zeros in the shape of what a module would return.

        Args:
            name: of the module.
            twin: its copy on the meta device (`on_meta`).
            training: whether the module is in training.

        Raises:
            LayoutError: nobody knows that without computing it.
        """
        leaves, spec = pytree.tree_flatten((args, kwargs))
        key = (name, training, spec, *map(_describe, leaves))
        if key in self._shapes:
            self._shapes[key] = self._shapes.pop(key)
        else:
            on_meta = [leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            meta_args, meta_kwargs = pytree.tree_unflatten(on_meta, spec)
            try:
                with torch.no_grad(), drawing_aside():
                    self._shapes[key] = twin.train(training)(*meta_args, **meta_kwargs)
            except Exception as error:
                # It looks at values, as a router of tokens does. A block returns what it is given, changed; where this
                # one does not, the forward fails behind it, or is compared with the whole model at the start.
                given = next((leaf for leaf in on_meta if is_floating(leaf)), None)
                if given is None:
                    raise LayoutError(
                        f"{name} belongs to another stage of the pipeline, and what it returns is not known without "
                        f"computing it ({type(error).__name__}: {error}): use another layout"
                    ) from error
                self._shapes[key] = given
            if len(self._shapes) > SHAPES:
                del self._shapes[next(iter(self._shapes))]
        device = next((leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)), None)
        return pytree.tree_map_only(torch.Tensor, lambda t: torch.zeros_like(t, device=device), self._shapes[key])


def on_meta(module: nn.Module) -> nn.Module:
    """A copy without memory, whose calls give shapes."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        data = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    # What a hook makes of parameters anew in each forward has a history, with which torch copies nothing.
    plain = (value for member in module.modules() for value in vars(member).values())
    for value in plain:
        if isinstance(value, torch.Tensor) and value.grad_fn is not None:
            memo[id(value)] = torch.empty_like(value, device="meta", requires_grad=False)
    return copy.deepcopy(module, memo)


def is_floating(leaf: object) -> bool:
    """Whether it is a tensor of floating numbers."""
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


def _describe(leaf: object) -> object:
    if isinstance(leaf, torch.Tensor):
        return (tuple(leaf.shape), leaf.dtype)
    return leaf if isinstance(leaf, bool | int | float | str | None) else type(leaf)
