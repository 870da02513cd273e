"""How often what fails: public figures by name, a number, or the user's own TOML file."""

import difflib
from dataclasses import replace
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from allranks.config_toml import read_toml
from allranks.errors import ConfigError
from allranks.planning.wrong_keys import nearest_word
from allranks.simulation import Component, FailureModel, Scope

HOUR = 3600.0
NODE_REPAIR, SWITCH_REPAIR = 24 * HOUR, 4 * HOUR
"""Seconds until nodes are back. No public source gives them for these clusters: assumed, and said so in the notes."""

MOST_IN_BURST = 0.95
"""Further failures that one brings in the mean: with 1 a burst would never end."""

NODE_DEVICES = 8
"""Of a node of the clusters that the named rates come from: H100s (2407.21783) and A100s (2410.21680)."""

_LLAMA3_NODE_DAYS = 16384 / NODE_DEVICES * 54
_LLAMA3 = (
    ("faulty GPU", 148, Scope.NODE),
    ("GPU HBM3", 72, Scope.NODE),
    ("software bug", 54, Scope.PROCESS),
    ("network switch or cable", 35, Scope.RACK),
    ("host maintenance", 32, Scope.NODE),
    ("GPU SRAM", 19, Scope.NODE),
    ("GPU system processor", 17, Scope.NODE),
    ("NIC", 7, Scope.NODE),
    ("NCCL watchdog timeout", 7, Scope.PROCESS),
    ("silent data corruption", 6, Scope.NODE),
    ("GPU thermal interface and sensor", 6, Scope.NODE),
    ("SSD", 3, Scope.NODE),
    ("power supply", 3, Scope.NODE),
    ("server chassis", 2, Scope.NODE),
    ("IO expansion board", 2, Scope.NODE),
    ("dependency", 2, Scope.PROCESS),
    ("CPU", 2, Scope.NODE),
    ("system memory", 2, Scope.NODE),
)
"""(component, unexpected interruptions in 54 days on 2,048 nodes, what it takes): arXiv 2407.21783, table 5. The scopes
are ours: what software ends leaves the nodes, and a switch takes the rack of two nodes that the paper describes."""


def _repair(scope: Scope) -> float:
    return {Scope.NODE: NODE_REPAIR, Scope.RACK: SWITCH_REPAIR}.get(scope, 0.0)


def _of_nodes(name: str, rate: float, source: str) -> FailureModel:
    return FailureModel(name, (Component("node", rate, Scope.NODE, NODE_REPAIR),), source=source)


NAMED = {
    "llama3": FailureModel(
        "llama3",
        tuple(
            Component(name, 1000 * count / _LLAMA3_NODE_DAYS, scope, _repair(scope)) for name, count, scope in _LLAMA3
        ),
        source="arXiv 2407.21783, table 5: 419 unexpected interruptions of 2,048 nodes in 54 days",
    ),
    "rsc-1": _of_nodes("rsc-1", 6.5, "Kokolis et al., HPCA 2025 (arXiv 2410.21680): RSC-1, A100"),
    "rsc-2": _of_nodes("rsc-2", 2.34, "Kokolis et al., HPCA 2025 (arXiv 2410.21680): RSC-2, A100"),
}
"""By the name that `--failures` takes, of nodes of NODE_DEVICES."""

ASSUMED = (
    f"nodes are back after {NODE_REPAIR / HOUR:.0f} h on average and a rack's switch after {SWITCH_REPAIR / HOUR:.0f}"
    " h, which is assumed, because the source does not say: give repair_hours in a file for --failures"
)


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)


class _ComponentTable(_Table):
    name: str
    per_1000_node_days: float = Field(default=0.0, ge=0, le=100_000)
    per_1000_days: float = Field(default=0.0, ge=0, le=100_000)
    scope: Literal["process", "node", "rack", "row", "cluster"] = "node"
    repair_hours: float = Field(default=NODE_REPAIR / HOUR, ge=0, le=24 * 365)
    burst_failures: float = Field(default=0.0, ge=0, le=MOST_IN_BURST)
    burst_hours: float = Field(default=1.0, gt=0, le=24 * 365)

    @model_validator(mode="after")
    def _has_its_rate(self) -> Self:
        own, other = "per_1000_node_days", "per_1000_days"
        if self.scope == "cluster":
            own, other = other, own
        if other in self.model_fields_set:
            raise ValueError(f'{other} is not for scope = "{self.scope}", whose rate is {own}')
        if own not in self.model_fields_set:
            raise ValueError(f'scope = "{self.scope}" needs {own}')
        return self


class _StragglerTable(_Table):
    per_1000_node_days: float = Field(ge=0, le=100_000)
    slowdown: float = Field(default=0.1, gt=0, le=100)
    hours: float = Field(default=1.0, gt=0, le=24 * 365)


class _File(_Table):
    rack_nodes: int = Field(default=2, ge=1)
    row_nodes: int = Field(default=32, ge=1)
    source: str = ""
    component: list[_ComponentTable] = Field(min_length=1)
    stragglers: _StragglerTable | None = None


