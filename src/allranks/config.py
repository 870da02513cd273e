"""Config: what a Run is told, from four places into one frozen value.

Defaults < Task.defaults < the TOML file < the command line. Everything that is wrong is refused with the key, the place
where it stands and the nearest that is right. The resolved Config is written into the Run directory before anything
starts.
"""

import json
import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, final

from pydantic import Field, ValidationError

from allranks.config_guard import GuardConfig
from allranks.config_keys import SECTIONS, config_keys, explain_unknown, explain_value
from allranks.config_layers import Given, Layer, merge_layers, read_kept, read_mapping, read_overrides, read_toml_layer
from allranks.config_sections import (
    AXES,
    PROCESS_AXES,
    CheckpointConfig,
    DataConfig,
    EvaluateConfig,
    LayoutConfig,
    OptimizerConfig,
    ScheduleConfig,
    Section,
    TrackConfig,
    TrainConfig,
)
from allranks.config_toml import render_toml
from allranks.errors import ConfigError, RunError
from allranks.layout_string import parse_layout, render_layout
from allranks.ordinary_file import check_small, read_small

__all__ = [
    "AXES",
    "PROCESS_AXES",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "EvaluateConfig",
    "GuardConfig",
    "LayoutConfig",
    "OptimizerConfig",
    "ScheduleConfig",
    "TrackConfig",
    "TrainConfig",
    "changed_keys",
    "check_resumable",
    "is_as_written",
    "is_resumable",
    "override_config",
    "parse_layout",
    "read_config",
    "read_task_spec",
    "render_layout",
    "resolve_config",
    "write_config",
]

_HEAD = "# Resolved by allranks before the run started.\n# SHA-256 of what follows: "

RESUMABLE = (
    *("train.steps", "train.epochs", "train.max_seconds", "layout.", "data.workers", "evaluate.every"),
    *("checkpoint.", "track.", "guard."),
)
"""What a resume may change freely (a trailing dot: the whole section); the rest changes what the run means."""

MEANT = (
    "layout.batchnorm",
    *("layout.ddp_hook", "layout.powersgd_rank", "layout.powersgd_start"),
    *("layout.local_sgd", "layout.outer_lr", "layout.outer_momentum", "layout.outer_nesterov"),
)
"""What changes the meaning all the same: whose samples a batch statistic sees, and what replicas send each other."""


