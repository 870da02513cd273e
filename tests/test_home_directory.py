"""Home directories that are known, and refusals of one line where they are not."""

import os
from pathlib import Path

import pytest

from allranks.errors import ConfigError
from allranks.home_directory import expand, user_folder


def test_a_tilde_is_a_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert expand("~/a.py") == Path("/home/someone/a.py") and expand("a~/b") == Path("a~/b")
    with pytest.raises(ConfigError, match=r"^~nosuchuser/a.py: no home directory is known for ~nosuchuser; write the"):
        expand("~nosuchuser/a.py")


def test_a_users_folder_is_named_or_below_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    assert user_folder("XDG_CONFIG_HOME", ".config") == Path("/home/someone/.config")
    monkeypatch.setenv("XDG_CONFIG_HOME", "/configuration")
    assert user_folder("XDG_CONFIG_HOME", ".config") == Path("/configuration")


def test_a_user_whom_no_passwd_file_knows_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000)
    with pytest.raises(ConfigError, match=r"^this user has no home directory: set HOME, or XDG_CONFIG_HOME to a dir"):
        user_folder("XDG_CONFIG_HOME", ".config")
