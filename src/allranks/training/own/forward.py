"""What a world needs to make a forward and a backward itself: arguments, loss and targets out of a batch."""

import inspect
from collections.abc import Callable
from functools import partial
from numbers import Integral
from typing import Any, NoReturn, final

import torch
from torch import nn
from torch.utils import _pytree as pytree

from allranks.errors import TaskError
from allranks.parallel.spread import Spread
from allranks.stepping.passes import Forward
from allranks.task import Task, resolve_inputs, resolve_targets
from allranks.task_loading import describe

Loss = Callable[[Any, Any], torch.Tensor]
Targets = int | Callable[[Any], int] | None


@final
class OwnTask(Task):
    """The model and the loss of a loop as a Task; inputs() and targets() are left out, so that they are found.

    Args:
        loss: (output, batch) -> a sum over targets; None where nobody asks for it.
        whole: the model before it was spread; None likewise.
    """

    def __init__(self, loss: Loss | None = None, whole: nn.Module | None = None) -> None:
        super().__init__()
        self._loss, self._whole = loss, whole

    def model(self) -> nn.Module:
        """The model as one process has it."""
        assert self._whole is not None
        return self._whole

    def dataset(self, split: str) -> NoReturn:
        """Nobody asks for it."""
        raise NotImplementedError

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        """The loop's own."""
        assert self._loss is not None
        return self._loss(output, batch)


def make_forward(spread: Spread) -> Forward:
    """The forward of the model that is trained, its arguments found in each batch as for a Task."""
    return Forward(OwnTask(), spread, partial(_find_arguments, spread.bare()))


def _find_arguments(module: nn.Module, batch: Any) -> Any:
    try:
        return resolve_inputs(OwnTask(), module, batch).call(batch)
    except TaskError:
        raise TaskError(
            f"world.run: a batch is {describe(batch)}, and {type(module).__name__}.forward names nothing in it: give a "
            "dict with its arguments by name, or a pair (input, target)"
        ) from None


def count_targets(batch: Any, targets: Targets) -> int:
    """The number of targets in a batch: as given, else found as for a Task. Raises TaskError where no rule fits."""
    if targets is not None:
        return check_targets("run", targets(batch) if callable(targets) else targets)
    try:
        return int(resolve_targets(OwnTask(), batch).call(batch))
    except TaskError:
        raise TaskError(f"world.run: a batch is {describe(batch)}: say how many targets it has, targets=...") from None


def check_callable(loss: object) -> None:
    """Refuse a loss that is no function. Raises TaskError."""
    if not callable(loss):
        raise TaskError(
            f"world.run(batch, {type(loss).__name__}): the loss has to be a function of (output, batch) that returns "
            "one number: the world makes the forward that it is computed from"
        )


def check_loss(call: str, loss: object) -> torch.Tensor:
    """One number with a gradient. Raises TaskError for anything else, naming `call`."""
    number = check_number(call, loss)
    if not number.requires_grad:
        raise TaskError(f"world.{call}(): the loss has no gradient: it was computed under no_grad, or detached")
    return number


def check_number(call: str, loss: object) -> torch.Tensor:
    """One number. Raises TaskError for anything else, naming `call`."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        found = f"shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise TaskError(f"world.{call}({found}): the loss has to be one number, the SUM over the batch's targets")
    return loss


def check_targets(call: str, targets: object) -> int:
    """A number of targets. Raises TaskError for anything else, naming `call`."""
    if isinstance(targets, torch.Tensor) and targets.numel() == 1 and not targets.is_floating_point():
        targets = int(targets)
    if isinstance(targets, bool) or not isinstance(targets, Integral) or targets < 0:
        raise TaskError(f"world.{call}(targets={targets!r:.40}): the number of targets of this batch, a whole number")
    return int(targets)


def check_can_wait(loss: Loss, batch: Any, layout: object) -> None:
    """Refuse a loss that reads its batch from around it: called later, it would read another one. Raises TaskError."""
    leaves = [batch, *(leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor))]
    own = set(map(id, leaves))
    try:
        around = inspect.getclosurevars(loss)
    except TypeError:
        return  # no function: what it holds it holds since it was made
    name = next((name for name, value in {**around.globals, **around.nonlocals}.items() if id(value) in own), None)
    if name is not None:
        raise TaskError(
            f"world.run: the loss reads {name!r} from around it, and layout {layout} calls it when the step's last "
            "batch has come, so that it would read that one: let it read its second argument, the batch"
        )
