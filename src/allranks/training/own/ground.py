"""What a world stands on: its processes, its configuration, and what its calls share."""

import difflib
import json
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from allranks.config import Config, resolve_config
from allranks.config_keys import did_you_mean
from allranks.errors import ConfigError
from allranks.hints import check_names
from allranks.launching.environment import ProcessEnvironment, read_environment
from allranks.layout import Layout
from allranks.layout_refusals import refuse_unsupported
from allranks.observing.counters import Stopwatch
from allranks.parallel.backend import DeviceChoice, choose_device, start, stop, take_device
from allranks.parallel.parallelize import parallelize
from allranks.parallel.path import Path
from allranks.parallel.precision import Precision, choose_precision, describe_gather, warn_of_precision
from allranks.run import Run
from allranks.slow_links import check_slow_links
from allranks.stepping.alike import check_same_start
from allranks.stepping.remarks import describe_idle_keys
from allranks.stepping.world import Processes, gather_processes
from allranks.training.own.links import Links
from allranks.training.own.lowered import Lowered
from allranks.training.own.models import OwnModels, needs_run
from allranks.training.own.run import open_own_run
from allranks.training.own.starts import Whole, copy_whole
from allranks.training.prepare import anchor_mirror
from allranks.verdict import Decision

JOINED: list[object] = []  # the World, at most one: a process is in one at a time

ARGUMENTS = ("layout", "seed", "precision", "device", "backend", "run", "keep", "change")  # of join

# Of the section layout, what a layout string has not and an own loop can do.
LAYOUT_KEYS = (
    *("gather", "prefetch", "ddp_hook", "powersgd_rank", "powersgd_start", "ddp_bucket_mb", "context", "placement"),
    *("local_sgd", "outer_lr", "outer_momentum", "outer_nesterov"),
)
GUARD_KEYS = ("digest_every", "on_finding", "mute")  # of the section guard: the sentinels
CHECKPOINT_KEYS = ("mirror", "keep_every")
PRECISIONS = ("float32", "bfloat16", "float16", "float64")
KEYS = (*LAYOUT_KEYS, *GUARD_KEYS, *CHECKPOINT_KEYS)


@dataclass(frozen=True)
class Ground:
    """What the calls of a world share.

    Attributes:
        open_run: the Run of a configuration, on every rank; collective.
        owns_group: whether leaving the world ends the process group.
        decisions: what was decided so far.
        path: the sharded units that forwards enter, of all its models.
    """

    processes: Processes
    config: Config
    precision: Precision
    open_run: Callable[[Config], Run]
    owns_group: bool
    decisions: list[Decision]
    models: OwnModels = field(default_factory=OwnModels)
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    path: Path = field(default_factory=Path)

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return self.processes.device

    def place(self, batch: Any) -> Any:
        """The batch's tensors on the device, floating ones in float64 where that is the precision."""
        return self.precision.place(batch, self.device)

    def spread(self, module: nn.Module, links: Links, *, sequence_dims: Mapping[str, int], **hints: Any) -> nn.Module:
        """What is to be called for `module`, as `World.parallelize` says, whose `hints` these are; collective."""
        mesh = self.processes.mesh
        self.models.check_new(module, mesh.layout)
        lists = {name: hints[name] for name in ("blocks", "split_before", "optional")}
        check_names("world.parallelize({}=)", lists, {"tensor": hints["tensor"], "sequence_dims": sequence_dims})
        whole = None
        if mesh.layout.cuts_model:
            whole = copy_whole(module) if self.processes.rank == 0 else Whole()
        self.models.sequence_dims = sequence_dims
        spread = parallelize(
            lambda: module,
            mesh,
            self.precision,
            self.device,
            source=self.processes.first_source(),
            seed=lambda: None,
            path=self.path,
            **hints,
        )
        if spread.trainable():
            links.take(spread)
        self.decisions.extend(spread.decisions)
        if self.precision.compute is not None and not needs_run(mesh.layout):  # else the world makes the forwards
            Lowered(self.precision, self.device.type).watch(spread.modules[""])
        return self.models.add(spread, whole)

    def leave(self, *, failed: bool) -> bool:
        """End the process group, if it is this world's to end; whether the process may join again."""
        if self.owns_group and failed and self.processes.size > 1:
            return False  # ending it would wait for peers that may never come
        if self.owns_group:
            stop()
        return True


