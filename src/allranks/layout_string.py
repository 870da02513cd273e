"""The layout string: `dp_shard=4,tp=2`, `ddp`, `hsdp,recompute=full`, to a LayoutConfig and back."""

import difflib

from pydantic import ValidationError

from allranks.config_keys import config_keys, did_you_mean, explain_value
from allranks.config_sections import AXES, LayoutConfig
from allranks.errors import ConfigError

MODES = ("sharding", "schedule", "recompute", "offload", "batchnorm", "compile")
TOML_ONLY = (
    *("static_graph", "gather", "prefetch", "ddp_bucket_mb", "context", "placement"),
    *("ddp_hook", "powersgd_rank", "powersgd_start"),
    *("local_sgd", "outer_lr", "outer_momentum", "outer_nesterov"),
)

WORDS: dict[str, dict[str, object]] = {
    "auto": {axis: None for axis in AXES},
    "single": {axis: 1 for axis in AXES},
    "ddp": {"dp_replicate": "*"},
    "fsdp": {"dp_shard": "*"},
    "hsdp": {"dp_replicate": "nodes", "dp_shard": "*"},
    "data_parallel": {"kind": "data_parallel"},
    "placement": {"kind": "placement"},
}


def parse_layout(text: str) -> LayoutConfig:
    """The LayoutConfig that `text` names. Raises ConfigError with the wrong part and the nearest that is right."""
    try:
        return LayoutConfig.model_validate(layout_values(text))
    except ValidationError as error:
        raise ConfigError(f"layout '{text}': {error.errors()[0]['msg'].removeprefix('Value error, ')}") from None


def layout_values(text: str) -> dict[str, object]:
    """What `text` sets in the section layout: every degree (axes not named are 1), the sharding, the modes it names."""
    given: dict[str, object] = {}
    said_by: dict[str, str] = {}
    for part in map(str.strip, text.split(",")):
        for name, value in _read_part(text, part).items():
            if name in given:
                both = f"'{said_by[name]}' and '{part}'" if said_by[name] != part else f"'{part}'"
                raise ConfigError(f"layout '{text}': {name} is given twice, by {both}")
            given[name], said_by[name] = value, part
    unnamed = 1 if any(axis in given for axis in AXES) or given.get("kind") else None
    start = {"kind": "mesh", **dict.fromkeys(AXES, unnamed), "sharding": None}
    return {**start, **given}


def render_layout(config: LayoutConfig) -> str:
    """The canonical string, which `parse_layout` reads back: degrees that are not 1, then modes that differ."""
    if not config.chosen:
        parts = ["auto"]
    elif config.kind == "data_parallel":
        parts = [config.kind]
    else:
        degrees = {axis: getattr(config, axis) for axis in AXES}
        parts = [f"{axis}={degree}" for axis, degree in degrees.items() if degree not in (None, 1)]
        parts = ["placement", *parts] if config.kind == "placement" else parts or ["single"]
    defaults = LayoutConfig()
    modes = {mode: getattr(config, mode) for mode in MODES}
    return ",".join(parts + [f"{mode}={word}" for mode, word in modes.items() if word != getattr(defaults, mode)])


def _read_part(text: str, part: str) -> dict[str, object]:
    name, equals, raw = map(str.strip, part.partition("="))
    if not part:
        hint = "write for example ddp, fsdp or dp_shard=4,tp=2"
        raise ConfigError(
            f"layout '{text}': a part of it is empty; {hint}" if text.strip() else f"the layout is empty; {hint}"
        )
    if not equals:
        return _read_word(text, name)
    if name in TOML_ONLY:
        raise ConfigError(
            f"layout '{text}': {name} does not stand in the layout string; write layout.{name}={raw} beside it"
        )
    if name not in AXES + MODES:
        near = difflib.get_close_matches(name.lower().replace("-", "_"), AXES + MODES, n=1, cutoff=0.5)
        advice = did_you_mean(near) or f"; the axes are {', '.join(AXES)}, the modes {', '.join(MODES)}"
        raise ConfigError(f"layout '{text}': no axis or mode is called '{name}'{advice}")
    return {name: _read_value(text, name, raw)}


def _read_word(text: str, word: str) -> dict[str, object]:
    if word in WORDS:
        return WORDS[word]
    if word in AXES + MODES:
        raise ConfigError(f"layout '{text}': {word} needs a value: {config_keys()['layout.' + word].expected}")
    near = difflib.get_close_matches(word.lower(), WORDS, n=1)
    advice = did_you_mean(near) or f"; the words are {', '.join(WORDS)}, everything else has the form axis=N"
    raise ConfigError(f"layout '{text}': '{word}' is no layout{advice}")


def _read_value(text: str, name: str, raw: str) -> object:
    key = config_keys()[f"layout.{name}"]
    if raw in key.words:
        return raw
    if name == "ep" and raw == "*":
        raise ConfigError(f"layout '{text}': ep takes no *: it divides dp_replicate * dp_shard; write a number")
    if name in AXES and raw.isascii() and raw.isdigit() and int(raw) > 0:
        return int(raw)
    raise ConfigError(f"layout '{text}': {name}={raw}, {explain_value(key, raw)}")
