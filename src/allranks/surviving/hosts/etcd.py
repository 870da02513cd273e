"""etcd's keys, transactions and leases over its JSON gateway (API v3): plain HTTP, a connection for each call.

https://etcd.io/docs/v3.4/dev-guide/api_grpc_gateway/: keys and values are base64, 64-bit numbers are strings, and what
is 0 or empty is left out of answers. A connection for each call outlives every restart of the server.
"""

import base64
import http.client
import io
import json
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast, final

MOST_BYTES = 1 << 22  # of an answer; etcd itself refuses requests above 1.5 MiB
# gRPC's "invalid argument", "permission denied", "unimplemented", "unauthenticated". Whatever else etcd says may be
# over soon: "canceled" to who asks while it is shut down, "resource exhausted" to all when too many ask.
FOR_GOOD = (3, 7, 12, 16)
NOT_FOUND = 5  # gRPC's, of a lease
TLS_ALERT = b"\x15\x03"
TLS_ONLY = "it speaks TLS only"
LEASE_GONE = "the lease that its hosts kept alive has ended"

Json = dict[str, Any]
Address = tuple[str, int]


class EtcdError(Exception):
    """etcd refuses, and would again; one line."""


class EtcdSilentError(EtcdError):
    """Nobody answers, or only that it cannot now; one line."""


class LeaseGoneError(EtcdError):
    """A lease has ended, and with it all that it held."""


@final
@dataclass(frozen=True, slots=True)
class Found:
    """What stands under a key.

    Attributes:
        text: it.
        created: etcd's revision at which the key came to be: no two lives of a key have the same.
        lease: with which it ends; 0: with none.
    """

    text: str
    created: int
    lease: int


def is_absent(key: str) -> Json:
    """The condition that nothing stands under a key."""
    return was_created(key, 0)


def was_created(key: str, revision: int) -> Json:
    """The condition that a key stands there since this revision."""
    return {"key": _encode(key), "target": "CREATE", "result": "EQUAL", "create_revision": str(revision)}


def stands(key: str, text: str) -> Json:
    """The condition that this text stands under a key."""
    return {"key": _encode(key), "target": "VALUE", "result": "EQUAL", "value": _encode(text)}


@final
class Etcd:
    """A server, or the members of a cluster. Every method raises EtcdSilentError and EtcdError."""

    def __init__(self, addresses: Sequence[Address], call_seconds: float) -> None:
        """Ask the first address, and the one after it when that one does not answer.

        Args:
            addresses: numbers and ports: a name's look-up has no limit.
            call_seconds: the limit of a whole call.
        """
        self._addresses, self._call_seconds = list(addresses), call_seconds
        self._at = 0

    def version(self) -> str:
        """The server's, such as "3.4.23"."""
        return str(self._request("GET", "/version").get("etcdserver", ""))

    def read(self, key: str) -> Found | None:
        """What stands under a key, as of after all changes made before the call; None: nothing."""
        return _found(self._request("POST", "/v3/kv/range", {"key": _encode(key)}))

    def put(self, key: str, text: str, lease: int, conditions: Sequence[Json] = ()) -> tuple[bool, Found | None]:
        """Put it there, for as long as the lease lasts, if all conditions hold: whether they did; what stands there."""
        change = {"key": _encode(key), "value": _encode(text), "lease": str(lease)}
        look = {"request_range": {"key": _encode(key)}}
        transaction = {"compare": list(conditions), "success": [{"request_put": change}, look], "failure": [look]}
        answer = self._request("POST", "/v3/kv/txn", transaction)
        return bool(answer.get("succeeded")), _found(answer["responses"][-1]["response_range"])

    def grant(self, seconds: int) -> int:
        """A new lease of so many seconds; the server may make it longer."""
        return int(self._request("POST", "/v3/lease/grant", {"TTL": str(seconds)})["ID"])

    def keep_alive(self, lease: int) -> None:
        """Let the lease last as long as when it was granted, from now on. Raises LeaseGoneError."""
        answer = self._request("POST", "/v3/lease/keepalive", {"ID": str(lease)})
        if int(answer.get("result", {}).get("TTL", 0)) <= 0:
            raise LeaseGoneError(LEASE_GONE)

    def revoke(self, lease: int) -> None:
        """End a lease and all that it holds; one that has ended is fine."""
        try:
            self._request("POST", "/v3/lease/revoke", {"ID": str(lease)})
        except LeaseGoneError:
            return

    def _request(self, method: str, path: str, body: Json | None = None) -> Json:
        at = self._at
        try:
            return self._ask(self._addresses[at], method, path, body)
        except EtcdSilentError:
            self._at = (at + 1) % len(self._addresses)
            raise

    def _ask(self, address: Address, method: str, path: str, body: Json | None) -> Json:
        text = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: etcd\r\nConnection: close\r\nContent-Type: application/json\r\n"
        try:
            received = _exchange(
                address, f"{head}Content-Length: {len(text)}\r\n\r\n".encode() + text, self._call_seconds
            )
            if received.startswith(TLS_ALERT):
                raise EtcdError(TLS_ONLY)
            response = http.client.HTTPResponse(cast(socket.socket, _Received(received)))
            response.begin()
            data = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise EtcdSilentError(_words(error)) from error
        try:
            answer = json.loads(data)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            if b"HTTPS server" in data:
                raise EtcdError(TLS_ONLY)
            raise EtcdSilentError(f"HTTP {response.status} and no JSON at {path}: {data[:60]!r}")
        if response.status != http.client.OK or "error" in answer:
            raise _refusal(answer)
        return answer


@final
class _Received:
    """What http.client takes for a socket: all that came."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, mode: str) -> io.BytesIO:
        """The bytes as a file."""
        return io.BytesIO(self._data)


def _exchange(address: Address, request: bytes, seconds: float) -> bytes:
    """All that is answered until the connection is closed. One limit holds for everything, however slowly it comes."""
    deadline = time.monotonic() + seconds
    with socket.create_connection(address, seconds) as connection:
        connection.settimeout(_left(deadline))
        connection.sendall(request)
        received = bytearray()
        while True:
            connection.settimeout(_left(deadline))
            chunk = connection.recv(1 << 16)
            if not chunk:
                return bytes(received)
            received += chunk
            if len(received) > MOST_BYTES:
                raise http.client.HTTPException("an answer without end")


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


def _found(answer: Json) -> Found | None:
    kvs = answer.get("kvs", ())
    if not kvs:
        return None
    text = base64.b64decode(kvs[0].get("value", "")).decode("utf-8", "replace")
    return Found(text, int(kvs[0]["create_revision"]), int(kvs[0].get("lease", 0)))


def _encode(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _refusal(answer: Json) -> EtcdError:
    """What an error of the gateway means: `error` is a text, or for streams an object with the same members."""
    told = answer["error"] if isinstance(answer.get("error"), dict) else answer
    code = told.get("code", told.get("grpc_code"))
    words = str(told.get("message") or told.get("error")).partition("\n")[0]
    if code == NOT_FOUND:
        return LeaseGoneError(LEASE_GONE)
    return EtcdError(f"it refuses: {words}") if code in FOR_GOOD else EtcdSilentError(words)


def _words(error: Exception) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(text).partition("\n")[0]
