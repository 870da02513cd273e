"""Modules that a forward may leave out on some ranks (`hints().optional`): branches that depend on the data.

A sharded unit is gathered by all ranks together, when a forward enters it. A module that some ranks pass by is no unit
of its own, therefore, but part of the next one around it that every forward enters. And it gets a gradient in every
backward, of zeros where it was left out: the reductions of DDP and FSDP2 then always find the same parameters.

What the ranks do together inside of such a module cannot be mended so: that is refused (`alone`).
"""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from allranks.errors import LayoutError, TaskError
from allranks.parallel.blocks import nearest_to
from allranks.parallel.outputs import map_tensors
from allranks.task_loading import describe


def find_optional(modules: Mapping[str, nn.Module], patterns: Sequence[str]) -> dict[str, list[str]]:
    """For each module the names of what a forward may leave out.

    Args:
        modules: the user's, by name ("" for a single one).
        patterns: globs of logical names (with several modules "generator.extra.*").

    Raises:
        LayoutError: a pattern matches nothing that has parameters.
    """
    found: dict[str, list[str]] = {which: [] for which in modules}
    logical = {
        (f"{which}.{name}" if which else name): (which, name)
        for which, module in modules.items()
        for name, member in module.named_modules()
        if name and any(True for _ in member.parameters())
    }
    for pattern in patterns:
        matches = [place for name, place in logical.items() if fnmatchcase(name, pattern)]
        if not matches:
            raise LayoutError(
                f"hints().optional: {pattern!r} matches no module with parameters; {nearest_to(pattern, logical)}"
            )
        for which, name in matches:
            found[which].append(name)
    return {which: _outermost(names) for which, names in found.items()}


def _outermost(names: Sequence[str]) -> list[str]:
    return [name for name in dict.fromkeys(names) if not any(name.startswith(f"{other}.") for other in names)]


def never_left_out(blocks: Sequence[str], optional: Sequence[str]) -> list[str]:
    """Those of `blocks` that every forward enters: neither optional nor inside of what is."""
    return [block for block in blocks if not any(block == name or block.startswith(f"{name}.") for name in optional)]


def check_entered(points: Sequence[str], optional: Sequence[str]) -> None:
    """Refuse a pipeline whose stages begin where a forward may not come by. Raises LayoutError."""
    for point in points:
        if point not in never_left_out([point], optional):
            raise LayoutError(
                f"hints().optional: a forward may leave out {point}, with which a stage of the pipeline begins: cut "
                "the model elsewhere with hints().split_before"
            )


def give_zeros(module: nn.Module, optional: Sequence[str], blocks: Sequence[str]) -> None:
    """From now on every backward gives the parameters of `optional` a gradient, of zeros where they were left out.

    Call it before the module is sharded: they are whole only inside of the unit that holds them.

    Args:
        blocks: what is entered by every forward, and may become a unit.
    """
    names_of: dict[str, list[str]] = {}
    for name in optional:
        around = [block for block in blocks if name.startswith(f"{block}.")]
        names_of.setdefault(max(around, key=len, default=""), []).append(name)
    for block, names in names_of.items():
        owner = module.get_submodule(block)
        # Looked up at each forward: what FSDP2 has gathered takes the place of what is sharded.
        places = {
            id(p): (member, key)
            for name in names
            for member in module.get_submodule(name).modules()
            for key, p in member._parameters.items()
            if p is not None
        }
        owner.register_forward_hook(_Touch(list(places.values()), block))


class _Touch:
    """A forward hook: its module's output depends on some parameters, by zero."""

    def __init__(self, places: list[tuple[nn.Module, str]], name: str) -> None:
        self._places = places
        self._name = name

    def __call__(self, module: nn.Module, arguments: Any, output: Any) -> Any:
        if not torch.is_grad_enabled():
            return output
        parameters = [p for member, key in self._places if (p := member._parameters[key]) is not None]
        # Other stages of a pipeline have their own.
        parameters = [p for p in parameters if p.requires_grad and not p.is_meta]
        first = list[torch.Tensor]()

        def change(tensor: torch.Tensor) -> torch.Tensor:
            if first or not tensor.is_floating_point():
                return tensor
            first.append(tensor)
            # With memory of its own: to autograd it is a view else, which neither a loss nor a pipeline changes in
            # place.
            return depend_on(tensor, parameters).clone()

        changed = map_tensors(change, output)
        if not first:
            owner = f"module {self._name}" if self._name else "the model"
            raise TaskError(
                f"hints().optional: {owner} returns {describe(output)}, in which no floating-point tensor is found, on "
                "which the gradients of what it leaves out could depend"
            )
        return changed


def depend_on(tensor: torch.Tensor, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """`tensor`, whose backward gives each of `parameters` a gradient of zeros."""
    found: torch.Tensor = _Zeros.apply(tensor, *parameters)  # type: ignore[no-untyped-call]
    return found


class _Zeros(torch.autograd.Function):
    """The first argument; the gradients of the others are zeros."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.kinds = [(p.shape, p.dtype, p.device) for p in parameters]
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        zeros = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.kinds]
        return gradient, *zeros
