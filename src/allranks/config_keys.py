"""Every config key as a value: its expectation in words, and the nearest key to a misspelt one.

The sections are the one source: what is said here about a key is read from their JSON schema.
"""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, final

from allranks.config_guard import GuardConfig
from allranks.config_sections import (
    LARGEST,
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

SECTIONS: Mapping[str, type[Section]] = {
    "train": TrainConfig,
    "optimizer": OptimizerConfig,
    "schedule": ScheduleConfig,
    "layout": LayoutConfig,
    "data": DataConfig,
    "evaluate": EvaluateConfig,
    "checkpoint": CheckpointConfig,
    "track": TrackConfig,
    "guard": GuardConfig,
}

# What people from other trainers type first.
OTHER_NAMES: Mapping[str, str] = {
    "learning_rate": "optimizer.lr",
    "batch_size": "train.global_batch",
    "per_device_train_batch_size": "train.micro_batch",
    "micro_batch_size": "train.micro_batch",
    "gradient_accumulation_steps": "train.micro_steps",
    "accumulate_grad_batches": "train.micro_steps",
    "max_steps": "train.steps",
    "max_time": "train.max_seconds",
    "num_train_epochs": "train.epochs",
    "max_epochs": "train.epochs",
    "max_grad_norm": "train.max_norm",
    "gradient_clip_val": "train.max_norm",
    "warmup_steps": "schedule.warmup",
    "num_workers": "data.workers",
    "eval_steps": "evaluate.every",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "dtype": "train.precision",
}


@final
@dataclass(frozen=True, slots=True)
class Key:
    """One config key.

    Attributes:
        name: the full name ("train.steps").
        default: None where the key is not set by default.
        unit: "" where it has none.
        expected: type and range in words ("a whole number of at least 1").
        description: one sentence.
        words: the words it may be, () where it is no choice.
        optional: whether it may be unset.
        text: whether it is free text.
    """

    name: str
    default: object
    unit: str
    expected: str
    description: str
    words: tuple[str, ...]
    optional: bool
    text: bool


@cache
def config_keys() -> Mapping[str, Key]:
    """Full name -> Key, in the order of the sections; `task.*` is open and not listed."""
    found = {}
    for section, model in SECTIONS.items():
        for leaf, schema in model.model_json_schema().get("properties", {}).items():
            found[f"{section}.{leaf}"] = _read_key(f"{section}.{leaf}", schema)
    return found


def nearest_keys(name: str) -> list[str]:
    """The full keys that `name` probably means, at most two, best first; [] where nothing is near."""
    known = list(config_keys())
    tidy = name.strip().lower().replace("-", "_")
    leaf = tidy.rpartition(".")[2]
    if tidy in known:
        return [tidy]
    if other := OTHER_NAMES.get(leaf):
        return [other]
    same_leaf = [key for key in known if key.rpartition(".")[2] == leaf]
    if same_leaf:
        return same_leaf[:2]
    if near := difflib.get_close_matches(tidy, known, n=2, cutoff=0.75):
        # Of two the second counts where it is as near as the first: beta is beta1 or beta2.
        ratios = [difflib.SequenceMatcher(None, key, tidy).ratio() for key in near]
        return [key for key, ratio in zip(near, ratios, strict=True) if ratio == ratios[0]]
    leaves = difflib.get_close_matches(leaf, {key.rpartition(".")[2] for key in known}, n=1, cutoff=0.7)
    return [key for key in known if key.rpartition(".")[2] in leaves][:2]


def did_you_mean(names: Iterable[str]) -> str:
    """`; did you mean 'a' or 'b'?`, or "" where there is no name."""
    quoted = " or ".join(f"'{name}'" for name in names)
    return f"; did you mean {quoted}?" if quoted else ""


def explain_unknown(name: str) -> str:
    """`unknown key 'train.step'; did you mean 'train.steps'?`, or the names to choose from where nothing is near."""
    if near := nearest_keys(name):
        return f"unknown key '{name}'{did_you_mean(near)}"
    section = name.partition(".")[0]
    leaves = [key.partition(".")[2] for key in config_keys() if key.startswith(section + ".")]
    if leaves:
        return f"unknown key '{name}'; the keys of {section} are {', '.join(leaves)}"
    near_section = difflib.get_close_matches(section, [*SECTIONS, "task"], n=1)
    return f"unknown key '{name}'{did_you_mean(near_section) or '; the sections are ' + ', '.join([*SECTIONS, 'task'])}"


def explain_value(key: Key, value: object) -> str:
    """What `key` expects instead of `value`, with what to write where that can be guessed."""
    advice = ""
    if key.words and isinstance(value, str):
        advice = did_you_mean(difflib.get_close_matches(value.lower(), key.words, n=1, cutoff=0.4))
    elif isinstance(value, float) and value.is_integer() and "whole number" in key.expected:
        advice = f": write {value:.0f}"
    elif isinstance(value, str) and value.lower() in ("true", "false") and "true or false" in key.expected:
        advice = ": write it without quotes" if value == value.lower() else f": write {value.lower()}"
    elif isinstance(value, str) and "number" in key.expected and _is_number(value):
        advice = ": write it without quotes"
    return f"expected {key.expected}{advice}"


def _read_key(name: str, schema: Mapping[str, Any]) -> Key:
    parts = schema.get("anyOf", [schema])
    words = [str(word) for part in parts for word in part.get("enum", [part["const"]] if "const" in part else [])]
    return Key(
        name=name,
        default=schema["default"],
        unit=schema["unit"],
        expected=" or ".join(filter(None, map(_expect, parts))),
        description=schema["description"],
        words=tuple(words),
        optional={"type": "null"} in parts,
        text=any(part.get("type") == "string" for part in parts) and not words,
    )


def _expect(part: Mapping[str, Any]) -> str:
    """One alternative of a key's type in words; "" for unset."""
    if "const" in part:
        return f"'{part['const']}'"
    if "enum" in part:
        return "one of " + ", ".join(part["enum"])
    names = {
        "integer": "a whole number",
        "number": "a number",
        "boolean": "true or false",
        "string": "a text",
        "object": "a table of texts",
        "null": "",
    }
    bounds = (
        ("of at least", part.get("minimum")),
        ("above", part.get("exclusiveMinimum")),
        ("of at most", None if part.get("maximum") == LARGEST else part.get("maximum")),
        ("below", part.get("exclusiveMaximum")),
    )
    limits = [f"{word} {bound:g}" for word, bound in bounds if bound is not None]
    return " ".join([names[part["type"]], " and ".join(limits)]).strip()


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
