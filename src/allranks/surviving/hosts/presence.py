"""Presence: which hosts live, as the signs of life in the state of the rendezvous tell one of them."""

import time
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import final

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState


@final
class Presence:
    """One host's view of it.

    Attributes:
        state: of the rendezvous, as it was last read or written here.
    """

    def __init__(self, seconds: float) -> None:
        """`seconds`: without a sign of life for so long a host is silent."""
        self.state = _RendezvousState()
        self._seconds = seconds
        self._lived_at: dict[_NodeDesc, float] = {}

    def begin_round(self, members: Iterable[_NodeDesc]) -> None:
        """A round of these hosts begins, all of which live."""
        self._lived_at = dict.fromkeys(members, time.monotonic())

    def is_silent(self, node: _NodeDesc) -> bool:
        """Whether a host is taken for lost by its silence."""
        last = self.state.last_heartbeats.get(node)
        return last is None or datetime.now(UTC) - last > timedelta(seconds=self._seconds)

    def living(self, nodes: Iterable[_NodeDesc]) -> set[_NodeDesc]:
        """Those of the hosts that are not silent."""
        return {node for node in nodes if not self.is_silent(node)}

    def gone(self, members: Iterable[_NodeDesc]) -> dict[_NodeDesc, float]:
        """Members of a round that have left it or are silent -> how many seconds ago they were last seen to live."""
        nodes, now = tuple(members), time.monotonic()
        living = self.living(nodes)
        self._lived_at |= dict.fromkeys(living, now)
        left = [node for node in nodes if node not in self.state.participants or node not in living]
        return {node: now - self._lived_at.get(node, now) for node in left}
