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
from allranks.surviving.hosts.patience import Patience
from allranks.surviving.hosts.place import StoreLostError
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
        quick = Etcd([("127.0.0.1", server.port)], 0.5)
        server.signal(signal.SIGSTOP)
        wait_until(server.stands_still)
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
        yield Etcd([("127.0.0.1", server.server_port)], 0.5)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("status", "body", "kind", "said"),
    [
        (503, {"error": "etcdserver: no leader", "code": 14}, EtcdSilentError, "no leader"),
        (504, {"message": "context deadline exceeded", "code": 4}, EtcdSilentError, "deadline"),
        (408, {"error": "grpc: the client connection is closing", "code": 1}, EtcdSilentError, "is closing"),
        (200, {"error": {"grpc_code": 1, "message": "is closing"}}, EtcdSilentError, "is closing"),
        (429, {"error": "etcdserver: too many requests", "code": 8}, EtcdSilentError, "too many"),
        (500, {"error": "without a code"}, EtcdSilentError, "without a code"),
        (403, {"error": "etcdserver: permission denied", "code": 7}, EtcdError, "refuses: etcdserver: permission"),
        (401, {"error": "etcdserver: invalid auth token", "code": 16}, EtcdError, "refuses: etcdserver: invalid auth"),
        (501, {"error": "Not Implemented", "code": 12}, EtcdError, "refuses: Not Implemented"),
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


def test_the_limit_holds_for_a_whole_call_however_slowly_the_answer_comes() -> None:
    with answering(200, b" " * 100, pause=0.2) as etcd:  # 20 s in all
        began = time.monotonic()
        with pytest.raises(EtcdSilentError, match="timed out"):
            etcd.version()
        assert time.monotonic() - began < 10


def test_an_answer_without_end_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allranks.surviving.hosts.etcd.MOST_BYTES", 1000)
    with answering(200, b" " * 2000) as etcd, pytest.raises(EtcdSilentError, match="without end"):
        etcd.version()


@pytest.mark.parametrize(
    "said", [b"\x15\x03\x01\x00\x02\x02\x16", b"Client sent an HTTP request to an HTTPS server.\n"]
)
def test_who_speaks_tls_only_is_refused_for_good(said: bytes) -> None:
    class Handler(BaseHTTPRequestHandler):
        def handle(self) -> None:
            self.rfile.readline()
            self.wfile.write(said if said.startswith(b"\x15") else b"HTTP/1.0 400 Bad Request\r\n\r\n" + said)

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        with pytest.raises(EtcdError, match="it speaks TLS only") as caught:
            Etcd([("127.0.0.1", server.server_port)], 2.0).version()
        thread.join()
    assert not isinstance(caught.value, EtcdSilentError)


def test_another_member_is_asked_when_one_does_not_answer() -> None:
    with answering(200, b'{"etcdserver": "3.5.1"}') as live:
        (there,) = live._addresses
        both = Etcd([("127.0.0.1", free_port()), there], 0.5)
        with pytest.raises(EtcdSilentError, match="refused"):
            both.version()
        assert both.version() == both.version() == "3.5.1"


@pytest.mark.full
@needs_etcd
def test_an_etcd_that_is_shut_down_and_started_under_load_refuses_nobody(tmp_path: Path) -> None:
    with etcd_server(tmp_path) as server:
        lease, over, lost = server.client.grant(120), threading.Event(), list[str]()

        def ask(number: int) -> None:
            patience, etcd = Patience(30.0), Etcd([("127.0.0.1", server.port)], 2.0)
            try:
                while not over.is_set():
                    patience.call(etcd.put, f"key/{number}", "x", lease)
                    patience.call(etcd.keep_alive, lease)
            except StoreLostError as error:
                lost.append(str(error))

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for _ in range(4):
            time.sleep(0.7)
            server.signal(signal.SIGTERM)
            server.start()
        over.set()
        for thread in threads:
            thread.join()
        assert lost == []
