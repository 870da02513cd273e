"""What HSDP holds back between micro-steps, and torch would lose without a word.

A unit's gradients of the earlier micro-steps wait, sharded, for its reduction over dp_replicate in the last backward.
Where that backward reaches no parameter of the unit, torch drops what waits; where it reaches other parameters than
before, it adds the parts to each other's. Both are refused here: the values would be wrong and nobody would see it.

Of a single backward what waits is each copy's own gradient, before the copies are averaged.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from allranks.errors import TaskError


def find_held_back(modules: Iterable[nn.Module]) -> list[Any]:
    """FSDP2's parameter groups that hold gradients back, before the last backward of a step.

    Raises:
        TaskError: one holds them for some of its parameters only.
    """
    # torch has no public name for what waits.
    held = [group for group in parameter_groups(modules) if group._partial_reduce_output is not None]
    for group in held:
        whole = sum(parameter.padded_sharded_param_size.numel() for parameter in trainable_of(group))
        if group._partial_reduce_output.numel() != whole:
            raise _refusal(group)
    return held


def check_released(held: Sequence[Any]) -> None:
    """After the last backward: every parameter of these groups has its gradient. TaskError where one has none."""
    for group in held:
        if any(parameter.sharded_param.grad is None for parameter in trainable_of(group)):
            raise _refusal(group)


def take_held_back(modules: Iterable[nn.Module]) -> dict[int | str, torch.Tensor]:
    """What one backward has left to wait, 1-D, and no longer waits: the id of a parameter -> this rank's part of its
    gradient; the name of a unit -> all that waits there, where the backward reached only some of its parameters.
    """
    found: dict[int | str, torch.Tensor] = {}
    for group in parameter_groups(modules):
        held, group._partial_reduce_output = group._partial_reduce_output, None
        if held is None:
            continue
        sizes = [parameter.padded_sharded_param_size.numel() for parameter in trainable_of(group)]
        if held.numel() != sum(sizes):
            found[group._module_fqn or "the model"] = held
            continue
        for parameter, part in zip(trainable_of(group), held.split(sizes), strict=True):
            found[id(parameter.sharded_param)] = part[: parameter.sharded_size.numel()]
    return found


def forget_held_back(modules: Iterable[nn.Module]) -> None:
    """Drop what FSDP2 has summed and not reduced: the step that it belongs to is not made.

    That waits for dp_replicate in a part of its own, or whole where no micro-step but the last reduces anything.
    """
    for group in parameter_groups(modules):
        group._partial_reduce_output = None
        for parameter in trainable_of(group):
            parameter.unsharded_accumulated_grad = None
            whole = getattr(parameter, "_unsharded_param", None)  # there is none before the first forward
            if whole is not None:
                whole.grad = None


def parameter_groups(modules: Iterable[nn.Module]) -> list[Any]:
    """FSDP2's parameter groups of these modules, one or several a unit, each once."""
    members = [member for module in modules for member in module.modules()]
    states = [member._get_fsdp_state() for member in members if isinstance(member, FSDPModule)]
    # torch 2.11 has one group a module, later versions a list of them. A unit of several modules has one state.
    found = [getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group] for state in states]
    return list({id(group): group for groups in found for group in groups if group is not None}.values())


def trainable_of(group: Any) -> list[Any]:
    """FSDP2's own view of the parameters of such a group that are not frozen."""
    return [parameter for parameter in group.fsdp_params if parameter.sharded_param.requires_grad]


def _refusal(group: Any) -> TaskError:
    name = group._module_fqn or "the model"
    return TaskError(
        f"the micro-steps of one step reach different parameters of {name}: name those in hints().optional (or say "
        "world.parallelize(model, find_unused=True)), so that dp_replicate reduces them in each micro-step"
    )
