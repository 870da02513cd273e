"""Batches in kinds of dict that torch's pytree does not know, such as the BatchEncoding of Hugging Face's collators.

What is placed on a device, cast, cut or compared are the leaves of a pytree: an unknown kind of dict is one leaf, and
its tensors would stay as they are.
"""

from collections.abc import Mapping
from typing import Any

from torch.utils import _pytree as pytree


def plain_batch(batch: Any) -> Any:
    """`batch`, what `collate` gave, with plain dicts in place of mappings that pytree does not know, however deep."""
    if not any(isinstance(leaf, Mapping) for leaf in pytree.tree_leaves(batch)):
        return batch  # those that it knows are no leaves
    return pytree.tree_map(_plain_leaf, batch)


def _plain_leaf(leaf: Any) -> Any:
    return {key: plain_batch(value) for key, value in leaf.items()} if isinstance(leaf, Mapping) else leaf
