"""Values of a config.json, each of its form."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from allranks.errors import ConfigError
from allranks.hugging_face_keys import flag, short, whole, words

CONFIG: dict[str, Any] = {"layers": 4, "tied": False, "kinds": ["full"], "none": None}


def test_a_value_is_as_it_stands() -> None:
    assert (whole(CONFIG, "layers", 1), flag(CONFIG, "tied", True), words(CONFIG, "kinds")) == (4, False, ["full"])


@pytest.mark.parametrize("key", ["none", "absent"])
def test_null_is_as_good_as_nothing(key: str) -> None:
    assert (whole(CONFIG, key, 1), flag(CONFIG, key, True), words(CONFIG, key)) == (None, True, [])


@pytest.mark.parametrize(
    ("read", "value", "said"),
    [
        (lambda config: whole(config, "key", 1), True, "key = True is no whole number, such as 4096"),
        (lambda config: whole(config, "key", 1), 0, "key = 0, but it has to be at least 1"),
        (lambda config: flag(config, "key", False), 1, "key = 1 is neither true nor false"),
        (lambda config: words(config, "key"), "full", "key = 'full' is no list of words"),
        (lambda config: words(config, "key"), [1], "key = [1] is no list of words"),
    ],
)
def test_another_form_is_refused_by_name(read: Callable[[dict[str, Any]], object], value: object, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}$"):
        read({"key": value})


def test_what_is_long_is_cut_off() -> None:
    assert short(list(range(99))) == "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11..."
