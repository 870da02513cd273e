"""The Task: what to learn, and the only code that a user writes.

    class Digits(allranks.Task):
        width: int = 128                              # a setting: task.width=256 on the command line
        def dataset(self, split): ...
        def model(self): ...
        def loss(self, output, batch): ...            # the SUM over the targets of this batch

Required are `model`, `dataset` and one of `loss` and `step`; everything else has a default. `load_task` finds the
class; `resolve_inputs` and `resolve_targets` decide once, on the first batch, what forward gets and how targets are
counted, and say because.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch.utils.data import default_collate

from allranks.errors import AllranksError, TaskError
from allranks.hints import Hints
from allranks.task_loading import (
    TaskSpec,
    check_settings,
    describe,
    load_class,
    missing_methods,
    setting_adapter,
    setting_types,
)
from allranks.task_world import TaskWorld
from allranks.users_code import user_line

__all__ = [
    "Hints",
    "Resolved",
    "Task",
    "TaskSpec",
    "has_optimizer",
    "has_step",
    "load_task",
    "resolve_inputs",
    "resolve_targets",
]

DEMO = "allranks.training.demo:Text"
IGNORED_LABEL = -100  # torch's default ignore_index: such a label is no target


class Task:
    """What to learn. Subclass it; the concrete methods here are defaults to override.

    Class annotations are the settings: their values come from the class, a config file or `task.NAME=VALUE`.

    Attributes:
        defaults: config keys that suit this task ("train.epochs": 20); a TOML file and the command line beat them.
        coupled: True where the loss couples the samples of a batch (contrastive), so that a batch cannot be cut freely.
        world: the rows of the other ranks, for such a loss.
    """

    defaults: ClassVar[Mapping[str, object]] = {}
    coupled: ClassVar[bool] = False
    world: ClassVar[TaskWorld] = TaskWorld()

    def __init__(self, **settings: object) -> None:
        """Set the settings, converted to their annotations; TaskError where one is unknown or unfit."""
        missing = missing_methods(type(self), Task)
        if missing:
            needed = {"model": "model(self)", "dataset": "dataset(self, split)", "loss": "loss(self, output, batch)"}
            raise TaskError(f"{type(self).__name__} lacks {' and '.join(needed[name] for name in missing)}")
        types = setting_types(type(self), Task)
        for name, value in check_settings(type(self), types, settings).items():
            setattr(self, name, value)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.settings.items())})"

    @property
    def settings(self) -> dict[str, Any]:
        """The settings and their present values, as JSON values."""
        types = setting_types(type(self), Task)
        adapters = {name: setting_adapter(type(self), name, annotation) for name, annotation in types.items()}
        return {name: adapter.dump_python(getattr(self, name), mode="json") for name, adapter in adapters.items()}

    def model(self) -> nn.Module | dict[str, nn.Module]:
        """The module to train, or several by name (a GAN). Built on the CPU, under `train.seed`. Required."""
        raise NotImplementedError

    def dataset(self, split: str) -> Any:
        """The samples of "train" or "validation" (None: there are none), map-style or iterable. Required."""
        raise NotImplementedError

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        """The scalar SUM of the loss over the targets of this batch, from what forward gave. Required unless `step`."""
        raise NotImplementedError

    def inputs(self, batch: Any) -> Any:
        """The arguments of forward, a tuple or a dict. The default is `resolve_inputs`'s, which needs the module."""
        raise NotImplementedError

    def targets(self, batch: Any) -> int:
        """How many targets the loss of this batch sums over. The default is `resolve_targets`'s."""
        raise NotImplementedError

    def metrics(self, output: Any, batch: Any) -> Mapping[str, tuple[Any, Any]]:
        """What to measure besides the loss: name -> (sum, count) over this batch; summed over all, divided once."""
        return {}

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer | dict[str, torch.optim.Optimizer] | None:
        """An optimizer for these parameters (several modules: a dict by name), or None for the one of the config."""
        return None

    def collate(self, samples: list[Any]) -> Any:
        """The batch of these samples, any pytree of tensors. The default is torch's."""
        return default_collate(samples)

    def step(self, models: Any, batch: Any) -> Iterator[tuple[str, torch.Tensor, int]]:
        """For several losses: a generator of (module's name, loss sum, targets); backward runs after each yield."""
        raise NotImplementedError

    def hints(self) -> Hints:
        """What allranks cannot find by looking at the module."""
        return Hints()

    def summary(self, model: nn.Module) -> str:
        """Lines for the end of a run; called once on rank 0 with the trained model on one device."""
        return ""

    def state_dict(self) -> dict[str, Any]:
        """What the Task itself must remember over a restart, as JSON values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""


def load_task_class(spec: str | TaskSpec | None) -> type[Task]:
    """The class that `spec` names, or the demo's; nothing of it is made. Raises TaskError where it cannot be found."""
    parsed = spec if isinstance(spec, TaskSpec) else TaskSpec.parse(DEMO if spec is None else spec)
    found = load_class(parsed, Task)
    assert issubclass(found, Task)
    return found


def load_task(spec: str | TaskSpec | None, settings: Mapping[str, object] | None = None) -> Task:
    """The Task that `spec` names ("file.py", "file.py:Name", "package.module:Name"), or the demo, with these settings.

    Raises:
        TaskError: it cannot be found or imported (the user's own line is shown), or a setting does not fit.
    """
    task_class = load_task_class(spec)
    try:
        return task_class(**dict(settings or {}))
    except AllranksError:
        raise
    except (Exception, SystemExit) as error:
        raise TaskError(f"{task_class.__name__} cannot be made from its settings:\n{user_line(error)}") from error


