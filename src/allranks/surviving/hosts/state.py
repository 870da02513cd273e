"""The state of torch's rendezvous as JSON, in which no host's clock is compared with another's.

torch keeps the wall-clock time of each host's last sign of life, and takes hosts whose clock is late for dead. Here a
sign of life is a number that rises; when it last rose is a matter of the reader's own monotonic clock. A deadline
travels as the seconds that were left when it was set. What a host knows better than its silence or a deadline tell, it
tells its torch as a time that is long past: torch then does what it does for those.

    {"version", "round", "complete", "closed", "deadline": null | {"id", "seconds"},
     "participants": [[node, rank], ...], "waiting": [node, ...], "spare": [node, ...], "beats": [[node, number], ...]}

A node is [name, pid, number]. The number is drawn (handler.py): a container that starts again under the same name and
pid is another node, whose signs of life are others.
"""

import secrets
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import final

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from allranks.surviving.hosts.seal import Json

LONG_AGO = datetime.fromtimestamp(0, UTC)


@final
class StateReader:
    """Translates for one host: it remembers when it has seen which sign of life.

    Attributes:
        awaited: when all of these hosts take part in a round that others may still join, it begins; empty: it does not.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: seconds that never go back, in which others could have given a sign of life."""
        self.awaited: frozenset[_NodeDesc] = frozenset()
        self._clock = clock
        self._lost: dict[_NodeDesc, int] = {}  # the number of the last sign of life
        self._beats: dict[_NodeDesc, tuple[int, float]] = {}  # the number, and when it rose, on the clock
        self._handed: dict[_NodeDesc, datetime] = {}  # what the handler was told of it
        self._deadline: tuple[str, datetime] | None = None

    def take_for_lost(self, node: _NodeDesc) -> None:
        """From now on this host is silent, until it gives one more sign of life."""
        if node in self._beats:
            self._lost[node] = self._beats[node][0]

    def is_taken_for_lost(self, node: _NodeDesc) -> bool:
        """Whether it is, and has given no other sign of life that was read here."""
        return node in self._lost and self._lost[node] == self._beats[node][0]

    def read(self, value: Json) -> _RendezvousState:
        """torch's state from JSON whose seal was found right."""
        state = _RendezvousState()
        state.round, state.complete, state.closed = value["round"], value["complete"], value["closed"]
        state.participants = {read_node(node): rank for node, rank in value["participants"]}
        state.wait_list = {read_node(node) for node in value["waiting"]}
        state.redundancy_list = {read_node(node) for node in value["spare"]}
        state.deadline = self._read_deadline(value["deadline"])
        if state.deadline is not None and self.awaited and self.awaited <= state.participants.keys():
            state.deadline = LONG_AGO
        state.last_heartbeats = {
            read_node(node): self._last_seen(read_node(node), beat) for node, beat in value["beats"]
        }
        self._handed = dict(state.last_heartbeats)
        return state

    def _last_seen(self, node: _NodeDesc, beat: int) -> datetime:
        known = self._beats.get(node)
        if known is None or known[0] != beat:
            known = self._beats[node] = (beat, self._clock())
        if self.is_taken_for_lost(node):
            return LONG_AGO
        return datetime.now(UTC) - timedelta(seconds=self._clock() - known[1])

    def _read_deadline(self, value: Json) -> datetime | None:
        if value is None:
            return None
        if self._deadline is None or self._deadline[0] != value["id"]:
            self._deadline = (value["id"], datetime.now(UTC) + timedelta(seconds=value["seconds"]))
        return self._deadline[1]

    def write(self, state: _RendezvousState, version: int) -> Json:
        """JSON from the state that torch has changed since it was last read here."""
        return {
            "version": version,
            "round": state.round,
            "complete": state.complete,
            "closed": state.closed,
            "deadline": self._write_deadline(state.deadline),
            "participants": [[list_node(node), rank] for node, rank in sorted(state.participants.items())],
            "waiting": [list_node(node) for node in sorted(state.wait_list)],
            "spare": [list_node(node) for node in sorted(state.redundancy_list)],
            "beats": [
                [list_node(node), self._beat(node, when)] for node, when in sorted(state.last_heartbeats.items())
            ],
        }

    def _beat(self, node: _NodeDesc, when: datetime) -> int:
        """The number for this sign of life: the next one where torch has set another time than it was told."""
        number = self._beats[node][0] if node in self._beats else 0
        return number if self._handed.get(node) == when else number + 1

    def _write_deadline(self, deadline: datetime | None) -> Json:
        if deadline is None:
            return None
        if deadline == LONG_AGO and self._deadline is not None:
            deadline = self._deadline[1]
        left = (deadline - datetime.now(UTC)).total_seconds()
        if self._deadline is not None and self._deadline[1] == deadline:
            return {"id": self._deadline[0], "seconds": left}
        return {"id": secrets.token_hex(4), "seconds": left}


def read_node(listed: Json) -> _NodeDesc:
    """A node from what `list_node` made of it."""
    name, pid, number = listed
    return _NodeDesc(str(name), int(pid), int(number))


def list_node(node: _NodeDesc) -> Json:
    """A node as JSON."""
    return [node.addr, node.pid, node.local_id]
