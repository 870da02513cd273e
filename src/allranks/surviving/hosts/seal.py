"""The seal on all that hosts tell each other: JSON behind an HMAC-SHA256 with the run's secret.

The text is `HMAC JSON`; the HMAC covers the key under which it stands, so that a true word cannot be moved elsewhere.
Nothing is parsed before its HMAC has been found right, and JSON runs no code.
"""

import hashlib
import hmac
import json
from typing import Any, final

Json = Any  # what json.loads gives
CONTEXT = b"allranks rendezvous 1\0"  # another protocol, or another version of this one, has other seals


class SealError(Exception):
    """What stands in the store was not written with this secret, or was altered; the text says where."""


@final
class Seal:
    """Signs and checks with one secret.

    A word of one `scope` is none of another: where a keeper outlives a run, nobody can say again what its hosts once
    said.
    """

    def __init__(self, secret: bytes, scope: str = "") -> None:
        self._secret = secret
        self._place = f"{scope}/" if scope else ""

    def close(self, key: str, value: Json) -> str:
        """The text that says `value` under `key`."""
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return f"{self._sign(key, text)} {text}"

    def open(self, key: str, sealed: str) -> Json:
        """What the text under `key` says. Raises SealError."""
        signature, _, text = sealed.partition(" ")
        if not hmac.compare_digest(signature.encode(), self._sign(key, text).encode()):
            raise SealError(f"what stands under {key} is not signed with this run's secret")
        return json.loads(text)

    def _sign(self, key: str, text: str) -> str:
        return hmac.new(self._secret, CONTEXT + f"{self._place}{key}\0{text}".encode(), hashlib.sha256).hexdigest()
