"""Values of a Hugging Face `config.json` by their keys, each of the form that its key has, or refused by name."""

from collections.abc import Mapping
from typing import Any

from allranks.errors import ConfigError

INSTEAD = "give a Task with the module, or the sizes of one that is close: --layers --hidden --heads --kv-heads --ffn"
"""What to do where a config.json is of no model whose parts are known."""


def whole(config: Mapping[str, Any], key: str, least: int) -> int | None:
    """None where the key is absent or null. Raises ConfigError for what is no whole number, or too small."""
    value = config.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{key} = {short(value)} is no whole number, such as 4096")
    if value < least:
        raise ConfigError(f"{key} = {value}, but it has to be at least {least}")
    return value


def flag(config: Mapping[str, Any], key: str, absent: bool) -> bool:
    """`absent` where the key is, or null. Raises ConfigError for what is neither true nor false."""
    value = config.get(key)
    if value is None:
        return absent
    if not isinstance(value, bool):
        raise ConfigError(f"{key} = {short(value)} is neither true nor false")
    return value


def words(config: Mapping[str, Any], key: str) -> list[str]:
    """Empty where the key is absent or null. Raises ConfigError for what is no list of words."""
    value = config.get(key) or []
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise ConfigError(f"{key} = {short(value)} is no list of words")
    return value


def short(value: object) -> str:
    """As it stands in a message; a table or a long list is cut off."""
    written = repr(value)
    return written if len(written) <= 40 else f"{written[:37]}..."
