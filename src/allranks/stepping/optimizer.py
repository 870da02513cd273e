"""The optimizers of a run: built over a Spread, moved by a Schedule, and seen as logical tensors by checkpoints."""

import json
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from allranks import fault_points
from allranks.config import OptimizerConfig
from allranks.errors import TaskError
from allranks.parallel.spread import Spread
from allranks.parameter_map import Entry
from allranks.stepping.element_wise import check_scopes, check_state
from allranks.stepping.optimizer_state import NUMBERS, Forms, check_leaves, entry_of, leaves_of, local, put_numbers
from allranks.stepping.peak_rates import check_peaks, peaks_of
from allranks.stepping.scaler import skips_on_device

Parameters = Sequence[torch.Tensor] | Mapping[str, Sequence[torch.Tensor]]
MakeOptimizer = Callable[[Parameters], Optimizer | Mapping[str, Optimizer] | None]
Parts = list[tuple[Entry, torch.Tensor]]


class Optimizers:
    """The optimizers of a run, by name ("" for a single one; where none is called so, "" means all of them).

    Attributes:
        by_name: the optimizers.
        peaks: of each the learning rate of each group at the top of the schedule.
        entries: id of what an optimizer may hold -> who it is.
        num_updates: begun since the start of this process, by all of them together; those that were left out, too:
            of copies that train by themselves one may leave out what the others make.
        decisions: what was taken for granted of them, with because.
    """

    def __init__(self, spread: Spread, optimizers: Mapping[str, Optimizer]) -> None:
        self.by_name, self.num_updates = dict(optimizers), 0
        self.peaks = {name: peaks_of(optimizer) for name, optimizer in optimizers.items()}
        self._spread = spread
        updatable = spread.updatable()
        self.entries = {id(tensor): spread.updatable_entry(name) for name, tensor in updatable.items()}
        self._whole = {id(tensor): spread.tensors[name] for name, tensor in updatable.items()}
        self._parameters = {name: _parameters_of(optimizer) for name, optimizer in optimizers.items()}
        self._initial = {name: [_settings(group) for group in it.param_groups] for name, it in optimizers.items()}
        self._forms = Forms()
        self._updated: dict[str, list[torch.Tensor]] = {}
        self._seen: set[str] = set()
        self._skipping: dict[str, bool] = {}
        self._check_linkage(spread)
        self.decisions = check_scopes(self.by_name, self.entries, spread.mesh.layout)

    def parameters(self, which: str) -> list[torch.Tensor]:
        """The parameters that the optimizer `which` updates, each once; as the model has them."""
        if which not in self._updated:
            found = [parameter for name in self.named(which) for parameter in self._parameters[name]]
            self._updated[which] = list({id(parameter): self._whole[id(parameter)] for parameter in found}.values())
        return self._updated[which]

    def step(self, which: str, factor: float, skipped: torch.Tensor | None = None) -> float:
        """One update at `factor` of the peak learning rate, then no gradients; returns the first group's rate.

        Args:
            skipped: 1.0 where nothing but the gradients is to go, else 0.0; None: it is not.
        """
        optimizers = [(self.by_name[name], self.peaks[name]) for name in self.named(which)]
        for optimizer, peaks in optimizers:
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * factor
        self.update(which, skipped)
        return float(optimizers[0][0].param_groups[0]["lr"])

    def update(self, which: str, skipped: torch.Tensor | None = None) -> None:
        """One update at the present learning rates, then no gradients; collective where the optimizer is sharded."""
        self.num_updates += 1
        if skipped is not None and self.skips_on_device(which, skipped.device):
            for name in self.named(which):
                self.by_name[name].found_inf = skipped  # type: ignore[attr-defined]
        elif skipped is not None and bool(skipped):
            for parameter in self.parameters(which):
                parameter.grad = None
            for name in self.named(which):
                # torch's schedules warn of a step() that never came, and by this they know that it was its turn.
                self.by_name[name]._opt_called = True  # type: ignore[attr-defined]
            return
        rows = self._spread.row_shards
        if rows is not None:
            rows.lend(self.parameters(which))
        for name in self.named(which):
            self.by_name[name].step()
            fault_points.reach("optimizer")
            if name not in self._seen:
                self._seen.add(name)
                self._check_kept()
                check_state(self.by_name[name], self.entries)
        if rows is not None:
            rows.collect(self.parameters(which))
        for name in self.named(which):
            self.by_name[name].zero_grad(set_to_none=True)

    def skips_on_device(self, which: str, device: torch.device) -> bool:
        """Whether `update` obeys a `skipped` that lies on `device` without the host's waiting for it."""
        if which not in self._skipping:  # asked once: it looks at every parameter
            self._skipping[which] = skips_on_device([self.by_name[name] for name in self.named(which)], device)
        return self._skipping[which]

    def materialise(self) -> None:
        """Make every optimizer's state exist without moving a parameter, so that a checkpoint can be read into it.

        One step with zero gradients, learning rate and weight decay: torch fills the state lazily.
        """
        for which, optimizer in self.by_name.items():
            groups = optimizer.param_groups
            kept = [{"lr": group["lr"], **_settings(group)} for group in groups]
            for group in groups:
                group.update({key: 0.0 for key in ("lr", "weight_decay") if key in group})
            for parameter in self._parameters[which]:
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            for group, values in zip(groups, kept, strict=True):
                parameters = group["params"]
                group.clear()  # what the step has added goes, too
                group.update(values, params=parameters)

    def parts(self) -> Parts:
        """Every state tensor as this rank holds it, by its logical name `optimizer[.<which>].<leaf>.<parameter>`.

        Of parameters that a loop of one's own has added there is none: they are not the model's.
        """
        return [
            (self._state_entry(parameter, f"{prefix}.{leaf}", value), local(value))
            for prefix, optimizer in self._prefixed()
            for parameter, state in optimizer.state.items()
            for leaf, value in leaves_of(state)
            if isinstance(value, torch.Tensor) and id(parameter) in self.entries
        ]

    def numbers(self) -> dict[str, object]:
        """What a checkpoint keeps besides tensors: state values that are numbers, by the same names, and what an
        optimizer has changed in its groups (a counter, an estimated rate), as `optimizer[.<which>].group.<i>.<key>`.

        Raises:
            TaskError: it has changed something there that is no JSON value, holds what is no parameter of the model, or
                keeps state that no checkpoint can hold, or that no resume could fill.
        """
        self._check_kept()
        found: dict[str, object] = {
            f"{prefix}.{leaf}.{self.entries[id(parameter)].name}": value
            for prefix, optimizer in self._prefixed()
            for parameter, state in optimizer.state.items()
            for leaf, value in leaves_of(state)
            if isinstance(value, NUMBERS)
        }
        for which, (prefix, optimizer) in zip(self.by_name, self._prefixed(), strict=True):
            for index, (group, initial) in enumerate(zip(optimizer.param_groups, self._initial[which], strict=True)):
                for key, value in _settings(group).items():
                    if key not in initial or not _equal(value, initial[key]):
                        found[f"{prefix}.group.{index}.{key}"] = _plain(value, optimizer, key)
        return found

    def _check_kept(self) -> None:
        """See that a checkpoint can hold what the optimizers do. Raises TaskError, naming what it cannot."""
        self._check_held()
        for optimizer in self.by_name.values():
            for parameter in optimizer.state:
                check_leaves(optimizer, parameter, self.entries[id(parameter)], self._forms)

    def _check_held(self) -> None:
        for optimizer in self.by_name.values():
            for parameter in (one for group in optimizer.param_groups for one in group["params"]):
                if id(parameter) not in self.entries:
                    kind, shape = type(optimizer).__name__, tuple(parameter.shape)
                    raise TaskError(
                        f"{kind} holds a tensor of shape {shape} that is no parameter of the model: no checkpoint keeps"
                        " it, and nobody reduces its gradients; make it a parameter of the module"
                    )
            if strange := [key for key in optimizer.state if id(key) not in self.entries]:
                raise TaskError(
                    f"{type(optimizer).__name__} keeps {str(strange[0])[:60]!r} in its state beside the parameters', "
                    "and no checkpoint does: keep it in param_groups, where what changes is saved"
                )

    def load_numbers(self, numbers: Mapping[str, object]) -> None:
        """The inverse of `numbers`."""
        for prefix, optimizer in self._prefixed():
            for parameter, state in optimizer.state.items():
                names = {leaf: f"{prefix}.{leaf}.{self.entries[id(parameter)].name}" for leaf, _ in leaves_of(state)}
                put_numbers(state, {leaf: numbers[name] for leaf, name in names.items() if name in numbers})
            for index, group in enumerate(optimizer.param_groups):
                start = f"{prefix}.group.{index}."
                changed = {name.removeprefix(start): value for name, value in numbers.items() if name.startswith(start)}
                group.update(changed)

    def forget_unless(self, known: Callable[[str], bool]) -> None:
        """Drop the state of parameters that never had any: no name of their state is `known` to the checkpoint."""
        for prefix, optimizer in self._prefixed():
            for parameter in list(optimizer.state):
                entry = self.entries[id(parameter)]
                if not any(known(f"{prefix}.{leaf}.{entry.name}") for leaf, _ in leaves_of(optimizer.state[parameter])):
                    del optimizer.state[parameter]

    def named(self, which: str) -> list[str]:
        """The names of those that are due where `which` is."""
        return [which] if which or which in self.by_name else list(self.by_name)

    def _state_entry(self, parameter: torch.Tensor, prefix: str, value: torch.Tensor) -> Entry:
        entry = self.entries[id(parameter)]
        return entry_of(entry, parameter, f"{prefix}.{entry.name}", value, self._spread.everyone_with(entry.name))

    def _prefixed(self) -> list[tuple[str, Optimizer]]:
        return [(f"optimizer.{which}" if which else "optimizer", it) for which, it in self.by_name.items()]

    def _check_linkage(self, spread: Spread) -> None:
        if needy := [type(it).__name__ for it in self.by_name.values() if _needs_closure(it)]:
            raise TaskError(f"{needy[0]}.step() needs a closure, and a step is made once: take another optimizer")
        strangers = [p for group in self._parameters.values() for p in group if id(p) not in self.entries]
        if strangers:
            raise TaskError(
                f"optimizer() holds {len(strangers)} tensor(s) that are not the model's parameters (first: shape "
                f"{tuple(strangers[0].shape)}): build it from the `parameters` it is given"
            )
        held = {id(p) for group in self._parameters.values() for p in group}
        left = [name for name, tensor in spread.updatable().items() if id(tensor) not in held]
        if left:
            raise TaskError(
                f"optimizer() leaves out {len(left)} trainable parameter(s), first {left[0]!r}: pass them too, or set "
                "requires_grad=False"
            )


