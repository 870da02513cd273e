"""Paths below somebody's home directory, which may be unknown: a container's user need not be in its passwd file."""

import os
from pathlib import Path

from allranks.errors import ConfigError


def expand(text: str) -> Path:
    """The path with its leading `~` or `~user` as that home directory. Raises ConfigError: nobody knows it."""
    path = Path(text)
    try:
        return path.expanduser()
    except RuntimeError:
        raise ConfigError(f"{text}: no home directory is known for {path.parts[0]}; write the path in full") from None


def user_folder(variable: str, below: str) -> Path:
    """The folder that `variable` names, by default `below` in the home directory. Raises ConfigError: neither is known.

    Args:
        variable: of the XDG base directory specification, such as XDG_CONFIG_HOME.
        below: what stands for it without the variable, such as .config.
    """
    if given := os.environ.get(variable):
        return Path(given)
    try:
        return Path.home() / below
    except RuntimeError:
        raise ConfigError(f"this user has no home directory: set HOME, or {variable} to a directory") from None