def has_optimizer(task: Task) -> bool:
    """Whether the Task makes its optimizer itself, where `optimizer.*` has no effect."""
    return type(task).optimizer is not Task.optimizer


def has_step(task: Task) -> bool:
    """Whether the Task has a step of its own, rather than one forward and one loss."""
    return type(task).step is not Task.step


@dataclass(frozen=True, slots=True)
class Resolved:
    """A decision about batches: what to call with each, and why."""

    call: Callable[[Any], Any]
    because: str


def resolve_inputs(task: Task, module: nn.Module, batch: Any) -> Resolved:
    """How the arguments of `module.forward` come out of a batch like this one: `call(batch)` is a tuple or a dict.

    Raises:
        TaskError: none of the rules fits; the message says what the batch is and what forward takes.
    """
    if type(task).inputs is not Task.inputs:
        return Resolved(lambda batch: _as_arguments(task, batch), "the Task says so")
    if _is_pair(batch):
        return Resolved(lambda batch: (batch[0],), "element 0 of the pair that a batch is")
    if isinstance(batch, Mapping) and "x" in batch:
        return Resolved(lambda batch: (batch["x"],), 'batch["x"]')
    signature = inspect.signature(module.forward)
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    takes = {name: parameter for name, parameter in signature.parameters.items() if parameter.kind in by_name}
    forward = f"{type(module).__name__}.forward{signature}"
    advice = f"write inputs(self, batch) in {type(task).__name__}: a tuple or dict of forward's arguments"
    if not isinstance(batch, Mapping):
        raise TaskError(f"a batch is {describe(batch)}, neither a pair nor a dict: {advice}")
    named = [name for name in takes if name in batch]
    lacking = [name for name, parameter in takes.items() if parameter.default is parameter.empty and name not in batch]
    if not named or lacking:
        needs = f"needs {', '.join(lacking)}" if lacking else "names none of these"
        raise TaskError(f"a batch is {describe(batch)}, but {forward} {needs}: {advice}")
    because = f"entries that {type(module).__name__}.forward names: {', '.join(named)}"
    return Resolved(lambda batch: {name: batch[name] for name in named if name in batch}, because)


def resolve_targets(task: Task, batch: Any) -> Resolved:
    """How the targets of a batch like this one are counted: `call(batch)` is an int.

    Raises:
        TaskError: no rule fits: no labels, and the entries of the batch have no common length.
    """
    if type(task).targets is not Task.targets:
        return Resolved(lambda batch: _as_count(task, batch), "the Task says so")
    places: list[Any] = [1] if _is_pair(batch) else ["y", "labels"] if isinstance(batch, Mapping) else []
    for place in places:
        if (place == 1 or place in batch) and _are_labels(batch[place]):
            shown = "element 1" if place == 1 else f'batch["{place}"]'
            because = f"integer labels in {shown}, those not {IGNORED_LABEL}"
            return Resolved(functools.partial(_count_labels, place), because)
    _batch_length(task, batch)
    return Resolved(lambda batch: _batch_length(task, batch), "the length of the batch, as it has no integer labels")


def _is_pair(batch: Any) -> bool:
    return isinstance(batch, tuple | list) and len(batch) == 2


def _are_labels(value: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    return not (value.dtype.is_floating_point or value.dtype.is_complex or value.dtype is torch.bool)


def _count_labels(place: Any, batch: Any) -> int:
    labels = batch[place]
    if not labels.dtype.is_signed:
        return int(labels.numel())  # an unsigned tensor holds no -100, and torch would compare with 156
    # numpy takes a fifth of torch's time for a small batch on the host, where loaders count
    return int(np.count_nonzero(labels.numpy(force=True) != IGNORED_LABEL))


def _as_arguments(task: Task, batch: Any) -> tuple[Any, ...] | dict[str, Any]:
    arguments = task.inputs(batch)
    if isinstance(arguments, torch.Tensor):
        return (arguments,)
    if isinstance(arguments, Mapping):
        return dict(arguments)
    if isinstance(arguments, tuple | list):
        return tuple(arguments)
    returned = f"{type(task).__name__}.inputs returned {describe(arguments)}"
    raise TaskError(f"{returned}: expected a tuple or dict of forward's arguments")


def _as_count(task: Task, batch: Any) -> int:
    count: object = task.targets(batch)
    if isinstance(count, torch.Tensor) and count.ndim == 0 and _are_labels(count):
        count = int(count)
    if isinstance(count, bool) or not isinstance(count, Integral) or count < 0:
        returned = f"{type(task).__name__}.targets returned {describe(count)}"
        raise TaskError(f"{returned}: expected the number of targets, an int")
    return int(count)


def _batch_length(task: Task, batch: Any) -> int:
    lengths = {leaf.shape[0] for leaf in _tensors(batch) if leaf.ndim}
    if len(lengths) == 1:
        return int(lengths.pop())
    why = "its tensors have different lengths" if lengths else "it holds no tensor"
    advice = f"write targets(self, batch) in {type(task).__name__}: the number of targets"
    raise TaskError(f"a batch is {describe(batch)}: {why}; {advice}")


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)
