"""What an optimizer keeps of a parameter, leaf by leaf: state may be lists and dicts, as SOAP (arXiv 2409.11321) has.

Leaves are named by their key in the state and torch's path behind it: "exp_avg", "GG[0]", "ema['slow']".
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from allranks.errors import TaskError
from allranks.parameter_map import Box, Entry

Forms = dict[tuple[int, int], dict[str, object]]
"""id of an optimizer and of a parameter -> of each leaf of its state what a resume finds there before it fills it."""

NUMBERS = (int, float)
"""What travels as a JSON value. Words and None do not: they have to stay what they are."""


def leaves_of(state: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """(name, value) of all that a parameter's state holds; None is a value, and an empty container has none."""
    for key, value in state.items():
        for path, leaf in pytree.tree_flatten_with_path(value)[0]:
            yield f"{key}{pytree.keystr(path)}", leaf


def check_leaves(optimizer: Optimizer, parameter: torch.Tensor, entry: Entry, first: Forms) -> None:
    """See that a checkpoint can hold the state of `parameter` on this rank, and that a resume could fill it.

    Args:
        first: the forms after first updates; one that is not there yet is put there.

    Raises:
        TaskError: a value is no tensor, number, word or None, two have one name, or one is cut in a way of its own; or
            the state has another form than after its first update.
    """
    seen = set[str]()
    for name, value in leaves_of(optimizer.state[parameter]):
        what = f"{type(optimizer).__name__} keeps {name!r} of {entry.name}"
        if name in seen:
            raise TaskError(f"{what} twice, and a checkpoint only once: give its keys other names")
        seen.add(name)
        if not isinstance(value, (torch.Tensor, *NUMBERS, str, type(None))):
            kind = type(value).__name__
            raise TaskError(
                f"{what} as a {kind}, which no checkpoint can hold: keep tensors, numbers, words or None, or lists and "
                "dicts of them"
            )
        if isinstance(value, DTensor) and not (_is_cut_alike(value, parameter, entry) or _is_whole(value)):
            raise TaskError(
                f"{what} cut as {list(value.placements)}, and the parameter otherwise, which no checkpoint can hold: "
                "keep value.full_tensor(), or use a layout that does not shard"
            )
    _check_form(optimizer, parameter, entry, first)


def _check_form(optimizer: Optimizer, parameter: torch.Tensor, entry: Entry, first: Forms) -> None:
    """A resume makes the form of a first update, and fills it."""
    form = {name: _form_of(leaf) for name, leaf in leaves_of(optimizer.state[parameter])}
    known = first.setdefault((id(optimizer), id(parameter)), form)
    other = next((name for name in known | form if known.get(name, "none") != form.get(name, "none")), None)
    if other is not None:
        raise TaskError(
            f"{type(optimizer).__name__} keeps {other!r} of {entry.name} in another form than after its first update, "
            "which is all that a resume makes anew, to fill in tensors and numbers: make it there as it is to stay"
        )


def _form_of(leaf: object) -> object:
    """The shape of a tensor; "a number" for any; words and None are what they are."""
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape)
    return "a number" if isinstance(leaf, NUMBERS) else (leaf,)


def entry_of(entry: Entry, parameter: torch.Tensor, name: str, value: torch.Tensor, holders: tuple[int, ...]) -> Entry:
    """Who a tensor of the state of `parameter` is.

    What has the shape of the parameter's part is cut as the parameter is; all else (a counter, a factor) is whole.

    Args:
        entry: of the parameter.
        name: the tensor's own.
        holders: of parts of the parameter: they all have what is whole.
    """
    dtype = str(value.dtype).removeprefix("torch.")
    if _is_cut_alike(value, parameter, entry):
        return replace(entry, name=name, dtype=dtype)
    shape = tuple(value.shape)
    return replace(entry, name=name, dtype=dtype, shape=shape, box=Box.whole(shape), holders=holders, placements={})


def put_numbers(state: dict[Any, Any], kept: Mapping[str, object]) -> None:
    """Put back the numbers of a parameter's state: `kept`, by the names of leaves."""
    for key, value in list(state.items()):
        state[key] = pytree.tree_map_with_path(
            lambda path, leaf, key=key: kept.get(f"{key}{pytree.keystr(path)}", leaf), value
        )


def local(value: torch.Tensor) -> torch.Tensor:
    """This rank's part."""
    return value._local_tensor if isinstance(value, DTensor) else value


def _is_cut_alike(value: torch.Tensor, parameter: torch.Tensor, entry: Entry) -> bool:
    if isinstance(value, DTensor) and value.placements != getattr(parameter, "placements", None):
        return False
    return local(value).shape == torch.Size(entry.box.shape)


def _is_whole(value: DTensor) -> bool:
    partial = any(placement.is_partial() for placement in value.placements)
    return not partial and local(value).shape == value.shape
