"""What the kernel tells of this process's connections, and the file that says so."""

import os
import socket
from pathlib import Path

import psutil
import pytest

from allranks.observing.links import Connection, links_file, read_connections, take_links, write_links


def own_address() -> str:
    """An address of this machine that is not its loopback's; skips where it has none."""
    for found in psutil.net_if_addrs().values():
        for one in found:
            if one.family == socket.AF_INET and not one.address.startswith("127."):
                return one.address
    pytest.skip("this machine has no address but loopback's")


@pytest.fixture
def connected() -> object:
    """A connection from 127.0.0.1 to an address of this machine: what is not both is another host to the kernel."""
    with socket.create_server(("0.0.0.0", 0)) as server:
        address = (own_address(), server.getsockname()[1])
        with socket.create_connection(address, source_address=("127.0.0.1", 0)) as one, server.accept()[0] as other:
            yield one, other


def test_a_connection_tells_what_it_has_sent(connected: tuple[socket.socket, socket.socket]) -> None:
    one, other = connected
    one.sendall(b"x" * 50_000)
    left = 50_000
    while left:
        left -= len(other.recv(left))
    (found,) = read_connections([one.fileno()])
    assert found.ends == (*one.getsockname(), *one.getpeername())
    assert (found.sent, found.again, found.twice) == (50_000, 0, 0) and 0 < found.segments < 50
    assert 0 < found.round_trip < 1_000_000 and 0 <= found.busy < 10_000_000 and found.rate > 0
    one.send(b"still open")
    assert other.recv(10) == b"still open"


def test_what_stays_on_this_host_is_not_told_of(connected: tuple[socket.socket, socket.socket], tmp_path: Path) -> None:
    _, other = connected  # whose peer is 127.0.0.1
    assert list(read_connections([other.fileno()])) == []
    with socket.create_server((own_address(), 0)) as server:
        with socket.create_connection(server.getsockname()) as one:
            assert list(read_connections([one.fileno()])) == []
        assert list(read_connections([server.fileno()])) == [], "nobody is at its other end"
    with (tmp_path / "file").open("w") as file:
        closed = os.dup(file.fileno())
        os.close(closed)
        assert list(read_connections([file.fileno(), closed])) == []


def test_the_file_is_whole_and_is_taken(connected: tuple[socket.socket, socket.socket], tmp_path: Path) -> None:
    one, _ = connected
    file = links_file(tmp_path / "rank-00001.log")
    assert file == tmp_path / "rank-00001.links.json" and take_links(file) == []
    write_links(file)
    assert os.listdir(tmp_path) == [file.name]
    assert (*one.getsockname(), *one.getpeername()) in {found.ends for found in take_links(file)}
    assert os.listdir(tmp_path) == []
    for damaged in ("[", "[[1]]", '{"a": 1}', '[["a", 1, "b", 2, "c", 1, 1, 1]]'):
        file.write_text(damaged)
        assert take_links(file) == []


def test_a_host_that_is_alone_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allranks.observing.links._own_descriptors", lambda: [0, 1, 2])
    write_links(tmp_path / "rank-00000.links.json")
    assert os.listdir(tmp_path) == []


def test_an_ipv4_address_is_told_as_such() -> None:
    server = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    address, source = ("127.0.0.1", server.getsockname()[1]), (own_address(), 0)
    with server, socket.create_connection(address, source_address=source) as one, server.accept()[0] as other:
        assert other.getpeername()[0].startswith("::ffff:")
        (found,) = read_connections([other.fileno()])
        assert isinstance(found, Connection)
        assert (found.here, found.there) == ("127.0.0.1", one.getsockname()[0])
