"""What the modules of a forward are given and give, and over which ranks fully_shard gathers what they compute with.

Ranks that are fed the same repeat each other, unless they compute with other parts of a layer (tensor parallelism, the
stages of a pipeline) or something cuts the samples on their way (context parallelism). Then some module is given or
gives other values on each of them.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from allranks.parallel.held_back import parameter_groups
from allranks.verifying.recording import Call, Forwards

ALIKE = 1e-6
"""Relative: how far the same samples in another order may move the numbers of a call."""


def gathered_over(
    modules: Mapping[str, nn.Module], parameters: Mapping[str, nn.Parameter]
) -> dict[str, tuple[int, ...]]:
    """Name -> the ranks that hold all of it together, of the parameters that fully_shard has cut."""
    cut = [parameter for group in parameter_groups(modules.values()) for parameter in group.fsdp_params]
    over = {id(each.sharded_param): tuple(each.mesh_info.mesh.mesh.flatten().tolist()) for each in cut}
    return {name: over[id(parameter)] for name, parameter in parameters.items() if id(parameter) in over}


@contextmanager
def noting_given(modules: Mapping[str, nn.Module], given: Forwards) -> Iterator[None]:
    """Inside, what a module is given and what it gives is added to `given` at each of its forwards."""
    seen = set[str]()

    def hooks_of(name: str, member: nn.Module) -> Iterator[Any]:
        def before(module: nn.Module, arguments: Any, options: Any) -> None:
            note(name, "is given", (arguments, options))

        def after(module: nn.Module, arguments: Any, output: Any) -> None:
            note(name, "gives", output)

        yield member.register_forward_pre_hook(before, with_kwargs=True)
        yield member.register_forward_hook(after)

    def note(name: str, verb: str, values: Any) -> None:
        if not torch.compiler.is_compiling():  # what is compiled is looked at from outside
            seen.add(name)
            given.calls.append(told(f"{name} {verb}", values))

    members = _members(modules)
    # A scripted module takes no hooks.
    watched = {name: each for name, each in members.items() if not isinstance(each, torch.jit.ScriptModule)}
    hooks = [hook for name, member in watched.items() for hook in hooks_of(name, member)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    holding = {name for name, member in members.items() if next(member.parameters(recurse=False), None) is not None}
    given.unseen = not holding <= seen


def _members(modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """All modules inside of these by name, each once."""
    named = [(f"{which}.{name}", each) for which, module in modules.items() for name, each in module.named_modules()]
    return dict({id(each): (name, each) for name, each in named}.values())


@torch.no_grad()
def told(what: str, values: Any) -> Call:
    """A call by the tensors among its values: by the mean of each, its last dim weighted, and its root mean square.

    Of a DTensor by this rank's part of it. What has no numbers that can be read now (inside of torch.func) has none.
    """
    shapes, numbers = [], list[float]()
    for leaf in pytree.tree_leaves(values):
        if isinstance(leaf, torch.Tensor):
            local = leaf.to_local() if isinstance(leaf, DTensor) else leaf
            shapes.append(tuple(local.shape))
            try:
                numbers += _numbers(local)
            except (RuntimeError, NotImplementedError):  # of wrapped, quantized, nested tensors
                numbers += [0.0, 0.0]
    return Call(f"{what} {shapes}", tuple(numbers))


def _numbers(tensor: torch.Tensor) -> list[float]:
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if not tensor.numel():
        return [0.0, 0.0]
    held = tensor.detach().to(torch.float64).nan_to_num(0.0, 1.0, -1.0)
    # Without weights one-hot rows would be alike, whichever they are.
    weights = torch.arange(held.shape[-1], dtype=held.dtype, device=held.device).cos() if held.dim() > 1 else 1.0
    return [float((held * weights).mean()), float(held.square().mean().sqrt())]


def do_alike(one: Forwards, other: Forwards) -> bool:
    """Whether all calls of one are among the other's, which may make more (a look at some outputs, to log them)."""
    return _are_among(one.calls, other.calls) or _are_among(other.calls, one.calls)


def _are_among(calls: Sequence[Call], others: Sequence[Call]) -> bool:
    left = defaultdict[str, list[tuple[float, ...]]](list)
    for call in others:
        left[call.what].append(call.values)
    for call in calls:
        same = next((one for one in left[call.what] if _are_alike(one, call.values)), None)
        if same is None:
            return False
        left[call.what].remove(same)
    return True


def _are_alike(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether all means and root mean squares are, the means by the size of what they are the mean of."""
    pairs = [(one[place : place + 2], other[place : place + 2]) for place in range(0, len(one), 2)]
    return all(
        math.isclose(size, its_size, rel_tol=ALIKE) and math.isclose(mean, its_mean, abs_tol=ALIKE * size)
        for (mean, size), (its_mean, its_size) in pairs
    )