@final
class Config(Section):
    """The configuration of a Run. `task` holds the Task's settings; `task_spec` names the Task, where a file did."""

    train: TrainConfig = Field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    layout: LayoutConfig = Field(default_factory=LayoutConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    evaluate: EvaluateConfig = Field(default_factory=EvaluateConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    track: TrackConfig = Field(default_factory=TrackConfig)
    guard: GuardConfig = Field(default_factory=GuardConfig)
    task: dict[str, Any] = Field(default_factory=dict)
    task_spec: str | None = None

    def flat(self) -> dict[str, object]:
        """Full key -> value for every key, with the Task's settings as task.* and its spec as task.spec."""
        tables = self.model_dump(exclude={"task", "task_spec"})
        values = {f"{section}.{leaf}": value for section, table in tables.items() for leaf, value in table.items()}
        return {**values, "task.spec": self.task_spec, **{f"task.{name}": value for name, value in self.task.items()}}


def resolve_config(
    *,
    task_defaults: Mapping[str, object],
    toml: Path | None,
    overrides: Sequence[str],
    layout: str | None = None,
    kept: Config | None = None,
) -> Config:
    """The Config of a first start.

    Args:
        task_defaults: what the Task wants, by full key; below the file.
        toml: the user's file, or None.
        overrides: `key.sub=value` from the command line; the last one of a key wins.
        layout: a layout string (`--layout`); beats the others.
        kept: what the Run directory that `--run` continues already holds: its `schedule.steps` is the default.

    Raises:
        ConfigError: naming the key and the file or argument.
    """
    layers = [
        read_mapping(task_defaults, "Task.defaults"),
        read_toml_layer(toml) if toml is not None else {},
        read_overrides(overrides, layout),
    ]
    config = _build(merge_layers(layers))
    end = kept.schedule.steps if kept is not None else config.train.steps
    if config.schedule.steps is None and end is not None:
        return config.model_copy(update={"schedule": config.schedule.model_copy(update={"steps": end})})
    return config


def override_config(kept: Config, overrides: Sequence[str], layout: str | None = None) -> Config:
    """The Config of a resume: the Run's own, the command line on top. `check_resumable` says whether it may start."""
    return _build(merge_layers([read_kept(kept.flat(), "config.toml"), read_overrides(overrides, layout)]))


def read_task_spec(toml: Path) -> str | None:
    """The Task that a TOML file names, its file relative to the TOML file made absolute; None where it names none."""
    given = read_toml_layer(toml).get("task.spec")
    return str(given.value) if given is not None else None


def write_config(config: Config, path: Path) -> None:
    """Write every key that is set, so that `read_config` gives the same Config."""
    tables: dict[str, dict[str, object]] = {}
    for name, value in config.flat().items():
        section, _, leaf = name.partition(".")
        tables.setdefault(section, {})[leaf] = value
    content = "\n" + render_toml(tables)
    path.write_bytes(f"{_HEAD}{sha256(content.encode()).hexdigest()}\n{content}".encode())


def check_text(config: Config) -> None:
    """Raises ConfigError where text is no UTF-8, as a path may be: a run's config.toml could not hold it."""
    for name, value in config.flat().items():
        try:
            json.dumps(value, ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError:
            raise ConfigError(
                f"{name}={value!r} has bytes that are no UTF-8, which no config file can hold: give the files, or "
                "their folder, a name in UTF-8"
            ) from None


def is_as_written(path: Path) -> bool:
    """Whether a file that `write_config` wrote holds what it wrote: nothing was altered, nothing is cut off.

    Without the line that has the digest whatever has a key counts. Raises OSError where it cannot be read.
    """
    data = read_small(path)
    match = re.match(re.escape(_HEAD.encode()) + rb"([0-9a-f]{64})\n", data)
    if match is None:
        return any(line.strip() and not line.startswith(b"#") for line in data.splitlines())
    return sha256(data[match.end() :]).hexdigest().encode() == match[1]


def read_config(path: Path) -> Config:
    """The Config that `write_config` wrote. Raises ConfigError where the file was broken since."""
    try:
        check_small(path)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    return _build(merge_layers([read_toml_layer(path)]))


def changed_keys(old: Config, new: Config) -> dict[str, tuple[object, object]]:
    """Full key -> (old, new) for every key that differs; who the Task is, run.json says."""
    before, after = old.flat(), new.flat()
    names = [*before, *(name for name in after if name not in before)]
    return {
        name: (before.get(name), after.get(name))
        for name in names
        if name != "task.spec" and not same_value(before.get(name), after.get(name))
    }


def same_value(one: object, other: object) -> bool:
    """Whether two values of a config mean the same: also where they are nan, which no number equals, or hold it."""
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and type(one) is type(other):
        return len(one) == len(other) and all(map(same_value, one, other))
    return one == other or (one != one and other != other)


def is_resumable(name: str) -> bool:
    """Whether a resume may change this key without `--change`."""
    free = any(name == key or (key.endswith(".") and name.startswith(key)) for key in RESUMABLE)
    return free and name not in MEANT


def check_resumable(old: Config, new: Config, change: Sequence[str] = ()) -> None:
    """Refuse a resume that would change what the run means.

    Raises:
        ConfigError: a key of `--change` does not exist.
        RunError: a key differs that `--change` does not name; all of them are listed.
    """
    for name in change:
        if name not in new.flat() and name not in old.flat():
            raise ConfigError(f"--change {name}: {explain_unknown(name)}")
    refused = {
        name: pair for name, pair in changed_keys(old, new).items() if not is_resumable(name) and name not in change
    }
    if refused:
        differences = ", ".join(
            f"{name} {_show(before)} -> {_show(after)}" for name, (before, after) in refused.items()
        )
        allow = " ".join(f"--change {name}" for name in refused)
        raise RunError(f"the run was started with another configuration: {differences}; keep it, or add {allow}")


def _build(values: Layer) -> Config:
    """Validate the sections one by one, so that an error can name the key and its origin."""
    for name, given in values.items():
        if name not in config_keys() and not name.startswith("task."):
            raise ConfigError(f"{given.place(name)}: {explain_unknown(name)}")
    sections = {section: _build_section(section, model, values) for section, model in SECTIONS.items()}
    spec = values.pop("task.spec", None)
    task = {name.removeprefix("task."): given.value for name, given in values.items() if name.startswith("task.")}
    return Config.model_validate({**sections, "task": task, "task_spec": spec.value if spec is not None else None})


def _build_section(section: str, model: type[Section], values: Layer) -> Section:
    prefix = section + "."
    given = {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
    try:
        built = model.model_validate({leaf: value.value for leaf, value in given.items()})
    except ValidationError as error:
        first = error.errors()[0]
        if not first["loc"]:
            places = sorted({value.origin for value in given.values()})
            raise ConfigError(f"{', '.join(places)}: {first['msg'].removeprefix('Value error, ')}") from None
        leaf = str(first["loc"][0])
        raise ConfigError(_explain(prefix + leaf, given[leaf])) from None
    return built


def _explain(name: str, given: Given) -> str:
    return f"{given.place(name)}: {name} = {_show(given.value)}: {explain_value(config_keys()[name], given.value)}"


def _show(value: object) -> str:
    match value:
        case None:
            return "not set"
        case bool():
            return str(value).lower()
        case _:
            return repr(value)
