"""Where the workers of one host meet: a store in the agent, on loopback, new for each attempt.

A store of its own for each attempt cannot hand a restarted worker the address of a dead one; in the agent it outlives
rank 0; on loopback no stranger reaches it.
"""

from datetime import timedelta
from typing import final

from torch._C._distributed_c10d import Store
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from allranks.parallel.store import listen, serve
from allranks.process_environment import LOOPBACK

STORE_TIMEOUT = timedelta(minutes=5)


@final
class LocalRendezvous(RendezvousHandler):
    """The rendezvous of an agent that is alone: it is always complete, with one node."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._store: Store | None = None

    def get_backend(self) -> str:
        """The name in torchelastic's events."""
        return "allranks-local"

    @property
    def use_agent_store(self) -> bool:
        """Workers connect to the agent's store; rank 0 serves none."""
        return True

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

    def num_nodes_waiting(self) -> int:
        """None: nobody else can come."""
        return 0

    def get_run_id(self) -> str:
        """The run's id."""
        return self._run_id

    def shutdown(self) -> bool:
        """Let the store go."""
        self._store = None
        return True
