"""What both keepers of a meeting promise: a store of one of the hosts, and etcd."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from allranks.hosts_request import Endpoint
from allranks.surviving.hosts.etcd_opening import open_etcd_meeting
from allranks.surviving.hosts.meeting import open_meeting
from allranks.surviving.hosts.place import MeetingPlace
from tests.etcd_server import etcd_server, needs_etcd
from tests.free_port import free_port


@pytest.fixture(params=["c10d", pytest.param("etcd", marks=needs_etcd)])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[MeetingPlace, MeetingPlace]]:
    """Two hosts' ends of one meeting."""
    found: list[MeetingPlace] = []
    with ExitStack() as stack:
        port = stack.enter_context(etcd_server(tmp_path)).port if request.param == "etcd" else free_port()
        for _ in range(2):
            if request.param == "etcd":
                place = Endpoint("127.0.0.1", port, "etcd", "run")
                found.append(open_etcd_meeting(place, b"0" * 16, connect_seconds=5, seconds=5, tell=print))
            else:
                place = Endpoint("127.0.0.1", port)
                found.append(open_meeting(place, connect_seconds=5, call_seconds=5, tell=print))
        yield found[0], found[1]
        for one in reversed(found):
            one.close(over=True)


def test_words_under_keys_and_one_that_leads(pair: tuple[MeetingPlace, MeetingPlace]) -> None:
    first, second = pair
    assert first.scope == second.scope and not first.stuck
    assert second.read("key") is None
    assert second.exchange("key", "", "a") == "a"
    assert first.exchange("key", "", "b") == "a", "somebody was first"
    assert first.exchange("key", "other", "b") == "a"
    assert first.exchange("key", "a", "ä") == second.read("key") == "ä"
    second.write("key", "c")
    assert first.read("key") == "c"
    assert (first.address, first.reached_at) == ("127.0.0.1", "127.0.0.1")
    assert first.claim("1") == "1" and second.claim("2") == "1" and first.claim("1") == "1"
    first.write("key", "d")
    assert second.exchange("key", "d", "e") == first.read("key") == "e"
    before = first.clock()
    assert 0 <= first.clock() - before < 1
