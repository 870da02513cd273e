"""What the kernel tells of this process's connections; `ss` is its own word on them, where it is here."""

import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator

import pytest

from allranks.observing.links import Connection, read_connections
from allranks.surviving.hosts.seating import own_addresses

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def own() -> str:
    """An address of this machine that is not its loopback's: to a connection from 127.0.0.1 it is another host's."""
    found = [one for one in own_addresses() if ":" not in one]
    if not found:
        pytest.skip("this machine has no address but loopback's")
    return found[0]


@pytest.fixture
def pair(own: str) -> Iterator[Pair]:
    with socket.create_server(("0.0.0.0", 0)) as server:
        address = (own, server.getsockname()[1])
        with socket.create_connection(address, source_address=("127.0.0.1", 0)) as one, server.accept()[0] as other:
            yield one, other


def test_a_connection_tells_what_it_has_sent(pair: Pair, own: str) -> None:
    one, other = pair
    one.sendall(b"x" * 50_000)
    left = 50_000
    while left:
        left -= len(other.recv(left))
    (found,) = read_connections([own])
    assert found.ends == (*one.getsockname(), *one.getpeername())
    assert (found.sent, found.again, found.twice) == (50_000, 0, 0) and 0 < found.segments < 50
    assert 0 < found.round_trip < 1_000_000 and found.rate > 0
    assert [back.ends for back in read_connections(["127.0.0.1"])] == [(*other.getsockname(), *other.getpeername())]
    assert read_connections(["192.0.2.1"]) == [], "only those to the hosts that are named"


def test_time_without_room_at_the_receiver_is_told_apart(pair: Pair, own: str) -> None:
    one, _ = pair  # nobody reads
    one.settimeout(0.5)
    with pytest.raises(TimeoutError):
        one.sendall(b"x" * 100_000_000)
    (found,) = read_connections([own])
    assert found.busy > 300_000 and found.held_there > found.busy / 2, found


@pytest.mark.skipif(shutil.which("ss") is None, reason="there is no ss here (Debian: iproute2)")
def test_it_is_what_ss_tells(pair: Pair, own: str) -> None:
    one, other = pair
    for _ in range(20):
        one.sendall(b"x" * 5_000)
        other.recv(5_000, socket.MSG_WAITALL)
        other.sendall(b"y" * 700)
        one.recv(700, socket.MSG_WAITALL)
        time.sleep(0.002)
    (found,) = read_connections([own])
    ports = f"( sport = :{one.getsockname()[1]} )"
    told = subprocess.run(["ss", "-tinH", ports], capture_output=True, text=True, check=True).stdout

    def number(name: str) -> float:
        found = re.search(rf"\b{name}:([\d.]+)", told)
        assert found is not None, told
        return float(found[1])

    assert found.sent == number("bytes_sent") == 100_000
    assert found.segments == number("data_segs_out")
    assert found.round_trip == pytest.approx(1000 * number("minrtt"), abs=1)
    assert bool(found.idle) == ("app_limited" in told)


def test_a_socket_keeps_its_mode_and_nothing_is_left_open(pair: Pair, own: str) -> None:
    one, other = pair
    socket.setdefaulttimeout(30)
    try:
        before = os.listdir("/proc/self/fd")
        assert len(read_connections([own])) == 1
        assert os.listdir("/proc/self/fd") == before
    finally:
        socket.setdefaulttimeout(None)
    assert os.get_blocking(one.fileno())
    one.send(b"still open")
    assert other.recv(10) == b"still open"


def test_what_is_no_connection_to_another_host_is_passed_over(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server((own, 0)) as server, socket.create_connection(server.getsockname()):
        assert read_connections([own]) == [], "both ends are here"
    one, other = socket.socketpair()
    with one, other, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        datagrams.connect((own, 9))
        assert read_connections([own]) == []
    monkeypatch.setattr("sys.platform", "darwin")
    assert read_connections([own]) == []


def test_an_ipv4_address_is_told_as_such(own: str) -> None:
    server = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    address = ("127.0.0.1", server.getsockname()[1])
    with server, socket.create_connection(address, source_address=(own, 0)), server.accept()[0] as other:
        assert other.getpeername()[0] == f"::ffff:{own}"
        (found,) = read_connections([own])
        assert isinstance(found, Connection)
        assert (found.here, found.there) == ("127.0.0.1", own)
