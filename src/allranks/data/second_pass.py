"""Whether an iterable dataset begins anew: of one that can be read only once, what one look has read no other sees."""

from collections.abc import Iterator
from itertools import islice
from typing import Any, Final

import numpy as np
import torch
from torch.utils import _pytree as pytree

from allranks.data.random_keys import item_key, seed_all
from allranks.data.stream import declared_order
from allranks.errors import DataError

_PLAIN: Final = (type(None), bool, int, float, complex, str, bytes, np.generic)


def begin_pass(dataset: Any, seed: int) -> Iterator[Any]:
    """An iterator over the first epoch, begun as in training."""
    set_epoch = getattr(dataset, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(0)
    seed_all(item_key(seed, 0, 0))
    found: Iterator[Any] = iter(dataset)
    return found


def check_second_pass(dataset: Any, seed: int, begun: Iterator[Any], first: Any) -> None:
    """Refuses an iterable dataset of which `begun` has given `first` and more, if it does not begin anew after that.

    Where every rank reads all of it (order="global") its passes have to be alike, under the same seeds, and where each
    pass is the same iterator, which must have been reset. What shards itself may else be as random as it likes.

    Raises:
        DataError: another pass goes on where the first one was left, is empty, or begins with another item.
    """
    again = begin_pass(dataset, seed)
    seed_all(item_key(seed, 0, 0))
    items = list(islice(again, 1))
    if not items:
        raise _refused(dataset, "a second pass over it is empty")
    if again is begun and not are_alike(first, items[0]):
        raise _refused(dataset, "each iter() on it gives the same iterator, which goes on where it was left")
    if declared_order(dataset) == "global" and not are_alike(first, items[0]):
        raise _refused(dataset, "a second pass over it, under the same seeds, begins with another item")


def check_begins_anew(dataset: Any, seed: int) -> None:
    """The same for a dataset of which nothing was read yet; map-style ones begin anew, and one without a sample is left
    to whoever reads it. Raises DataError.
    """
    if declared_order(dataset) == "map":
        return
    begun = begin_pass(dataset, seed)
    seed_all(item_key(seed, 0, 0))
    for first in islice(begun, 1):
        check_second_pass(dataset, seed, begun, first)


def are_alike(one: Any, other: Any) -> bool:
    """Whether two items hold the same tensors, arrays, numbers and strings; leaves of other types count as alike."""
    ones, others = pytree.tree_leaves(one), pytree.tree_leaves(other)
    return len(ones) == len(others) and all(map(_alike, ones, others))


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        return not (_is_plain(one) and _is_plain(other)) or torch.equal(_bits(one), _bits(other))
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        return one.dtype.hasobject or one.tobytes() == other.tobytes()
    if isinstance(one, _PLAIN) and isinstance(other, _PLAIN):
        return type(one) is type(other) and bool(one == other or (one != one and other != other))
    return True


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_nested or tensor.is_meta)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes, so that a NaN is like itself."""
    return tensor.detach().resolve_conj().resolve_neg().reshape(-1).contiguous().view(torch.uint8)


def _refused(dataset: Any, reason: str) -> DataError:
    return DataError(
        f"{type(dataset).__name__} cannot be read from its beginning again: {reason}; what is looked at before "
        "training, a resume and every evaluation begin there: return an object whose __iter__ begins anew, such as a "
        "class that opens its source in __iter__"
    )
