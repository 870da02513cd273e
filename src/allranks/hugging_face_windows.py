"""Which layers of a Hugging Face model attend to a window, and how wide it is, as transformers reads the config."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, final

from allranks.errors import ConfigError
from allranks.hugging_face_keys import INSTEAD, flag, whole, words

SLIDING, FULL = "sliding_attention", "full_attention"
UNNAMED_FULL_LAYERS = 28
"""What an absent `max_window_layers` means."""


@final
@dataclass(frozen=True, slots=True)
class _Windows:
    """How transformers gives a type's layers windows (configuration_*.py and modeling_*.py of version 5.24).

    Attributes:
        absent: what an absent `sliding_window` means, in positions; 0: no layer has one.
        asked: windows are there only where `use_sliding_window` is true.
        layers: which have one. "all"; or those that `layer_types` lists, and without it: "but each nth", where n is
            `sliding_window_pattern`; "behind" the first `max_window_layers`, or every second "within" them; "listed":
            nothing says so.
        nth: what an absent `sliding_window_pattern` means.
    """

    absent: int = 0
    asked: bool = False
    layers: Literal["all", "but each nth", "behind", "within", "listed"] = "all"
    nth: int = 2


WINDOWS: Mapping[str, _Windows] = {
    "mistral": _Windows(4096),
    **dict.fromkeys(("mixtral", "phi3", "starcoder2"), _Windows()),
    "qwen3_moe": _Windows(4096, asked=True),
    **dict.fromkeys(("qwen2", "qwen3"), _Windows(4096, asked=True, layers="behind")),
    "qwen2_moe": _Windows(4096, asked=True, layers="within"),
    "smollm3": _Windows(asked=True, layers="listed"),
    "gpt_oss": _Windows(128, layers="but each nth"),
    "gemma2": _Windows(4096, layers="but each nth"),
    "gemma3_text": _Windows(4096, layers="but each nth", nth=6),
    "cohere2": _Windows(4096, layers="but each nth", nth=4),
}
"""By `model_type`; layers of any other attend to all positions, and so do gpt_neo's "local" ones, in which transformers
computes all scores and masks them."""


def windows_of(config: Mapping[str, Any], kind: str, layers: int) -> tuple[int, ...]:
    """Of the model's layers in turn, as in ModelShape: `()` where none has a window.

    Raises ConfigError for layers of another kind, a value of another form, and where nothing says which have windows.
    """
    listed = words(config, "layer_types")
    for one in listed:
        if one not in (FULL, SLIDING):
            raise ConfigError(f"layer_types has {one!r}: allranks knows blocks of attention alone; {INSTEAD}")
    how = WINDOWS.get(kind)
    if how is None or (how.asked and not flag(config, "use_sliding_window", False)):
        return ()
    said = whole(config, "sliding_window", 0)
    width = how.absent if said is None and "sliding_window" not in config else said or 0
    if not width:
        return ()
    if how.layers != "all" and listed:
        have = [one == SLIDING for one in listed]
    else:
        have = _unlisted(config, how, layers)
    return tuple(width * one for one in have) if any(have) else ()


def _unlisted(config: Mapping[str, Any], how: _Windows, layers: int) -> list[bool]:
    """Which have a window where `layer_types` does not say so, of the layers in turn."""
    if how.layers == "all":
        return [True]
    if how.layers == "listed":
        raise ConfigError("use_sliding_window is true, and no layer_types says for which layers: list them")
    if how.layers == "but each nth":
        each = whole(config, "sliding_window_pattern", 1) or how.nth
        return [(layer + 1) % each > 0 for layer in range(min(each, layers))]
    first = whole(config, "max_window_layers", 0)
    border = UNNAMED_FULL_LAYERS if first is None else first
    if how.layers == "behind":
        return [layer >= border for layer in range(layers)]
    return [layer % 2 == 0 and layer < border for layer in range(layers)]