def _needs_closure(optimizer: Optimizer) -> bool:
    """By its class: torch's schedulers wrap the method of the optimizer at hand, and `signature` then counts self."""
    given = list(signature(type(optimizer).step).parameters.values())[1:]
    return any(one.default is one.empty for one in given if one.kind is one.POSITIONAL_OR_KEYWORD)


def build_optimizers(spread: Spread, config: OptimizerConfig, make: MakeOptimizer) -> Optimizers:
    """The optimizers that the Task's own `optimizer` makes, or where it makes none those of `config`, one a module.

    A module without trainable parameters needs none. TaskError where no module has any, or where the Task's optimizers
    do not hold exactly the trainable parameters.
    """
    by_module = {which: list(spread.updatable(which).values()) for which in spread.modules}
    by_module = {which: parameters for which, parameters in by_module.items() if parameters}
    if not by_module:
        raise TaskError("the model has no trainable parameter: nothing to optimise")
    made: object = make(by_module.get("", by_module))
    if made is None:
        return Optimizers(spread, {which: make_optimizer(group, config) for which, group in by_module.items()})
    if isinstance(made, Optimizer):
        made = {"": made}
    if not isinstance(made, Mapping) or not made or not all(isinstance(it, Optimizer) for it in made.values()):
        raise TaskError(f"optimizer() returned {type(made).__name__}: return a torch optimizer, or a dict of them")
    found = Optimizers(spread, made)
    found.decisions += check_peaks(made)
    return found


