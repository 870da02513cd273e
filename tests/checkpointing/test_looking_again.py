"""A client of NFS that remembers that a name is not there is made to ask again."""

import os
import threading
import time
from pathlib import Path
from unittest.mock import patch

import pytest

from allranks.checkpointing import looking_again
from allranks.checkpointing.looking_again import await_name, await_run


class Client:
    """Of NFS, with default mount options: what it has not found is not there, until it changes the directory itself."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = 0
        self._absent = set[str]()
        self._really = os.path.lexists
        monkeypatch.setattr("os.path.lexists", self.lexists)
        real = Path.mkdir

        def mkdir(path: Path) -> None:
            real(path)
            self._absent.clear()

        monkeypatch.setattr(Path, "mkdir", mkdir)

    def lexists(self, path: Path) -> bool:
        if str(path) in self._absent:
            return False
        self.asked += 1
        found = self._really(path)
        if not found:
            self._absent.add(str(path))
        return found


def test_what_another_host_has_made_is_seen_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    client, path = Client(monkeypatch), tmp_path / "step-00000200"
    assert not client.lexists(path)
    os.mkdir(path)  # by another host: the client here does not hear of it
    assert not client.lexists(path)
    began = time.monotonic()
    assert await_name(path) and time.monotonic() - began < 1.0
    assert os.listdir(tmp_path) == ["step-00000200"] and client.asked == 2


def test_a_run_that_another_host_has_made_is_seen_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    client, path = Client(monkeypatch), tmp_path / "run"
    assert not client.lexists(path) and not client.lexists(path / "run.json")
    os.mkdir(path)  # by another host
    (path / "run.json").touch()
    began = time.monotonic()
    await_run(path)
    assert client.lexists(path) and client.lexists(path / "run.json") and time.monotonic() - began < 1.0


def test_hosts_without_a_file_system_in_common_hear_so_soon(tmp_path: Path) -> None:
    """Whoever may write beside the run knows what the server says; an absent folder above may be remembered."""
    asked: list[float] = []
    with patch.object(looking_again, "await_name", lambda path, seconds=0.0: asked.append(seconds)):
        await_run(tmp_path / "run")
        await_run(tmp_path / "runs" / "run")
    assert asked == [looking_again.ASKED_SECONDS, looking_again.PATIENCE_SECONDS]


def test_what_comes_late_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "late"
    threading.Timer(0.3, path.touch).start()
    assert await_name(path)


def test_what_does_not_come_is_not_waited_for_longer(tmp_path: Path) -> None:
    began = time.monotonic()
    assert not await_name(tmp_path / "none", 0.3) and 0.3 <= time.monotonic() - began < 5.0
    assert not await_name(tmp_path / "none", 0.0) and not await_name(tmp_path / "no" / "parent", 0.0)
    assert os.listdir(tmp_path) == []


def test_nothing_is_written_where_the_name_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise AssertionError(path)

    (tmp_path / "there").touch()
    monkeypatch.setattr(Path, "mkdir", refuse)
    assert await_name(tmp_path / "there")


def test_who_may_not_write_waits_for_what_the_client_does_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    threading.Timer(0.2, (tmp_path / "late").touch).start()
    assert await_name(tmp_path / "late")
