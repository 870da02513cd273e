"""Which layers have a window, against transformers itself."""

from itertools import product
from typing import Any

import pytest

from allranks.errors import ConfigError
from allranks.hugging_face_config import BUILT
from allranks.hugging_face_windows import FULL, SLIDING, WINDOWS, windows_of

LAYERS = 13
ABSENT = object()


def _each(config: dict[str, Any], kind: str) -> list[int]:
    turn = windows_of(config, kind, LAYERS)
    return [turn[layer % len(turn)] if turn else 0 for layer in range(LAYERS)]


@pytest.mark.parametrize("kind", [kind for kind in WINDOWS if kind != "smollm3"])
def test_windows_are_those_of_transformers(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    for used, width, other in product(
        (ABSENT, True, False), (ABSENT, None, 300), ({}, {"max_window_layers": 3}, {"sliding_window_pattern": 3})
    ):
        if "sliding_window_pattern" in other and kind not in ("gemma3_text", "cohere2"):
            continue
        given = {"num_hidden_layers": LAYERS, "use_sliding_window": used, "sliding_window": width, **other}
        given = {key: value for key, value in given.items() if value is not ABSENT}
        config = transformers.AutoConfig.for_model(kind, **given)
        seen = getattr(config, "sliding_window", None) or 0
        kinds = [SLIDING] * LAYERS if WINDOWS[kind].layers == "all" else config.layer_types
        assert _each(given, kind) == [seen * (one == SLIDING) for one in kinds], given


def test_layer_types_say_which() -> None:
    config = {"sliding_window": 128, "layer_types": [SLIDING, SLIDING, FULL]}
    assert windows_of(config, "gpt_oss", 3) == (128, 128, 0)
    assert windows_of({**config, "layer_types": [FULL] * 3}, "gpt_oss", 3) == ()
    assert windows_of({**config, "use_sliding_window": True}, "smollm3", 3) == (128, 128, 0)
    assert windows_of(config, "smollm3", 3) == ()


def test_where_nothing_says_which_they_are_asked_for() -> None:
    with pytest.raises(ConfigError, match="no layer_types says for which layers: list them"):
        windows_of({"sliding_window": 128, "use_sliding_window": True}, "smollm3", 3)


def test_no_other_type_has_any() -> None:
    assert set(WINDOWS) <= set(BUILT)
    assert windows_of({"sliding_window": 128, "window_size": 256}, "llama", 3) == ()


def test_a_width_of_another_form_is_refused() -> None:
    with pytest.raises(ConfigError, match="sliding_window = '4096' is no whole number"):
        windows_of({"sliding_window": "4096"}, "mistral", 3)
