"""What `model()` puts on its parameters besides values: attributes go along, hooks only where they mean the same.

A parameter that is moved, built without memory, cut or sharded becomes another object, which has neither by itself.
"""

from collections.abc import Mapping

import torch
from torch import nn

from allranks.errors import LayoutError
from allranks.layout import Layout

Marks = Mapping[str, Mapping[str, object]]
"""Logical name of a parameter -> its attributes."""


def note_marks(modules: Mapping[str, nn.Module]) -> Marks:
    """The attributes of every parameter as it was built; of tensor subclasses none: theirs are their own working."""
    return {
        f"{which}.{name}" if which else name: dict(vars(parameter))
        for which, module in modules.items()
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if type(parameter) is nn.Parameter and vars(parameter)
    }


def give_marks(marks: Marks, tensors: Mapping[str, torch.Tensor]) -> None:
    """Put them on what has taken the parameters' places, as far as it is here: optimizer() may group by them."""
    for name in marks.keys() & tensors.keys():
        vars(tensors[name]).update(marks[name])


def move_hooks(old: torch.Tensor, new: torch.Tensor) -> None:
    """Let the hooks of a parameter act on the one that takes its place, whole and on this process alone."""
    for hook in (old._backward_hooks or {}).values():
        new.register_hook(hook)
    for hook in (getattr(old, "_post_accumulate_grad_hooks", None) or {}).values():
        new.register_post_accumulate_grad_hook(hook)


def check_hooks(which: str, module: nn.Module, layout: Layout) -> None:
    """LayoutError where a parameter has hooks and no process has its whole gradient when they run."""
    if layout.world_size == 1 and not layout.fully_sharded:
        return
    for name, parameter in module.named_parameters(prefix=which):
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise LayoutError(
                f"model() has put a gradient hook on {name}, which would act on what each of {layout.world_size} "
                "processes computes, before they are summed: do it in forward or in the optimizer, or use single"
            )
