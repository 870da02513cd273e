"""MeetingPlace: where hosts meet, whoever keeps it: texts under keys, and one word of who leads."""

from abc import ABC, abstractmethod

from allranks.hosts_request import Endpoint


class StoreLostError(Exception):
    """What hosts tell each other by does not answer any more, or has shut this one out; the text says why."""


class MeetingPlace(ABC):
    """Every call has a limit, and raises StoreLostError beyond it.

    Attributes:
        endpoint: as the user gave it.
        scope: names this meeting among all that hosts with this secret have had, in every seal; "" before the greeting.
        address: where this host listens for the others when it leads, as a number.
        reached_at: where the others reach that.
        outlives_leader: whether hosts meet there still when the one that leads has gone.
    """

    endpoint: Endpoint
    scope: str
    address: str
    reached_at: str
    outlives_leader: bool

    @property
    @abstractmethod
    def stuck(self) -> bool:
        """Whether a thread still waits in a call: the process has to end without its destructors."""

    @abstractmethod
    def read(self, key: str) -> str | None:
        """What stands under `key`, or None."""

    @abstractmethod
    def write(self, key: str, text: str) -> None:
        """Put it there, whatever stood there."""

    @abstractmethod
    def exchange(self, key: str, expected: str, wanted: str) -> str:
        """Put `wanted` where `expected` stands ("": where nothing does); what stands there then."""

    @abstractmethod
    def claim(self, word: str) -> str | None:
        """Lead where nobody does, if this host can: the word of who leads, `word` where it is this host; or None."""

    @abstractmethod
    def depose(self, word: str) -> None:
        """Who leads by this word is lost: let it lead no more, so that another can; nothing where none could."""

    @abstractmethod
    def clock(self) -> float:
        """Monotonic seconds in which the keeper was there: in others nobody could have given a sign of life."""

    @abstractmethod
    def close(self, *, over: bool) -> None:
        """This host needs it no more, and does not lead any more; `over`: nobody does, the run has ended for all."""
