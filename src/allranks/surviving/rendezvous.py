"""Where the workers of one host meet: a store in the agent, on loopback, new for each attempt.

A store of its own for each attempt cannot hand a restarted worker the address of a dead one; in the agent it outlives
rank 0; on loopback nobody of another machine reaches it.
"""

from datetime import timedelta
from typing import final

from torch._C._distributed_c10d import Store
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from allranks.parallel.store import listen, serve
from allranks.process_environment import LOOPBACK

STORE_TIMEOUT = timedelta(minutes=5)


class QuietRendezvous(RendezvousHandler):
    """What torchelastic asks of a rendezvous, and other parts see to here."""

    def get_backend(self) -> str:
        """The name in torchelastic's events."""
        return "allranks"

    @property
    def use_agent_store(self) -> bool:
        """Workers connect to a store of an agent; rank 0 serves none."""
        return True

    def get_run_id(self) -> str:
        """A name for the workers' environment."""
        return "allranks"

    def num_nodes_waiting(self) -> int:
        """None that torchelastic has to see to."""
        return 0

    def shutdown(self) -> bool:
        """Nothing: there is more to a leave than torchelastic knows (hosts/company.py)."""
        return True


@final
class LocalRendezvous(QuietRendezvous):
    """The rendezvous of an agent that is alone: it is always complete, with one node."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._store: Store | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """One node, rank 0, and a new store on a free port."""
        listener = listen(LOOPBACK, 0)
        port = listener.getsockname()[1]
        self._store = serve(listener, LOOPBACK, STORE_TIMEOUT)
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(LOOPBACK, port))

    def is_closed(self) -> bool:
        """Never: nobody else could close it."""
        return False

    def set_closed(self) -> None:
        """Nothing to do."""

    def get_run_id(self) -> str:
        """The run's id."""
        return self._run_id

    def shutdown(self) -> bool:
        """Let the store go."""
        self._store = None
        return True
