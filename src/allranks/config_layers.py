"""The places a Config comes from, each read into a Layer: full key -> value and where it stood."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from allranks.config_keys import SECTIONS, config_keys, did_you_mean, explain_unknown, nearest_keys
from allranks.config_toml import find_line, read_toml
from allranks.errors import ConfigError
from allranks.layout_string import layout_values


@final
@dataclass(frozen=True, slots=True)
class Given:
    """One value, and where the user wrote it."""

    value: object
    origin: str
    path: Path | None = None

    def place(self, name: str) -> str:
        """The origin, with the line where a file is the origin and the line can be told."""
        return self.origin + (find_line(self.path, name.rpartition(".")[2]) if self.path is not None else "")


Layer = dict[str, Given]


def merge_layers(layers: Sequence[Layer]) -> Layer:
    """Later layers win. `train.steps` and `train.epochs` displace each other between layers; a layer gives one."""
    merged: Layer = {}
    for layer in layers:
        steps, epochs = layer.get("train.steps"), layer.get("train.epochs")
        if _is_set(steps) and _is_set(epochs):
            assert steps is not None and epochs is not None
            places = " and ".join(dict.fromkeys((steps.place("train.steps"), epochs.place("train.epochs"))))
            both = f"train.steps = {steps.value} and train.epochs = {epochs.value}"
            raise ConfigError(f"{places}: {both} are both given: a run has one length, give one of them")
        if _is_set(steps):
            merged.pop("train.epochs", None)
        if _is_set(epochs):
            merged.pop("train.steps", None)
        merged.update(layer)
    return merged


def read_mapping(values: Mapping[str, object], origin: str, path: Path | None = None) -> Layer:
    """Nested tables or full keys -> Layer. A section that is no table is refused, but for a layout string."""
    layer: Layer = {}
    for name, value in values.items():
        given = Given(value, origin, path)
        if name == "layout" and isinstance(value, str):
            layer.update(_spread_layout(value, origin))
        elif isinstance(value, Mapping) and name in (*SECTIONS, "task"):
            layer.update({f"{name}.{leaf}": Given(inner, origin, path) for leaf, inner in value.items()})
        elif name in (*SECTIONS, "task"):
            raise ConfigError(
                f"{given.place(name)}: {name} = {value!r}: {name} is a section; write its keys, as in [{name}]"
            )
        else:
            layer[name] = given
    return layer


def read_kept(values: Mapping[str, object], origin: str) -> Layer:
    """The full keys of a Config that already holds."""
    return {name: Given(value, origin) for name, value in values.items() if value is not None}


def read_toml_layer(path: Path) -> Layer:
    """A TOML file -> Layer. `task = "file.py:Name"` or `[task] spec = ...` names the Task, relative to the file."""
    values = read_toml(path)
    if isinstance(values.get("task"), str):
        values["task"] = {"spec": values["task"]}
    layer = read_mapping(values, str(path), path)
    if spec := layer.get("task.spec"):
        if not isinstance(spec.value, str):
            raise ConfigError(f'{spec.place("task.spec")}: the task is named by a text such as "file.py:Name"')
        layer["task.spec"] = Given(_anchor(spec.value, path.parent), spec.origin, path)
    return layer


def read_overrides(overrides: Sequence[str], layout: str | None = None) -> Layer:
    """`key.sub=value` arguments, then the layout string of `--layout`."""
    layer: Layer = {}
    for argument in overrides:
        name, equals, raw = argument.partition("=")
        origin = f"argument '{argument}'"
        if not equals or not name:
            raise ConfigError(f"{origin}: expected key=value, for example train.steps=100")
        layer.update(_read_override(name.strip(), raw.strip(), origin))
    if layout is not None:
        layer.update(_spread_layout(layout, "--layout"))
    return layer


def _read_override(name: str, raw: str, origin: str) -> Layer:
    if name == "layout":
        return _spread_layout(raw, origin)
    if name == "task":
        raise ConfigError(f"{origin}: the task is an argument of its own: write {raw}")
    if name in SECTIONS:
        first = next((key for key in config_keys() if key.startswith(name + ".")), None)
        example = f", for example {first}=..." if first else ""
        raise ConfigError(f"{origin}: {name} is a section, not a key{example}")
    if name.startswith("task.") and name != "task.":
        return {name: Given(_read_value(raw), origin)}
    key = config_keys().get(name)
    if key is None:
        near = nearest_keys(name)
        if (rule := name.removeprefix("layout.placement.")) != name:
            near, raw = ["layout.placement"], f'{{"{rule}" = "{raw}"}}'  # its rules are one table
        again = did_you_mean([f"{near[0]}={raw}"]) if len(near) == 1 else None
        raise ConfigError(f"{origin}: unknown key '{name}'{again}" if again else f"{origin}: {explain_unknown(name)}")
    if raw.lower() in ("none", "null") and key.optional and "none" not in key.words:
        return {name: Given(None, origin)}
    value = _read_value(raw)
    return {name: Given(raw if key.text and not isinstance(value, str) else value, origin)}


def _read_value(raw: str) -> object:
    """A TOML value where it is one, else the text itself, so that words need no quotes."""
    try:
        parsed = tomllib.loads(f"value = {raw}")
    except (ValueError, RecursionError):  # TOML's own error is the former
        return raw
    return parsed["value"] if list(parsed) == ["value"] else raw


def _spread_layout(text: str, origin: str) -> Layer:
    try:
        return {f"layout.{name}": Given(value, origin) for name, value in layout_values(text).items()}
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error}") from None


def _anchor(spec: str, folder: Path) -> str:
    """`file.py[:Name]` relative to `folder`, made absolute; `package.module:Name` as it is."""
    file, colon, name = spec.partition(":")
    return f"{(folder / file).resolve()}{colon}{name}" if file.endswith(".py") else spec


def _is_set(given: Given | None) -> bool:
    return given is not None and given.value is not None
