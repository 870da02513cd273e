"""The backend under torch's rendezvous: its state as sealed JSON, changed by compare-and-set.

torch's own backend unpickles what it reads from the network, so that whoever reaches its port runs code on every host.
Here torch is handed only pickles that this process has made, from JSON whose seal was right.
"""

import pickle
from collections.abc import Callable
from typing import final

from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token, _RendezvousState

from allranks.surviving.hosts.place import MeetingPlace, StoreLostError
from allranks.surviving.hosts.seal import Seal, SealError
from allranks.surviving.hosts.state import StateReader

KEY = "rendezvous"


@final
class SealedBackend(RendezvousBackend):
    """The state under one key of the meeting place. A version that went back is refused: somebody replays it.

    Attributes:
        reader: translates it for this host.
    """

    def __init__(self, meeting: MeetingPlace, seal: Seal, on_state: Callable[[_RendezvousState], None]) -> None:
        """`on_state` sees every state that is read or written; what it raises ends the rendezvous."""
        self._meeting = meeting
        self._seal = seal
        self.reader = StateReader(meeting.clock)
        self._version = 0
        self._on_state = on_state

    @property
    def name(self) -> str:
        """The name in torchelastic's events."""
        return "allranks"

    def get_state(self) -> tuple[bytes, Token] | None:
        """The state as bytes that this process has pickled, and the text that stands for it."""
        try:
            text = self._meeting.read(KEY)
        except StoreLostError as error:
            raise RendezvousConnectionError(str(error)) from error
        return None if text is None else (self._opened(text), text)

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """As the interface says: changes it where `token` still stands."""
        changed: _RendezvousState = pickle.loads(state)  # the handler's own bytes, of a moment ago
        wanted = self._seal.close(KEY, self.reader.write(changed, self._version + 1))
        try:
            found = self._meeting.exchange(KEY, token or "", wanted)
        except StoreLostError as error:
            raise RendezvousConnectionError(str(error)) from error
        return self._opened(found), found, found == wanted

    def _opened(self, text: str) -> bytes:
        try:
            value = self._seal.open(KEY, text)
        except SealError as error:
            raise RendezvousStateError(str(error)) from error
        if value["version"] < self._version:
            raise RendezvousStateError(
                f"what stands under {KEY} went back from version {self._version} to {value['version']}"
            )
        self._version = value["version"]
        state = self.reader.read(value)
        self._on_state(state)
        return pickle.dumps(state)
