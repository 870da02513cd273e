"""Who sits where: a table is there when all have said how many workers they have."""

import psutil
import pytest
from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc

from allranks.hosts_request import Endpoint
from allranks.surviving.hosts.meeting import MeetingStore
from allranks.surviving.hosts.notices import Notices
from allranks.surviving.hosts.seal import Seal
from allranks.surviving.hosts.seating import Seating

MEMBERS = (_NodeDesc("0 a", 1, 0), _NodeDesc("1 b", 2, 0))


@pytest.fixture
def pair() -> tuple[Seating, Seating]:
    store, found = HashStore(), []
    for leads, workers in ((True, 2), (False, 3)):
        meeting = MeetingStore(store, Endpoint("127.0.0.1", 1), "127.0.0.1", serves=leads, call_seconds=5.0)
        found.append(Seating(meeting, Notices(meeting, Seal(b"0123456789abcdef")), workers))
    return found[0], found[1]


def test_all_find_the_table_that_the_leader_has_opened(pair: tuple[Seating, Seating]) -> None:
    leader, other = pair
    leader.announce(5, 0)
    assert leader.table(5, MEMBERS) is None and other.table(5, MEMBERS) is None
    other.announce(5, 1)
    assert other.table(5, MEMBERS) is None, "the leader opens it"
    table = leader.table(5, MEMBERS)
    assert table is not None and (table.number, table.members, table.workers) == (5, MEMBERS, (2, 3))
    assert other.table(5, MEMBERS) == table
    listening = {
        one.laddr.ip
        for one in psutil.Process().net_connections()
        if one.status == psutil.CONN_LISTEN and one.laddr.port == table.port
    }
    assert listening == {"127.0.0.1"}, "at the address of the endpoint alone"
    leader.announce(6, 0)
    assert leader.table(6, MEMBERS) is None, "another round has another table"
