"""Where the workers of one host meet."""

from datetime import timedelta

import psutil
from torch._C._distributed_c10d import TCPStore

from allranks.surviving.rendezvous import LocalRendezvous


def test_every_attempt_has_a_new_store_on_loopback() -> None:
    handler = LocalRendezvous("run")
    assert (handler.get_run_id(), handler.get_backend()) == ("run", "allranks")
    assert handler.use_agent_store
    assert (handler.is_closed(), handler.num_nodes_waiting()) == (False, 0)
    first = handler.next_rendezvous()
    assert (first.rank, first.world_size) == (0, 1)
    place = first.bootstrap_store_info
    assert place is not None
    listening = {
        connection.laddr.ip
        for connection in psutil.Process().net_connections()
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == place.master_port
    }
    assert listening == {"127.0.0.1"}
    client = TCPStore(place.master_addr, place.master_port, timeout=timedelta(seconds=20))
    client.set("address of rank 1", "old")
    second = handler.next_rendezvous()
    assert not second.store.check(["address of rank 1"])
    assert handler.shutdown()