def prepare_ground(
    layout: str | None,
    *,
    seed: int,
    precision: str,
    device: str,
    backend: str,
    keep: int,
    directory: pathlib.Path | None,
    change: Sequence[str],
    keys: Mapping[str, object],
) -> Ground:
    """Check the arguments of `join`, take the device and start the backend; collective. Raises as `join` says."""
    environment = read_environment(os.environ)
    overrides = _check_keys(keys)
    train: dict[str, object] = {"seed": seed, "precision": precision, "backend": backend}
    config = _resolve(layout or environment.layout, keep, overrides, **train)
    degrees = Layout.resolve(config.layout, environment.world_size, environment.num_nodes)
    refuse_unsupported(degrees)
    check_slow_links(config, degrees)
    choice = choose_device(environment, device, config.train.backend, degrees)
    lowered = choose_precision(config.train.precision, config.layout.gather, choice.device.type)
    started = _start(environment, choice, config.guard.longest_wait)
    choice = started or choice
    processes = gather_processes(environment, choice, degrees)
    try:
        check_same_start(config.flat(), None, processes.world_group, processes.device)
    except ConfigError:  # raised on every rank
        if started is not None:
            stop()
        raise
    said = (
        *describe_idle_keys(degrees),
        *warn_of_precision(lowered, choice.device.type),
        *(describe_gather(lowered, config.layout.gather) if degrees.fully_sharded else ()),
    )
    return Ground(
        processes=processes,
        config=config,
        precision=lowered,
        open_run=partial(open_own_run, processes, directory=directory, change=tuple(change)),
        owns_group=started is not None,
        decisions=[*choice.decisions, *said],
    )


def _check_keys(given: Mapping[str, object]) -> list[str]:
    """`keys` of `join` as overrides. Raises ConfigError for one that there is not, naming the nearest."""
    for name in given:
        if name not in KEYS:
            near = difflib.get_close_matches(name, (*ARGUMENTS, *KEYS), n=2)
            there = did_you_mean(near) or f"; there are {', '.join(KEYS)}"
            raise ConfigError(f"join({name}=...): no such argument{there}")
    values = {name: _as_text(value) for name, value in given.items()}
    return [
        f"{'guard' if name in GUARD_KEYS else 'checkpoint' if name in CHECKPOINT_KEYS else 'layout'}.{name}={value}"
        for name, value in values.items()
        if value is not None
    ]


def _as_text(value: object) -> object:
    """As an override has it: booleans in small letters, several words with commas, a table as TOML's."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{json.dumps(str(name))} = {json.dumps(str(rule))}' for name, rule in value.items())}}}"
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else value


def _resolve(layout: str | None, keep: int, more: Sequence[str], **train: object) -> Config:
    if train["precision"] not in PRECISIONS:
        raise ConfigError(
            f"join(precision={train['precision']!r}): expected {', '.join(PRECISIONS[:-1])} or {PRECISIONS[-1]}"
        )
    saves = (f"checkpoint.keep={keep}", "checkpoint.seconds=0")  # the loop itself says when it saves
    overrides = [*(f"train.{key}={value}" for key, value in train.items()), *saves, *more]
    return anchor_mirror(resolve_config(task_defaults={}, toml=None, overrides=overrides, layout=layout))


def _start(environment: ProcessEnvironment, choice: DeviceChoice, timeout_seconds: float) -> DeviceChoice | None:
    """Take the device and start the backend, as `start`; None: the script has started one."""
    if not (dist.is_available() and dist.is_initialized()):
        return start(environment, choice, timeout_seconds=timeout_seconds)
    there = (dist.get_rank(), dist.get_world_size())
    if there != (environment.rank, environment.world_size):
        raise ConfigError(
            f"join(): torch.distributed runs here as rank {there[0]} of {there[1]}, but the environment "
            f"({environment.launcher}) says rank {environment.rank} of {environment.world_size}"
        )
    take_device(choice.device)
    return None
