"""Why a row of a file cannot be estimated, in one line: what it leaves open, what is impossible, what nobody knows."""

import math
from collections.abc import Mapping
from typing import Any

from published_runs import device_name

from allranks.errors import ConfigError

TABLES = ("model", "hardware", "parallel", "metrics")
TEXTS = ("id", "source", "precision", "framework")
NEEDED = {
    "model": ("layers", "hidden", "heads", "seq_len"),
    "parallel": ("dp", "tp", "pp", "gbs"),
    "hardware": ("n_gpus",),
}
OPTIONAL = {"model": ("kv_heads", "ffn", "vocab"), "parallel": ("cp", "ep", "mbs"), "hardware": ("gpus_per_node",)}
AMOUNTS = {"hardware": ("mem_gb",), "metrics": ("step_time_s", "mem_gib_peak", "mem_gb_peak")}


def fault_of(row: Any) -> str:
    """ "" for a row that can be estimated."""
    if not isinstance(row, Mapping):
        return "is no table"
    for key in TABLES:
        if not isinstance(row.get(key), Mapping):
            return f"{key} is no table"
    for key in TEXTS:
        if not isinstance(row.get(key), str) or not row[key]:
            return f"{key} is not given"
    for table, keys in NEEDED.items():
        for key in keys:
            if row[table].get(key) is None:
                return f"{table}.{key} is not given"
            if not _is_count(row[table][key]):
                return f"{table}.{key} = {row[table][key]}: a whole number of at least 1 is needed"
    return _unlikely(row) or _unknown_device(row["hardware"].get("gpu"))


def _unlikely(row: Mapping[str, Any]) -> str:
    """Of what may be left open."""
    for table, keys in OPTIONAL.items():
        for key in keys:
            given = row[table].get(key)
            if given and not _is_count(given):
                return f"{table}.{key} = {given}: a whole number of at least 1 is needed"
    for table, keys in AMOUNTS.items():
        for key in keys:
            given = row[table].get(key)
            if given is not None and not _is_amount(given):
                return f"{table}.{key} = {given}: an amount above 0 is needed"
    return "" if row["hardware"].get("mem_gb") else "hardware.mem_gb is not given"


def _unknown_device(name: Any) -> str:
    if not isinstance(name, str) or not name:
        return "hardware.gpu is not given"
    try:
        device_name(name)
    except ConfigError:
        return f"device {name} is not in the catalog"
    return ""


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_amount(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
