"""Presence: which hosts live, as the signs of life in the state of the rendezvous tell one of them."""

import time
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import final

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from allranks.surviving.hosts.state import StateReader

SUSPECT_SECONDS = 3.0  # without a sign of life, where workers have lost a peer: that long, and its host is lost


@final
class Presence:
    """One host's view of it.

    Attributes:
        state: of the rendezvous, as it was last read or written here.
        lost: the hosts of the round under way that have gone without a word, all of them, by the last look for such.
    """

    def __init__(self, seconds: float, reader: StateReader) -> None:
        """`seconds`: without a sign of life for so long a host is silent; `reader`: hands the state to torch."""
        self.state = _RendezvousState()
        self.lost: frozenset[_NodeDesc] = frozenset()
        self._seconds = seconds
        self._reader = reader
        self._lived_at: dict[_NodeDesc, float] = {}

    def begin_round(self, members: Iterable[_NodeDesc]) -> None:
        """A round of these hosts begins, all of which live."""
        self._lived_at, self.lost = dict.fromkeys(members, time.monotonic()), frozenset()

    def await_survivors(self, node: _NodeDesc, members: Iterable[_NodeDesc]) -> None:
        """The next round begins as soon as the last one's hosts that live are there, and those that wait to join.

        Args:
            node: this host.
            members: of the last round; none: it is this host's first one, and begins after a last call.
        """
        known = tuple(members)
        here = {node, *self.living(known), *self.waiting()}
        self._reader.awaited = frozenset(here) if known else frozenset()

    def is_beside(self, node: _NodeDesc) -> bool:
        """Whether a round is under way without it."""
        return self.state.complete and node not in self.state.participants

    def is_silent(self, node: _NodeDesc) -> bool:
        """Whether a host is taken for lost by its silence."""
        return self._is_silent_for(node, self._seconds)

    def suspect(self, node: _NodeDesc) -> bool:
        """Whether a host, with which workers have lost their connection, is silent for as long as that takes.

        Then it is taken for lost at once, until it gives another sign of life.
        """
        if not self._is_silent_for(node, min(SUSPECT_SECONDS, self._seconds)):
            return False
        self._reader.take_for_lost(node)
        return True

    def _is_silent_for(self, node: _NodeDesc, seconds: float) -> bool:
        last = self.state.last_heartbeats.get(node)
        if last is None or self._reader.is_taken_for_lost(node):
            return True  # the state may have been read before it was: the next round shall not await it
        return datetime.now(UTC) - last > timedelta(seconds=seconds)

    def living(self, nodes: Iterable[_NodeDesc]) -> set[_NodeDesc]:
        """Those of the hosts that are not silent."""
        return {node for node in nodes if not self.is_silent(node)}

    def waiting(self) -> set[_NodeDesc]:
        """The living hosts that wait for the next round, with room or without."""
        return self.living({*self.state.wait_list, *self.state.redundancy_list})

    def gone(self, members: Iterable[_NodeDesc]) -> dict[_NodeDesc, float]:
        """Members of a round that have left it or are silent -> how many seconds ago they were last seen to live."""
        nodes, now = tuple(members), time.monotonic()
        living = self.living(nodes)
        self._lived_at |= dict.fromkeys(living, now)
        left = [node for node in nodes if node not in self.state.participants or node not in living]
        return {node: now - self._lived_at.get(node, now) for node in left}
