"""What `model()` puts on its parameters besides values: attributes go along, hooks only where they mean the same.

A parameter that is moved, built without memory, cut or sharded becomes another object, which has neither by itself.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from allranks.errors import LayoutError
from allranks.layout import Layout
from allranks.parallel.held_back import parameter_groups

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


def give_marks(marks: Marks, tensors: Mapping[str, torch.Tensor], modules: Iterable[nn.Module] = ()) -> None:
    """Put them on what has taken the parameters' places, as far as it is here: optimizer() may group by them.

    Of `modules` those that FSDP2 gathers hold whole parameters in a forward, which may read the attributes, too.
    """
    gathered = {id(one.sharded_param): one for group in parameter_groups(modules) for one in group.fsdp_params}
    for name in marks.keys() & tensors.keys():
        vars(tensors[name]).update(marks[name])
        if id(tensors[name]) in gathered:
            _mark_whole(gathered[id(tensors[name])], marks[name])


def _mark_whole(gathered: Any, attributes: Mapping[str, object]) -> None:
    """FSDP2 makes a whole parameter when it gathers one for the first time, and keeps it: only its memory goes."""
    make = gathered.init_unsharded_param

    def make_marked() -> None:
        known = hasattr(gathered, "_unsharded_param")
        make()
        if not known:
            vars(gathered._unsharded_param).update(attributes)

    gathered.init_unsharded_param = make_marked


def move_hooks(old: torch.Tensor, new: torch.Tensor) -> None:
    """Let the hooks of a parameter act on the one that takes its place, whole and on this process alone.

    One that was frozen after it got them has them still, if it is trained some day.
    """
    hooks = (old._backward_hooks or {}).values()
    after = (getattr(old, "_post_accumulate_grad_hooks", None) or {}).values()
    if not hooks and not after:
        return  # integers never have any, and no gradient either
    trains = new.requires_grad
    new.requires_grad_()
    for hook in hooks:
        new.register_hook(hook)
    for hook in after:
        new.register_post_accumulate_grad_hook(hook)
    new.requires_grad_(trains)


def check_hooks(which: str, module: nn.Module, layout: Layout) -> None:
    """LayoutError where a parameter that is trained has hooks, and no process its whole gradient when they run."""
    if layout.world_size == 1 and not layout.fully_sharded:
        return
    for name, parameter in module.named_parameters(prefix=which):
        hooks = parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
        if hooks and parameter.requires_grad:
            raise LayoutError(
                f"model() has put a gradient hook on {name}, which would act on what each of {layout.world_size} "
                "processes computes, before they are summed: do it in forward or in the optimizer, or use single"
            )
