"""Who sits where in a round: each host says how many workers it has, and the leader opens the store where they meet."""

import socket
from collections import Counter
from collections.abc import Callable, Sequence
from ipaddress import ip_address
from typing import final

import psutil
from torch._C._distributed_c10d import Store
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc

from allranks.errors import LayoutError
from allranks.parallel.store import listen, serve
from allranks.surviving.hosts.meeting import STORE_TIMEOUT
from allranks.surviving.hosts.notices import Notices
from allranks.surviving.hosts.place import MeetingPlace
from allranks.surviving.hosts.seal import Json
from allranks.surviving.hosts.table import Table, host_of, key_of

Nodes = tuple[_NodeDesc, ...]
Seat = Callable[[Sequence[int]], tuple[int, ...]]
"""How many workers of each host train, by how many each has; LayoutError: they are too few."""
FAMILIES = (socket.AF_INET, socket.AF_INET6)


def own_addresses() -> list[str]:
    """Of the networks that this host is on, but for its own loopback and what holds on one wire alone; [] where the
    kernel does not tell.
    """
    try:
        told = [one for found in psutil.net_if_addrs().values() for one in found]
        parsed = [ip_address(one.address.partition("%")[0]) for one in told if one.family in FAMILIES]
    except (OSError, ValueError):
        return []
    return [str(one) for one in parsed if not (one.is_loopback or one.is_link_local)]


@final
class Seating:
    """One host's part in it. The workers' store is new for each round: none finds the address of a dead one there.

    Attributes:
        attempt: the leader's: which attempt of the run a round is.
        doubts: the leader's: whether hosts that have sat together may not reach each other any more.
        seat: the leader's: who of those that are there has a place; all, unless a number of hosts may change.
        short: why there are too few for a round, as the leader has found; "": they are not.
    """

    def __init__(self, meeting: MeetingPlace, notices: Notices, node: _NodeDesc, nproc: int) -> None:
        self._meeting = meeting
        self._notices = notices
        self._node = node
        self._nproc = nproc
        self._workers_store: Store | None = None
        self._workers: dict[_NodeDesc, int] = {}
        self._reached = False
        self.attempt: Callable[[], int] = lambda: 0
        self.doubts = False
        self.seat: Seat = tuple
        self.short = ""

    def introduce(self) -> None:
        """Say how many workers this host has, also to hosts that train while it waits."""
        self._notices.post(f"workers/{key_of(self._node)}", self._nproc)

    def workers_of(self, node: _NodeDesc) -> int:
        """How many workers a host has that has introduced itself; 0: it has not yet."""
        if node not in self._workers and (told := self._notices.read(f"workers/{key_of(node)}")) is not None:
            self._workers[node] = int(told)
        return self._workers.get(node, 0)

    def announce(self, number: int, nodes: Nodes) -> None:
        """Say how many workers this host has in a round of these nodes, in whichever order all have them, whether
        it was reached in one before, and its addresses.
        """
        self.short = ""
        own = {"workers": self._nproc, "reached": self._reached, "addresses": own_addresses()}
        self._notices.post(f"member/{number}/{nodes.index(self._node)}", own)

    def open(self, number: int, nodes: Nodes) -> Table | None:
        """The leader's: the hosts that have a place, told to all; None: one has said nothing yet, or they are short."""
        told: list[Json] = [self._notices.read(f"member/{number}/{place}") for place in range(len(nodes))]
        if None in told or self.short:
            return None
        leader = nodes.index(self._node)
        # Who has trained before goes on: it is known to be reached, and has in memory what the run needs.
        first = sorted(range(len(nodes)), key=lambda place: (place != leader, not told[place]["reached"], place))
        try:
            seats = dict(zip(first, self.seat([int(told[place]["workers"]) for place in first]), strict=True))
        except LayoutError as error:
            self.short = str(error)
            self._notices.post(f"meet/{number}", {"short": self.short})
            return None
        listener = listen(self._meeting.address, 0)
        port = int(listener.getsockname()[1])
        self._workers_store = serve(listener, self._meeting.address, STORE_TIMEOUT)
        order = [leader, *(place for place in range(len(nodes)) if place != leader and seats[place])]
        workers = tuple(seats[place] for place in order)
        members = tuple(nodes[place] for place in order)
        spares = tuple(
            _name_spare(nodes[place], seats[place], int(one["workers"]))
            for place, one in enumerate(told)
            if seats[place] < int(one["workers"])
        )
        attempt, new = self.attempt(), tuple(seat for seat, place in enumerate(order) if not told[place]["reached"])
        tried = tuple(range(len(members))) if self.doubts else new
        # What two hosts have (a bridge of containers) is no way from one to the other.
        times = Counter(one for place in order for one in told[place].get("addresses", ()))
        addresses = tuple(one for one, number in times.items() if number == 1 and len(order) > 1)
        placed = {"order": order, "workers": workers, "attempt": attempt, "new": new, "tried": tried, "spares": spares}
        store = {"address": self._meeting.reached_at, "port": port}
        self._notices.post(f"meet/{number}", {**placed, **store, "addresses": addresses})
        return Table(number, members, self._meeting.address, port, workers, attempt, new, tried, addresses, spares)

    def find(self, number: int, nodes: Nodes) -> Table | None:
        """The others': what the leader has told; None: nothing yet, or that they are short."""
        found = self._notices.read(f"meet/{number}")
        if found is None or "short" in found:
            self.short = "" if found is None else found["short"]
            return None
        members = tuple(nodes[place] for place in found["order"])
        store, of_run = (found["address"], found["port"]), (tuple(found["workers"]), found["attempt"])
        rest = (tuple(found.get(name, ())) for name in ("new", "tried", "addresses", "spares"))
        return Table(number, members, *store, *of_run, *rest)

    def know(self) -> None:
        """The hosts of this round reach each other."""
        self._reached, self.doubts = True, False


def _name_spare(node: _NodeDesc, seats: int, workers: int) -> str:
    return f"{workers - seats} of {workers} workers on {host_of(node)}" if seats else host_of(node)
