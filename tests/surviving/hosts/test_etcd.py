"""The client of etcd's JSON gateway, before a real etcd; what no real one says, a small HTTP server says."""

import json
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from allranks.surviving.hosts.etcd import (
    Etcd,
    EtcdError,
    EtcdSilentError,
    LeaseGoneError,
    is_absent,
    stands,
    was_created,
)
from tests.etcd_server import etcd_server, needs_etcd
from tests.free_port import free_port
from tests.processes import wait_until


@needs_etcd
def test_keys_conditions_and_leases(tmp_path: Path) -> None:
    with etcd_server(tmp_path) as server:
        etcd = server.client
        assert etcd.version().startswith("3.") and etcd.read("a/key") is None
        lease = etcd.grant(60)
        changed, first = etcd.put("a/key", "ä\n1", lease, [is_absent("a/key")])
        assert changed and first is not None and first == etcd.read("a/key") and first.text == "ä\n1"
        assert etcd.put("a/key", "2", lease, [is_absent("a/key")]) == (False, first)
        assert etcd.put("a/key", "2", lease, [stands("a/key", "other")]) == (False, first)
        changed, second = etcd.put("a/key", "2", lease, [stands("a/key", first.text)])
        assert changed and second is not None and (second.text, second.created) == ("2", first.created)
        both = [stands("a/key", "2"), was_created("a/key", first.created + 1)]
        assert etcd.put("a/key", "3", lease, both) == (False, second), "all conditions have to hold"
        etcd.keep_alive(lease)
        etcd.revoke(lease)
        assert etcd.read("a/key") is None, "what a lease holds goes with it"
        etcd.revoke(lease)
        with pytest.raises(LeaseGoneError):
            etcd.keep_alive(lease)
        with pytest.raises(LeaseGoneError):
            etcd.put("a/key", "4", lease)
        _, again = etcd.put("a/key", "", etcd.grant(60))
        assert again is not None and again.text == "" and again.created > first.created, "another life of the key"
        with pytest.raises(EtcdError, match=r"it refuses: .*too large") as caught:
            etcd.put("a/key", "x" * 2_000_000, 0)
        assert not isinstance(caught.value, EtcdSilentError)


@needs_etcd
def test_a_server_that_says_nothing_and_one_that_is_gone(tmp_path: Path) -> None:
    with etcd_server(tmp_path) as server:
        quick = Etcd("127.0.0.1", server.port, 0.5)
        server.signal(signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(EtcdSilentError, match="timed out"):
            quick.read("key")
        assert time.monotonic() - began < 30
        server.signal(signal.SIGCONT)
        wait_until(server.answers)
        server.signal(signal.SIGKILL)
        with pytest.raises(EtcdSilentError, match="refused"):
            quick.read("key")


@contextmanager
def answering(status: int, body: bytes, pause: float = 0.0) -> Iterator[Etcd]:
    """A client of a server that says the same to everything, `pause` seconds between two bytes of it."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            for byte in body if pause else ():
                time.sleep(pause)
                self.wfile.write(bytes([byte]))
            self.wfile.write(b"" if pause else body)

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    server = HTTPServer(("127.0.0.1", free_port()), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield Etcd("127.0.0.1", server.server_port, 0.5)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("status", "body", "kind", "said"),
    [
        (503, {"error": "etcdserver: no leader", "code": 14}, EtcdSilentError, "no leader"),
        (504, {"message": "context deadline exceeded", "code": 4}, EtcdSilentError, "deadline"),
        (400, {"error": "etcdserver: user name is empty", "code": 3}, EtcdError, "refuses: etcdserver: user name"),
        (
            200,
            {"error": {"grpc_code": 5, "message": "lease not found"}},
            LeaseGoneError,
            "the lease that its hosts kept alive has ended",
        ),
    ],
)
def test_refusals_for_a_while_and_for_good(status: int, body: object, kind: type[EtcdError], said: str) -> None:
    with answering(status, json.dumps(body).encode()) as etcd, pytest.raises(EtcdError, match=said) as caught:
        etcd.read("key")
    assert type(caught.value) is kind and "\n" not in str(caught.value)


@pytest.mark.parametrize("body", [b"<html>\nhello</html>", b"[1]", b"\xff"])
def test_what_is_no_etcd_is_told_by_what_it_says(body: bytes) -> None:
    with answering(404, body) as etcd, pytest.raises(EtcdSilentError, match="HTTP 404 and no JSON") as caught:
        etcd.version()
    assert "\n" not in str(caught.value)


def test_an_answer_without_end_is_none() -> None:
    with answering(200, b" " * 10, pause=0.2) as etcd, pytest.raises(EtcdSilentError, match="without end"):
        etcd.version()