def find_failures(text: str, devices_per_node: int) -> tuple[FailureModel, tuple[str, ...]]:
    """What `--failures` names, and what it leaves assumed.

    Args:
        text: a name of NAMED, incidents in 1000 node-days as a number, or a TOML file of `[[component]]` tables.
        devices_per_node: of the cluster; by them a name's rates are scaled, while a number and a file are of its nodes.

    Raises:
        ConfigError: none of them, or a file with an unknown key or an impossible figure.
    """
    if text in NAMED:
        model = _of_devices(NAMED[text], devices_per_node)
        return model, (ASSUMED, *_scaled(NAMED[text], model, devices_per_node))
    if text.endswith(".toml"):
        file = _read(Path(text))
        return _model_of(file, Path(text)), _left_out(file, text)
    try:
        rate = float(text)
    except ValueError:
        near = difflib.get_close_matches(text, NAMED, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(
            f"--failures {text}: not a name ({', '.join(NAMED)}), a number of failures in 1000 node-days,"
            f" or a TOML file{hint}"
        ) from None
    if not 0 <= rate <= 100_000:
        raise ConfigError(f"--failures {text}: failures in 1000 node-days are a number from 0 to 100000")
    return _of_nodes(f"{rate:g} in 1000 node-days", rate, "as given"), (ASSUMED,)


def _of_devices(named: FailureModel, devices: int) -> FailureModel:
    """`named` for nodes of so many devices: a device fails as often, and a switch takes as many, whatever a node holds.

    Arithmetic; of Llama 3's 419 interruptions 275 are of GPUs and their NICs, 63 of software (2407.21783, table 5).
    """
    if devices == NODE_DEVICES:
        return named
    share = devices / NODE_DEVICES
    parts = (replace(part, per_1000_node_days=share * part.per_1000_node_days) for part in named.components)
    return replace(named, components=tuple(parts), rack_nodes=max(1, round(named.rack_nodes / share)))


def _scaled(named: FailureModel, model: FailureModel, devices: int) -> tuple[str, ...]:
    """What became of the rates of `named`, where they were scaled."""
    if devices == NODE_DEVICES:
        return ()
    racks = any(part.scope is Scope.RACK for part in model.components)
    switch = f", and a switch takes {model.rack_nodes} {'node' if model.rack_nodes == 1 else 'nodes'}" if racks else ""
    return (
        f"a node of {devices} fails {devices / NODE_DEVICES:g} times as often as one of {NODE_DEVICES}, of which the"
        f" source counts {named.per_1000_node_days:.2f} failures in 1000 node-days{switch}, because failures go by"
        " devices: give a number for your nodes with --failures",
    )


def read_failures(path: Path) -> FailureModel:
    """A failure model from a file. Raises ConfigError with file, key and what is wrong."""
    return _model_of(_read(path), path)


def _read(path: Path) -> _File:
    try:
        values = read_toml(path)
    except ConfigError as error:
        raise ConfigError(f"--failures {error}") from None
    try:
        return _File.model_validate(values)
    except ValidationError as error:
        # A wrong key first of all: it is often the one that is missing.
        first = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
    table, place = first["loc"][0], ".".join(str(part) for part in first["loc"])
    if first["type"] != "extra_forbidden":
        raise ConfigError(f"--failures {path}: {place}: {first['msg']}")
    kinds: dict[object, type[_Table]] = {"component": _ComponentTable, "stragglers": _StragglerTable}
    known = (kinds.get(table, _File) if len(first["loc"]) > 1 else _File).model_fields
    raise ConfigError(f"--failures {path}: unknown key '{place}'{nearest_word(str(first['loc'][-1]), known)}")


def _left_out(file: _File, path: str) -> tuple[str, ...]:
    """What a file does not say and counts, and what it says without effect: one line each."""
    silent = [one for one in file.component if "repair_hours" not in one.model_fields_set and one.scope != "process"]
    said = [f"repair_hours = {silent[0].repair_hours:g} ({', '.join(one.name for one in silent)})"] if silent else []
    if "rack_nodes" not in file.model_fields_set and any(one.scope == "rack" for one in file.component):
        said.append(f"rack_nodes = {file.rack_nodes}")
    if "row_nodes" not in file.model_fields_set and any(one.scope == "row" for one in file.component):
        said.append(f"row_nodes = {file.row_nodes}")
    bursts = [one for one in file.component if one.burst_failures and "burst_hours" not in one.model_fields_set]
    if bursts:
        said.append(f"burst_hours = {bursts[0].burst_hours:g} ({', '.join(one.name for one in bursts)})")
    if (slow := file.stragglers) is not None:
        keys = [key for key in ("slowdown", "hours") if key not in slow.model_fields_set]
        said += [f"stragglers.{key} = {getattr(slow, key):g}" for key in keys]
    idle = [one.name for one in file.component if one.scope == "process" and "repair_hours" in one.model_fields_set]
    alone = [one.name for one in file.component if not one.burst_failures and "burst_hours" in one.model_fields_set]
    found = [f"{', '.join(said)}, which is assumed, because {path} does not say"] if said else []
    if idle:
        found.append(f"repair_hours of {', '.join(idle)} has no effect, because what ends a process leaves its node")
    if alone:
        found.append(f"burst_hours of {', '.join(alone)} has no effect, because burst_failures is 0")
    return tuple(found)


def _model_of(file: _File, path: Path) -> FailureModel:
    slow = file.stragglers or _StragglerTable(per_1000_node_days=0)
    return FailureModel(
        path.stem,
        tuple(
            Component(
                one.name,
                one.per_1000_node_days,
                Scope[one.scope.upper()],
                one.repair_hours * HOUR,
                per_1000_days=one.per_1000_days,
                burst_failures=one.burst_failures,
                burst_seconds=one.burst_hours * HOUR,
            )
            for one in file.component
        ),
        rack_nodes=file.rack_nodes,
        row_nodes=file.row_nodes,
        stragglers_per_1000_node_days=slow.per_1000_node_days,
        straggler_slowdown=slow.slowdown,
        straggler_seconds=slow.hours * HOUR,
        source=file.source or str(path),
    )
