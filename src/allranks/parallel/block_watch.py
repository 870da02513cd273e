"""Where a block's forward and backward begin and end, seen from outside: of what no FSDP unit says so."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree


def watch_block(block: nn.Module, begins: Callable[[], None], ends: Callable[[], None]) -> Callable[[], None]:
    """Call `begins` and `ends` around each forward of `block` and around the backward of each.

    A backward begins when the gradient of the block's output is there, and ends with that of its input; where the input
    has none, nobody says that it ends. Runs of the forward within a backward are not told of.

    Returns:
        What takes it away.
    """

    def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
        if not in_backward():
            _at_gradient((args, kwargs), ends)
            begins()

    def leave(_: nn.Module, inputs: Any, output: Any) -> None:
        if not in_backward():
            ends()
            _at_gradient(output, begins)

    handles = block.register_forward_pre_hook(enter, with_kwargs=True), block.register_forward_hook(leave)

    def take_away() -> None:
        for handle in handles:
            handle.remove()

    return take_away


def in_backward() -> bool:
    """Whether autograd runs now."""
    return bool(torch._C._current_graph_task_id() != -1)


def _at_gradient(tree: Any, tell: Callable[[], None]) -> None:
    """Call `tell` when the gradient of the first tensor that gets one is there."""
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            leaf.register_hook(lambda _: tell())
            return
