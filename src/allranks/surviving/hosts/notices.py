"""What hosts tell each other besides the state of the rendezvous: sealed JSON, each under a key of its own."""

from typing import final

from allranks.surviving.hosts.meeting import MeetingStore
from allranks.surviving.hosts.seal import Json, Seal


@final
class Notices:
    """A board in the meeting store. Every method raises StoreLostError, and SealError for what no host has written."""

    def __init__(self, meeting: MeetingStore, seal: Seal) -> None:
        self._meeting = meeting
        self._seal = seal

    def post(self, key: str, value: Json) -> None:
        """Put it up; what stood under `key` goes."""
        self._meeting.write(key, self._seal.close(key, value))

    def post_first(self, key: str, value: Json) -> Json:
        """Put it up where nobody else has; what stands there then."""
        return self._seal.open(key, self._meeting.exchange(key, "", self._seal.close(key, value)))

    def read(self, key: str) -> Json | None:
        """What is up under `key`, or None."""
        sealed = self._meeting.read(key)
        return None if sealed is None else self._seal.open(key, sealed)
