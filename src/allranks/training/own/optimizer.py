"""The optimizer of an own loop: any class or function of the user's, over the parameters as they are spread."""

from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from allranks.errors import CheckpointError, TaskError
from allranks.parallel.spread import Spread
from allranks.stepping.optimizer import Optimizers
from allranks.training.own.watch import OwnWatch
from allranks.verdict import Decision

FUSED = (AdamW, Adam, SGD)
FUSED_DEVICES = ("cpu", "cuda")
CHOICES = ("fused", "foreach", "capturable", "differentiable")  # what excludes one another, where the user chose

Settings = dict[str, Any]


def make_own_optimizer(spread: Spread, kind: Callable[..., Optimizer], settings: Mapping[str, Any]) -> Optimizers:
    """`kind(parameters, **settings)`; groups that mix sharded and whole parameters are parted; fused where it works.

    Raises:
        TaskError: it is no torch optimizer, or does not hold exactly the trainable parameters.
    """
    made: object = kind(list(spread.updatable().values()), **settings)
    if not isinstance(made, Optimizer):
        raise TaskError(f"world.optimizer: {kind!r:.60} made a {type(made).__name__}: expected a torch optimizer")
    _part_groups(made)
    if type(made) in FUSED:
        for group in made.param_groups:
            if _can_fuse(made, group):
                group["fused"] = True
    return Optimizers(spread, {"": made})


@final
class OwnOptimizers:
    """Those of a world.

    Attributes:
        made: by the id of the torch optimizer.
    """

    def __init__(self, watch: OwnWatch, decide: Callable[[Decision], None]) -> None:
        self.made: dict[int, Optimizers] = {}
        self._watch, self._decide = watch, decide

    def make(self, spread: Spread, kind: Callable[..., Optimizer], settings: Mapping[str, Any]) -> Optimizer:
        """As `make_own_optimizer`; from here on it is watched."""
        made = make_own_optimizer(spread, kind, settings)
        self.made[id(made.by_name[""])] = made
        self._watch.link(spread, made)
        for decision in made.decisions:
            self._decide(decision)
        return made.by_name[""]

    def find(self, optimizer: Optimizer) -> Optimizers:
        """The one that `optimizer` is in. Raises TaskError."""
        if id(optimizer) not in self.made:
            kind = type(optimizer).__name__
            raise TaskError(f"{kind} is not an optimizer of this world: make it by world.optimizer(model, {kind}, ...)")
        return self.made[id(optimizer)]


def _part_groups(optimizer: Optimizer) -> None:
    """Fused and foreach kernels take one kind of tensor: under FSDP2, parameters without dims are not sharded."""
    for group in list(optimizer.param_groups):
        sharded = [parameter for parameter in group["params"] if isinstance(parameter, DTensor)]
        whole = [parameter for parameter in group["params"] if not isinstance(parameter, DTensor)]
        if sharded and whole:
            group["params"] = sharded
            optimizer.add_param_group({**group, "params": whole})


def _can_fuse(optimizer: Optimizer, group: Settings) -> bool:
    chosen = any(group.get(name) not in (None, False) for name in CHOICES) or group.get("fused") is False
    if chosen or isinstance(group["lr"], torch.Tensor):
        return False
    # torch 2.13 has no fused SGD for DTensors ("aten._fused_sgd_ does not have a sharding strategy"); for Adam it has.
    if isinstance(optimizer, SGD) and any(isinstance(parameter, DTensor) for parameter in group["params"]):
        return False
    return all(p.is_floating_point() and p.device.type in FUSED_DEVICES for p in group["params"])


def group_settings(spread: Spread, optimizer: Optimizer) -> list[dict[str, Any]]:
    """Learning rate and the other numbers of every group, as JSON, with the logical names of its parameters."""
    names = {id(tensor): name for name, tensor in spread.updatable().items()}
    return [
        {
            "parameters": [names[id(parameter)] for parameter in group["params"]],
            "settings": {key: _plain(value) for key, value in group.items() if _is_setting(key, value)},
        }
        for group in optimizer.param_groups
    ]


def restore_group_settings(spread: Spread, optimizer: Optimizer, kept: list[dict[str, Any]]) -> list[str]:
    """The inverse, also where another layout has parted the groups otherwise; what was given otherwise, in words.

    Raises:
        CheckpointError: the checkpoint puts parameters of one group into groups with other settings.
    """
    names = {id(tensor): name for name, tensor in spread.updatable().items()}
    home = {name: saved["settings"] for saved in kept for name in saved["parameters"]}
    changes = []
    for group in optimizer.param_groups:
        found = [home.get(names[id(parameter)], {}) for parameter in group["params"]]
        if any(settings != found[0] for settings in found[1:]):
            raise CheckpointError(
                f"the checkpoint was written with other parameter groups: {names[id(group['params'][0])]} and what is "
                "with it now had different settings; make the groups as they were"
            )
        changes += [_restore(group, key, value) for key, value in (found[0] if found else {}).items()]
    return sorted({change for change in changes if change})


def _restore(group: Settings, key: str, value: Any) -> str:
    given = group.get(key)
    if key in group and _plain(given) == value:
        return ""
    if isinstance(given, torch.Tensor):
        given.fill_(value)
    else:
        group[key] = tuple(value) if isinstance(value, list) else value
    return f"{key} is {value}, as the checkpoint has it" if key in ("lr", "weight_decay", "momentum", "betas") else ""


def _is_setting(key: str, value: object) -> bool:
    if key in ("params", *CHOICES) or isinstance(value, bool):
        return False
    if isinstance(value, tuple):
        return all(isinstance(item, int | float) for item in value)
    return isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return float(value)
    return [float(item) for item in value] if isinstance(value, tuple) else value