def make_optimizer(parameters: Sequence[torch.Tensor], config: OptimizerConfig) -> Optimizer:
    """The torch optimizer of `config`; sharded and whole parameters are groups apart: a fused kernel takes one kind."""
    sharded = [p for p in parameters if isinstance(p, DTensor)]
    whole = [p for p in parameters if not isinstance(p, DTensor)]
    # torch 2.13 has no fused SGD for DTensors ("aten._fused_sgd_ does not have a sharding strategy"); for Adam it has.
    groups = [{"params": whole, "fused": True}, {"params": sharded, "fused": config.name != "sgd"}]
    groups = [group for group in groups if group["params"]]
    if config.name == "sgd":
        return SGD(groups, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay)
    kind = AdamW if config.name == "adamw" else Adam
    betas = (config.beta1, config.beta2)
    return kind(groups, lr=config.lr, betas=betas, eps=config.eps, weight_decay=config.weight_decay)


def _parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's values besides its parameters and the learning rate, which the schedule moves; tensors copied."""
    values = {key: value for key, value in group.items() if key not in ("params", "lr")}
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in values.items()}


def _equal(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def _plain(value: object, optimizer: Optimizer, key: str) -> object:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        raise TaskError(
            f"{type(optimizer).__name__} keeps {key!r} of type {type(value).__name__} in its param_groups and changes "
            "it, which no checkpoint can hold: keep it in the optimizer's state as a tensor"
        ) from None
    return value
