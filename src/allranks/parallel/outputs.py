"""The tensors of what a model returns: in tuples, lists, dicts, what else torch's pytree knows, and dataclasses."""

from collections.abc import Callable
from copy import copy
from dataclasses import FrozenInstanceError, fields, is_dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from allranks.errors import TaskError
from allranks.task_loading import describe

Change = Callable[[torch.Tensor], torch.Tensor]


def map_tensors(change: Change, output: Any) -> Any:
    """`output` with `change` applied to its tensors.

    A dataclass in which that changes something is copied, not made anew: its `__init__` may do more than set its
    fields. (torch's own `_apply_to_tensors` calls it, and makes plain dicts of all kinds of dict.)
    """
    return pytree.tree_map(lambda leaf: _of_leaf(change, leaf), output)


def in_float32(output: Any, compute: torch.dtype | None) -> Any:
    """`output` with its tensors of the lower type `compute` in float32.

    TaskError where there is such a type, and no tensor is found: what the object holds would stay as it is.
    """
    if compute is None:
        return output
    found = list[torch.Tensor]()

    def change(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor.float() if tensor.dtype is compute else tensor

    raised = map_tensors(change, output)
    if not found:
        raise TaskError(
            f"the model returns {describe(output)}, in which no tensor is found, so that loss would compute in "
            f"{str(compute).removeprefix('torch.')}: return a tensor, or a tuple, dict or dataclass of tensors"
        )
    return raised


def _of_leaf(change: Change, leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return change(leaf)
    if not is_dataclass(leaf) or isinstance(leaf, type):
        return leaf
    before = {field.name: getattr(leaf, field.name) for field in fields(leaf) if hasattr(leaf, field.name)}
    after = {name: map_tensors(change, value) for name, value in before.items()}
    changed = {name: value for name, value in after.items() if not _same(value, before[name])}
    if not changed:
        return leaf
    found = copy(leaf)
    for name, value in changed.items():
        try:
            setattr(found, name, value)
        except FrozenInstanceError:
            object.__setattr__(found, name, value)
    return found


def _same(one: Any, other: Any) -> bool:
    """Whether they are of the same objects, in containers that may be others."""
    leaves, others = pytree.tree_leaves(one), pytree.tree_leaves(other)
    return len(leaves) == len(others) and all(a is b for a, b in zip(leaves, others, strict=True))
