"""A user's Task as the planner sees it: its config read as `train` reads it, its model traced without memory."""

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allranks.config import Config
from allranks.config_layers import read_mapping, read_overrides, read_toml_layer
from allranks.errors import ConfigError, TaskError
from allranks.model_profile import ModelProfile
from allranks.request import TrainRequest
from allranks.upkeep import Upkeep

if TYPE_CHECKING:
    from allranks.stepping.profiled_step import FirstBatches
    from allranks.task import Task


LOW = ("bfloat16", "float16", "float8")
_OF_A_TYPE = re.compile(r"ScalarType|BFloat16|bfloat16|Half\b|float16|Float8")
"""What numpy and torch say of a type that an operation does not take."""
OWN_OPTIMIZER = (
    "the Task's own optimizer keeps two values for each parameter, as Adam does, which is assumed, because a plan does"
    " not make it: --check counts them"
)


def task_facts(
    spec: str | None, toml: Path | None, overrides: Sequence[str], *, measured: bool = False
) -> dict[str, Any]:
    """The fields of a Subject, by name.

    Args:
        measured: the profile comes from real steps on this machine, not from a trace without memory.

    Raises:
        TaskError, ConfigError: as `allranks train`; `make` also where the model cannot be traced.
    """
    from allranks.task import has_optimizer
    from allranks.training.prepare import prepare

    request = TrainRequest(task_spec=spec, toml=toml, overrides=tuple(overrides))
    prepared = prepare(request)
    own_optimizer = has_optimizer(prepared.task)
    profiles: dict[tuple[str, str], ModelProfile] = {}

    @cache
    def loaded() -> "FirstBatches":
        from allranks.stepping.profile import load_first

        return load_first(prepared.task)

    def make(seq: int | None, precision: str, device: str) -> ModelProfile:
        if (precision, device) not in profiles:
            profile = _profile(prepared.task, loaded(), precision, device, measured)
            profiles[precision, device] = profile
            if not measured:
                from allranks.training.sketch import replace_fault

                replace_fault(request, precision, device, profile, loaded())
        found = profiles[precision, device]
        if seq is not None and seq != found.seq:
            raise ConfigError(
                f"seq={seq}: a Task's samples are as long as its dataset makes them"
                f" ({found.seq} positions); give the task's own setting, e.g. task.seq={seq}"
            )
        return found

    def upkeep(kind: str, here: bool) -> Upkeep:
        from allranks.stepping.upkeep import upkeep_of

        return upkeep_of(prepared.config, kind, loaded() if here else None, own_optimizer=own_optimizer)

    return {
        "make": make,
        "upkeep": upkeep,
        "seq": 0,
        "task": prepared.spec or (None if spec is None and toml is None else spec),
        "notes": (OWN_OPTIMIZER,) if own_optimizer else (),
        **_said(prepared.task, prepared.config, _given(toml, overrides)),
    }


def _said(task: "Task", config: Config, given: set[str]) -> dict[str, Any]:
    """The fields that the config has an answer to; `given` by the user are those full keys."""
    defaults = read_mapping(task.defaults, "Task.defaults")
    by_default = {name for name, one in defaults.items() if one.value is not None} - given
    named = given | by_default
    return {
        "global_batch": config.train.global_batch,
        "micro_batch": config.train.micro_batch if "train.micro_batch" in named else None,
        "micro_steps": _micro_steps(task, config),
        "precision": config.train.precision if "train.precision" in named else None,
        "defaulted": frozenset(name for name in ("micro_batch", "precision") if f"train.{name}" in by_default),
        "layout": config.layout,
        "settings": {name: value for name, value in config.flat().items() if name in given and _is_kept(name)},
    }


def _profile(task: "Task", loaded: "FirstBatches", precision: str, device: str, measured: bool) -> ModelProfile:
    """Of a trace as on `device`, or of real steps: on it where this machine has one, else on its processor."""
    from allranks.stepping.profile import trace_measured, trace_task

    if not measured:
        return trace_task(task, precision, device, loaded=loaded)
    import torch

    try:
        return trace_measured(task, precision, device if torch.cuda.is_available() else "cpu", loaded=loaded)
    except TaskError as error:
        if precision not in LOW or not _OF_A_TYPE.search(str(error.__cause__)):
            raise
        raise TaskError(
            f"{error}\nthe step ran in {precision}, which a plan takes where nobody names one and the device is faster"
            " with it; with --precision float32 it is measured without"
        ) from error


def _given(toml: Path | None, overrides: Sequence[str]) -> set[str]:
    """The full keys that the user gave; what the Task's defaults say is not among them."""
    return {*(read_toml_layer(toml) if toml is not None else {}), *read_overrides(overrides)}


def _is_kept(name: str) -> bool:
    return not name.startswith("layout.") and name not in ("task.spec", "train.micro_batch", "train.micro_steps")


def _micro_steps(task: Any, config: Config) -> int | None:
    """How many forwards a step has by declaration: of a task whose loss couples samples, or that names them."""
    if config.train.micro_steps is not None:
        return config.train.micro_steps
    return 1 if task.coupled else None
