"""Forward's arguments and the number of targets out of a batch, where an own loop leaves them to `world.run`."""

from collections.abc import Mapping
from typing import Any, NoReturn, final

from allranks.errors import TaskError
from allranks.parallel.spread import Spread
from allranks.task import Task, resolve_inputs, resolve_targets
from allranks.task_loading import describe


@final
class _Rules(Task):
    """Leaves inputs() and targets() out, so that they are found; nobody asks for the rest."""

    def model(self) -> NoReturn:
        raise NotImplementedError

    def dataset(self, split: str) -> NoReturn:
        raise NotImplementedError

    def loss(self, output: Any, batch: Any) -> NoReturn:
        raise NotImplementedError


def call_model(spread: Spread, batch: Any) -> Any:
    """The model's output, its arguments found in the batch as for a Task. Raises TaskError where no rule fits."""
    module = spread.bare()
    try:
        arguments = resolve_inputs(_Rules(), module, batch).call(batch)
    except TaskError:
        raise TaskError(
            f"world.run: a batch is {describe(batch)}, and {type(module).__name__}.forward names nothing in it: call "
            "the model yourself, then world.backward(loss, targets=...)"
        ) from None
    called = spread.modules[""]
    return called(**arguments) if isinstance(arguments, Mapping) else called(*arguments)


def count_targets(batch: Any) -> int:
    """The number of targets in a batch, found as for a Task. Raises TaskError where no rule fits."""
    try:
        return int(resolve_targets(_Rules(), batch).call(batch))
    except TaskError:
        raise TaskError(f"world.run: a batch is {describe(batch)}: say how many targets it has, targets=...") from None
