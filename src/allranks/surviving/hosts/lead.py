"""Who leads: the host whose sealed word stands in the meeting place."""

import secrets
from typing import final

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc

from allranks.surviving.hosts.place import MeetingPlace
from allranks.surviving.hosts.seal import Seal
from allranks.surviving.hosts.state import list_node, read_node

KEY = "leader"  # of the seal


@final
class Lead:
    """One host's view of it.

    Attributes:
        held: whether this host has led when it last looked.
    """

    def __init__(self, meeting: MeetingPlace, seal: Seal, node: _NodeDesc) -> None:
        self.held = False
        self._meeting = meeting
        self._seal = seal
        self._word = seal.close(KEY, {"node": list_node(node), "token": secrets.token_hex(8)})
        self._found: tuple[_NodeDesc, str] | None = None

    def seek(self) -> _NodeDesc | None:
        """The node of who leads: this host's, where nobody did and it can; None: nobody yet.

        Raises:
            StoreLostError, SealError
        """
        word = self._meeting.claim(self._word)
        self.held = word == self._word
        self._found = None if word is None else (read_node(self._seal.open(KEY, word)["node"]), word)
        return None if self._found is None else self._found[0]

    def take_for_lost(self, node: _NodeDesc) -> None:
        """Let another host lead at once, where `node` did when this one last looked. Raises StoreLostError."""
        if self._found is not None and self._found[0] == node and not self.held:
            self._meeting.depose(self._found[1])
