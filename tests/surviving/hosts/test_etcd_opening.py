"""How a host comes to a meeting in etcd: what it waits for, and which etcd is refused."""

import socket
import threading
from pathlib import Path

import pytest

from allranks.errors import ConfigError, ProcessError
from allranks.hosts_request import Endpoint
from allranks.surviving.hosts.etcd import Etcd
from allranks.surviving.hosts.etcd_opening import open_etcd_meeting
from tests.etcd_server import etcd_server, needs_etcd
from tests.free_port import free_port

SECRET = b"0123456789abcdef"


@needs_etcd
def test_an_etcd_that_asks_for_a_user_is_refused_at_once(tmp_path: Path) -> None:
    with etcd_server(tmp_path) as server:
        for path, body in (
            ("user/add", {"name": "root", "password": "x"}),
            ("user/grant", {"user": "root", "role": "root"}),
            ("enable", {}),
        ):
            Etcd([("127.0.0.1", server.port)], 60.0)._request("POST", f"/v3/auth/{path}", body)
        endpoint = Endpoint("127.0.0.1", server.port, "etcd", "run")
        with pytest.raises(ConfigError, match=r"it refuses: .*user name is empty; name one that .* asks for no user"):
            open_etcd_meeting(endpoint, SECRET, connect_seconds=5, seconds=30.0, tell=print)


@needs_etcd
def test_an_etcd_that_speaks_tls_only_is_refused(tmp_path: Path) -> None:
    with etcd_server(tmp_path, tls=True) as server:
        endpoint = Endpoint("127.0.0.1", server.port, "etcd", "run")
        with pytest.raises(ConfigError, match="speaks TLS only; name one that speaks plain HTTP"):
            open_etcd_meeting(endpoint, SECRET, connect_seconds=5, seconds=1.0, tell=print)


@needs_etcd
def test_an_old_etcd_is_refused_by_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with etcd_server(tmp_path) as server:
        endpoint = Endpoint("127.0.0.1", server.port, "etcd", "run")
        for version, said in (("3.3.27", "3.3.27"), ("2.3.8", "2.3.8"), ("", "unknown")):
            monkeypatch.setattr(Etcd, "version", lambda self, version=version: version)
            with pytest.raises(ConfigError, match=f"is of version {said}: at least 3.4 is needed"):
                open_etcd_meeting(endpoint, SECRET, connect_seconds=5, seconds=1.0, tell=print)
        for version in ("3.4.0", "3.10.1", "4.0.0"):
            monkeypatch.setattr(Etcd, "version", lambda self, version=version: version)
            open_etcd_meeting(endpoint, SECRET, connect_seconds=5, seconds=1.0, tell=print).close(over=True)


@needs_etcd
def test_any_member_will_do(tmp_path: Path) -> None:
    with etcd_server(tmp_path) as server:
        members = (("name.invalid", 1), ("127.0.0.1", server.port))
        endpoint = Endpoint("127.0.0.1", free_port(), "etcd", "run", members)
        found = open_etcd_meeting(endpoint, SECRET, connect_seconds=20, seconds=2.0, tell=print)
        assert found.claim("1") == "1" and found.address == "127.0.0.1"
        found.close(over=True)


def test_a_name_that_stands_for_no_address_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = Endpoint("127.0.0.1", listener.getsockname()[1], "etcd", "run")
        monkeypatch.setattr("allranks.surviving.hosts.etcd_opening._look_up", lambda place: [])
        with pytest.raises(ProcessError, match=f"{endpoint}: its name stands for no address any more"):
            open_etcd_meeting(endpoint, SECRET, connect_seconds=5.0, seconds=1.0, tell=print)


def test_nobody_there_and_another_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allranks.surviving.hosts.etcd_opening.PATIENCE_SECONDS", 0.2)
    heard: list[str] = []
    endpoint = Endpoint("127.0.0.1", free_port(), "etcd", "run")
    with pytest.raises(ProcessError, match=f"nobody listened at {endpoint} for 0.5 s.*refused.*start etcd"):
        open_etcd_meeting(endpoint, SECRET, connect_seconds=0.5, seconds=1.0, tell=heard.append)
    assert len(heard) == 1 and "waiting up to 0.5 s (guard.join_seconds) for etcd" in heard[0]
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        thread = threading.Thread(target=answer_like_ssh, args=(stranger,), daemon=True)
        thread.start()
        endpoint = Endpoint("127.0.0.1", stranger.getsockname()[1], "etcd", "run")
        with pytest.raises(ProcessError, match=f"what listens at {endpoint} does not answer as etcd does: no answer"):
            open_etcd_meeting(endpoint, SECRET, connect_seconds=5.0, seconds=1.0, tell=heard.append)
        stranger.shutdown(socket.SHUT_RDWR)
    thread.join()


def answer_like_ssh(listener: socket.socket) -> None:
    """Say hello to all, until the listener is closed."""
    while True:
        try:
            taken, _ = listener.accept()
        except OSError:
            return
        with taken:
            taken.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
