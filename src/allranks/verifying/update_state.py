"""What an update goes by besides gradients: the settings and states of optimizers, and of what scales the loss."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from allranks.errors import TaskError
from allranks.verifying.observation import part_of
from allranks.verifying.recording import Part, Parts, RunRecord, StepRecord

SCALING = ("unscale_", "step", "update")
POSITION, RATES = "last_epoch", "rates"
"""Of a scheduler: how often it was stepped, and what its optimizer's groups have by then."""
IMPLEMENTATION = ("fused", "foreach", "capturable", "differentiable")
"""Of torch's optimizers: how an update is computed, not which."""


def built(made: Any) -> tuple[Any, Any]:
    """(model, optimizer), as `build` returned them. Raises TaskError where they are something else."""
    if not isinstance(made, list | tuple) or len(made) != 2:
        what = f"{len(made)} values" if isinstance(made, list | tuple) else f"a {type(made).__name__}"
        raise TaskError(f"build returns {what}: return (model, optimizer); several of either in a dict or a list")
    for one in _each(made[1]):
        if not isinstance(one, Optimizer | LRScheduler):  # its updates would not be seen
            raise TaskError(
                f"build returns a {type(one).__name__} as optimizer: return a torch.optim.Optimizer, or several "
                "in a dict or a list; torch's learning-rate schedulers may stand beside them"
            )
    if not optimizers_of(made[1]):
        raise TaskError("build returns no optimizer: return (model, optimizer)")
    return made[0], made[1]


def optimizers_of(optimizer: Any) -> list[Optimizer]:
    """The optimizers of what `build` returned, without the schedulers beside them."""
    return [one for one in _each(optimizer) if isinstance(one, Optimizer)]


def _each(optimizer: Any) -> list[Any]:
    if isinstance(optimizer, Mapping):
        return list(optimizer.values())
    return list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]


def settings_of(group: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a param_group by name; those of a pair, such as Adam's betas, as `betas.0` and `betas.1`.

    Without those that change nothing (`IMPLEMENTATION`): mixed DTensors need `foreach=False`, say, on the ranks alone.
    """
    several = {
        f"{k}.{place}": v for k, some in group.items() if isinstance(some, tuple) for place, v in enumerate(some)
    }
    left_out = {"params", *IMPLEMENTATION}
    return {k: float(value) for k, value in {**group, **several}.items() if k not in left_out and is_number(value)}


def names_of(group: Mapping[str, Any], parameters: Mapping[str, torch.Tensor]) -> frozenset[str]:
    """Which of these parameters a param_group holds."""
    held = {id(parameter) for parameter in group["params"]}
    return frozenset(name for name, parameter in parameters.items() if id(parameter) in held)


def align_settings(run: RunRecord, one: RunRecord) -> None:
    """Put a rank's settings where one device has those of the same parameters; {} where the rank holds none of these.

    In every step, also after a load, in which it has another number of groups, as with ZeRO-1 by hand, and holds
    parameters of one device in each.
    """
    for step, due in zip(run.steps, one.steps[run.first :], strict=False):
        _align(step, due)
    if run.resumed is not None:
        align_settings(run.resumed, one)


def _align(step: StepRecord, one: StepRecord) -> None:
    places = [next((i for i, names in enumerate(one.groups) if names & mine), None) for mine in step.groups]
    if len(step.groups) == len(one.groups) or not places or None in places:
        return
    held = dict(zip(places, step.settings, strict=True))
    step.settings = [held.get(place, {}) for place in range(len(one.settings))]


def states_of(optimizer: Any, parameters: Mapping[str, torch.Tensor]) -> Parts:
    """The tensors that optimizers keep for each of these parameters, as "exp_avg.NAME"; and schedulers' numbers."""
    names, found = {id(parameters[name]): name for name in reversed(list(parameters))}, Parts()
    for one in optimizers_of(optimizer):
        for parameter, state in getattr(one, "state", {}).items():
            name = names.get(id(parameter))
            for key, value in state.items() if name is not None and isinstance(state, Mapping) else ():
                if isinstance(value, torch.Tensor):
                    found[f"{key}.{name}"] = part_of(value)
    return found | _scheduler_states(optimizer)


def _scheduler_states(optimizer: Any) -> Parts:
    """Of each scheduler where it stands, its other numbers and its rates, as "StepLR.last_epoch" and "StepLR.rates".

    Not what it keeps for its own use, such as the count of its calls: a scheduler that was put where it stood is right.
    """
    found: Parts = {}
    for place, one in enumerate(one for one in _each(optimizer) if isinstance(one, LRScheduler)):
        name = f"{type(one).__name__}{f' {place}' if place else ''}"
        numbers = {key: float(v) for key, v in vars(one).items() if not key.startswith("_") and is_number(v)}
        rates = [float(group["lr"]) for group in one.optimizer.param_groups]
        for key, value in {**numbers, RATES: rates}.items():
            found[f"{name}.{key}"] = Part(None, torch.tensor(value, dtype=torch.float64))
    return found


@contextmanager
def scalers_told(scalers: list[GradScaler]) -> Iterator[None]:
    """Inside, each GradScaler that unscales, steps or updates is put into `scalers`, once."""

    def telling(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def call(scaler: GradScaler, *args: Any, **options: Any) -> Any:
            if all(known is not scaler for known in scalers):
                scalers.append(scaler)
            return original(scaler, *args, **options)

        return call

    with ExitStack() as stack:
        for name in SCALING:
            stack.enter_context(patch.object(GradScaler, name, telling(getattr(GradScaler, name))))
        yield


def scaler_states(scalers: Sequence[GradScaler]) -> Parts:
    """The numbers that each of them would save, as "GradScaler.scale", the second's as "GradScaler 1.scale"."""
    return {
        f"GradScaler{f' {place}' if place else ''}.{key}": Part(None, torch.tensor(float(value), dtype=torch.float64))
        for place, scaler in enumerate(scalers)
        for key, value in scaler.state_dict().items()
        if is_number(value)
    }


def is_number(value: Any) -> bool:
    """Whether `float` takes it: a number, or a tensor of one element."""
    return isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)
