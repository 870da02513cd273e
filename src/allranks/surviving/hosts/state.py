"""The state of torch's rendezvous as JSON, in which no host's clock is compared with another's.

torch keeps the wall-clock time of each host's last sign of life, and takes hosts whose clock is late for dead. Here a
sign of life is a number that rises; when it last rose is a matter of the reader's own monotonic clock. A deadline
travels as the seconds that were left when it was set.

    {"version", "round", "complete", "closed", "deadline": null | {"id", "seconds"},
     "participants": [[node, rank], ...], "waiting": [node, ...], "spare": [node, ...], "beats": [[node, number], ...]}

A node is [name, pid, number in that process].
"""

import secrets
import time
from datetime import UTC, datetime, timedelta
from typing import final

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from allranks.surviving.hosts.seal import Json


@final
class StateReader:
    """Translates for one host: it remembers when it has seen which sign of life."""

    def __init__(self) -> None:
        self._beats: dict[_NodeDesc, tuple[int, float]] = {}  # the number, and when it rose, on the monotonic clock
        self._handed: dict[_NodeDesc, datetime] = {}  # what the handler was told of it
        self._deadline: tuple[str, datetime] | None = None

    def read(self, value: Json) -> _RendezvousState:
        """torch's state from JSON whose seal was found right."""
        state = _RendezvousState()
        state.round, state.complete, state.closed = value["round"], value["complete"], value["closed"]
        state.participants = {_node(node): rank for node, rank in value["participants"]}
        state.wait_list = {_node(node) for node in value["waiting"]}
        state.redundancy_list = {_node(node) for node in value["spare"]}
        state.deadline = self._read_deadline(value["deadline"])
        state.last_heartbeats = {_node(node): self._last_seen(_node(node), beat) for node, beat in value["beats"]}
        self._handed = dict(state.last_heartbeats)
        return state

    def _last_seen(self, node: _NodeDesc, beat: int) -> datetime:
        known = self._beats.get(node)
        if known is None or known[0] != beat:
            known = self._beats[node] = (beat, time.monotonic())
        return datetime.now(UTC) - timedelta(seconds=time.monotonic() - known[1])

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
            "participants": [[_listed(node), rank] for node, rank in sorted(state.participants.items())],
            "waiting": [_listed(node) for node in sorted(state.wait_list)],
            "spare": [_listed(node) for node in sorted(state.redundancy_list)],
            "beats": [[_listed(node), self._beat(node, when)] for node, when in sorted(state.last_heartbeats.items())],
        }

    def _beat(self, node: _NodeDesc, when: datetime) -> int:
        """The number for this sign of life: the next one where torch has set another time than it was told."""
        number = self._beats[node][0] if node in self._beats else 0
        return number if self._handed.get(node) == when else number + 1

    def _write_deadline(self, deadline: datetime | None) -> Json:
        if deadline is None:
            return None
        left = (deadline - datetime.now(UTC)).total_seconds()
        if self._deadline is not None and self._deadline[1] == deadline:
            return {"id": self._deadline[0], "seconds": left}
        return {"id": secrets.token_hex(4), "seconds": left}


def _node(listed: Json) -> _NodeDesc:
    name, pid, number = listed
    return _NodeDesc(str(name), int(pid), int(number))


def _listed(node: _NodeDesc) -> Json:
    return [node.addr, node.pid, node.local_id]
