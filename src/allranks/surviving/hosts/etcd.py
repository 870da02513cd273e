"""etcd's keys, transactions and leases over its JSON gateway (API v3): plain HTTP, a connection for each call.

https://etcd.io/docs/v3.4/dev-guide/api_grpc_gateway/: keys and values are base64, 64-bit numbers are strings, and what
is 0 or empty is left out of answers. A connection for each call outlives every restart of the server.
"""

import base64
import http.client
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

MOST_BYTES = 1 << 22  # of an answer; etcd itself refuses requests above 1.5 MiB
FOR_A_WHILE = (4, 14)  # gRPC's "deadline exceeded" and "unavailable": no leader, leader changed, timed out
NOT_FOUND = 5  # gRPC's, of a lease
LEASE_GONE = "the lease that its hosts kept alive has ended"

Json = dict[str, Any]


class EtcdError(Exception):
    """etcd refuses, and would again; one line."""


class EtcdSilentError(EtcdError):
    """Nobody answers, or only that it cannot now; one line."""


class LeaseGoneError(EtcdError):
    """A lease has ended, and with it all that it held."""


@final
@dataclass(frozen=True, slots=True)
class Found:
    """What stands under a key, and etcd's revision at which the key came to be: no two lives of a key have the same."""

    text: str
    created: int


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
    """A server. Every method raises EtcdSilentError and EtcdError."""

    def __init__(self, host: str, port: int, call_seconds: float) -> None:
        """`call_seconds`: the limit of each wait for the network, and of an answer."""
        self._host, self._port, self._call_seconds = host, port, call_seconds

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
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._call_seconds)
        try:
            text = None if body is None else json.dumps(body)
            connection.request(method, path, text, {"Content-Type": "application/json"})
            response = connection.getresponse()
            data = _read(response, time.monotonic() + self._call_seconds)
        except (OSError, http.client.HTTPException) as error:
            raise EtcdSilentError(_words(error)) from error
        finally:
            connection.close()
        try:
            answer = json.loads(data)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise EtcdSilentError(f"HTTP {response.status} and no JSON at {path}: {data[:60]!r}")
        if response.status != http.client.OK or "error" in answer:
            raise _refusal(answer)
        return answer


def _read(response: http.client.HTTPResponse, deadline: float) -> bytes:
    data = b""
    while chunk := response.read1(MOST_BYTES):
        data += chunk
        if len(data) > MOST_BYTES or time.monotonic() > deadline:
            raise http.client.HTTPException("an answer without end")
    return data


def _found(answer: Json) -> Found | None:
    kvs = answer.get("kvs", ())
    if not kvs:
        return None
    text = base64.b64decode(kvs[0].get("value", "")).decode("utf-8", "replace")
    return Found(text, int(kvs[0]["create_revision"]))


def _encode(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _refusal(answer: Json) -> EtcdError:
    """What an error of the gateway means: `error` is a text, or for streams an object with the same members."""
    told = answer["error"] if isinstance(answer.get("error"), dict) else answer
    code = told.get("code", told.get("grpc_code"))
    words = str(told.get("message") or told.get("error")).partition("\n")[0]
    if code in FOR_A_WHILE:
        return EtcdSilentError(words)
    return LeaseGoneError(LEASE_GONE) if code == NOT_FOUND else EtcdError(f"it refuses: {words}")


def _words(error: Exception) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(text).partition("\n")[0]
