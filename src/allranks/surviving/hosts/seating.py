"""Who sits where in a round: each host says how many workers it has, and the leader opens the store where they meet."""

from typing import final

from torch._C._distributed_c10d import Store
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc

from allranks.parallel.store import listen, serve
from allranks.surviving.hosts.meeting import STORE_TIMEOUT, MeetingStore
from allranks.surviving.hosts.notices import Notices
from allranks.surviving.hosts.table import Table

Nodes = tuple[_NodeDesc, ...]


@final
class Seating:
    """One host's part in it. The workers' store is new for each round: none finds the address of a dead one there."""

    def __init__(self, meeting: MeetingStore, notices: Notices, nproc: int) -> None:
        self._meeting = meeting
        self._notices = notices
        self._nproc = nproc
        self._workers_store: Store | None = None

    def announce(self, number: int, place: int) -> None:
        """Say how many workers this host has in a round, where it has a place."""
        self._notices.post(f"member/{number}/{place}", {"workers": self._nproc})

    def table(self, number: int, members: Nodes) -> Table | None:
        """All hosts of the round with their workers; None as long as one of them has said nothing yet."""
        if not self._meeting.serves:
            found = self._notices.read(f"meet/{number}")
            return None if found is None else Table(number, members, found["port"], tuple(found["workers"]))
        told = [self._notices.read(f"member/{number}/{place}") for place in range(len(members))]
        if None in told:
            return None
        listener = listen(self._meeting.address, 0)
        port = int(listener.getsockname()[1])
        self._workers_store = serve(listener, self._meeting.address, STORE_TIMEOUT)
        workers = tuple(int(one["workers"]) for one in told if one is not None)
        self._notices.post(f"meet/{number}", {"port": port, "workers": workers})
        return Table(number, members, port, workers)
