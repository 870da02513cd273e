"""Hosts that meet in a real etcd: one meeting at a time under a name, a leader as long as it lives, no word after."""

import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from allranks.errors import ConfigError
from allranks.hosts_request import Endpoint
from allranks.surviving.hosts import etcd_meeting as module
from allranks.surviving.hosts.etcd_meeting import EtcdMeeting, lead_seconds
from allranks.surviving.hosts.etcd_opening import open_etcd_meeting
from allranks.surviving.hosts.place import StoreLostError
from tests.etcd_server import EtcdServer, etcd_server, needs_etcd
from tests.processes import wait_until

SECRET = b"0123456789abcdef"


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    with etcd_server(tmp_path_factory.mktemp("etcd")) as server:
        yield server


class Hosts:
    """Ends of meetings in one etcd, each test under a name of its own."""

    def __init__(self, port: int, name: str) -> None:
        self.endpoint = Endpoint("127.0.0.1", port, "etcd", name)
        self._made: list[EtcdMeeting] = []

    def meet(self, secret: bytes = SECRET, seconds: float = 1.0) -> EtcdMeeting:
        self._made.append(open_etcd_meeting(self.endpoint, secret, connect_seconds=5, seconds=seconds, tell=print))
        return self._made[-1]

    def fall_silent(self, meeting: EtcdMeeting) -> None:
        """As a host that is frozen: what it keeps alive is not kept alive."""
        meeting._closing.set()
        meeting._keeper.join()

    def close(self) -> None:
        for meeting in self._made:
            meeting._closing.clear()
            meeting.close(over=True)


@pytest.fixture
def hosts(etcd: EtcdServer, request: pytest.FixtureRequest) -> Iterator[Hosts]:
    found = Hosts(etcd.port, request.node.name)
    yield found
    found.close()


@needs_etcd
def test_another_leads_when_the_one_that_did_is_silent_and_that_one_says_nothing_more(hosts: Hosts) -> None:
    first, second = hosts.meet(), hosts.meet()
    assert first.claim("1") == second.claim("2") == "1"
    first.write("key", "by the first")
    hosts.fall_silent(first)
    began = time.monotonic()
    wait_until(lambda: second.claim("2") == "2", 20)
    assert time.monotonic() - began > lead_seconds(1.0) - 1.5, "not before its time has ended"
    for say in (lambda: first.write("key", "late"), lambda: first.exchange("key", "by the first", "late")):
        with pytest.raises(StoreLostError, match="this host led, and gave no sign of life for 3 s: the others go on"):
            say()
    assert second.read("key") == "by the first"
    second.write("key", "by the second")
    assert second.claim("2") == "2"


@pytest.mark.full
@needs_etcd
def test_a_leader_that_is_cut_off_has_given_up_before_another_leads(hosts: Hosts, etcd: EtcdServer) -> None:
    with Wire(etcd.port) as wire:
        behind = Endpoint("127.0.0.1", wire.port, "etcd", hosts.endpoint.name)
        first = open_etcd_meeting(behind, SECRET, connect_seconds=5, seconds=4.0, tell=print)
        second = hosts.meet(seconds=4.0)
        assert first.claim("1") == second.claim("2") == "1"
        time.sleep(0.5)
        wire.cut()
        gave_up: list[float] = []

        def ask() -> None:
            with pytest.raises(StoreLostError, match=r"no answer for 4 s: timed out|gave no sign of life for 7 s"):
                while True:
                    first.read("key")
            gave_up.append(time.monotonic())

        asking = threading.Thread(target=ask)
        asking.start()
        wait_until(lambda: second.claim("2") == "2", 20)
        took = time.monotonic()
        asking.join(60)
        assert gave_up and gave_up[0] < took, "by itself, without a word from anybody"
        first.close(over=False)


@needs_etcd
def test_a_leader_whose_own_clock_says_so_is_none_without_asking(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    first = hosts.meet(seconds=4.0)
    began = module._boot_seconds()
    assert first.claim("1") == first.claim("1") == "1"
    assert began + 4.0 < first._leads_until <= module._boot_seconds() + lead_seconds(4.0) - 1
    hosts.fall_silent(first)
    monkeypatch.setattr(module, "_boot_seconds", lambda: began + lead_seconds(4.0))  # as after a machine's sleep
    for ask in (partial(first.claim, "1"), partial(first.read, "key")):
        with pytest.raises(StoreLostError, match=f"this host led, and gave no sign of life for {lead_seconds(4.0)} s"):
            ask()


class Wire:
    """What lies between one host and etcd; cut, it takes connections and says nothing."""

    def __init__(self, port: int) -> None:
        self._to = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._is_cut = False

    def __enter__(self) -> "Wire":
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_cut = True
        for one in (self._listener, *self._open):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for one in (self._listener, *self._open):
            one.close()

    def cut(self) -> None:
        self._is_cut = True

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self._open.append(near)
            if not self._is_cut:
                far = socket.create_connection(self._to)
                self._open.append(far)
                for ends in ((near, far), (far, near)):
                    self._threads.append(threading.Thread(target=self._carry, args=ends))
                    self._threads[-1].start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while (data := source.recv(1 << 16)) and not self._is_cut:
                target.sendall(data)
            if not self._is_cut:
                target.shutdown(socket.SHUT_WR)


@needs_etcd
def test_a_leader_that_finds_its_time_ended_stops_by_itself(hosts: Hosts, etcd: EtcdServer) -> None:
    first = hosts.meet()
    first.claim("1")
    assert first._term is not None
    etcd.client.revoke(first._term.lease)
    with pytest.raises(StoreLostError, match="this host led"):
        wait_until(lambda: first.read("key") is not None, 20)


@needs_etcd
def test_who_is_taken_for_lost_leads_no_more_at_once_and_learns_it_whatever_it_does(hosts: Hosts) -> None:
    first, second, third = hosts.meet(seconds=60.0), hosts.meet(seconds=60.0), hosts.meet(seconds=60.0)
    first.write("key", "by the first")
    assert first.claim("1") == second.claim("2") == "1"
    second.depose("another's")
    assert first.claim("1") == second.claim("2") == "1"
    second.depose("1")
    assert second.claim("2") == "2"
    third.depose("1")  # who comes later with the same finding
    assert third.claim("3") == "2"
    late = (partial(first.claim, "1"), partial(first.write, "key", "x"), partial(first.exchange, "key", "", "x"))
    for act in late:
        with pytest.raises(StoreLostError, match="this host led, and was taken for lost: the others go on without it"):
            act()
    assert third.read("key") == "by the first"


@needs_etcd
def test_who_leaves_makes_room_and_the_end_leaves_nothing(hosts: Hosts, etcd: EtcdServer) -> None:
    first, second = hosts.meet(), hosts.meet()
    first.claim("1")
    first.write("key", "x")
    first.close(over=False)
    assert second.claim("2") == "2" and second.read("key") == "x"
    second.close(over=True)
    name = f"allranks/{hosts.endpoint.name}"
    assert all(etcd.client.read(f"{name}/{key}") is None for key in ("session", f"{second.scope[len(name) - 8 :]}/key"))
    third = hosts.meet()
    assert third.scope != first.scope == second.scope and third.read("key") is None, "another meeting"


@needs_etcd
def test_when_all_have_gone_nothing_is_left(hosts: Hosts, etcd: EtcdServer) -> None:
    first = hosts.meet()
    first.write("key", "x")
    hosts.fall_silent(first)
    wait_until(lambda: etcd.client.read(f"allranks/{hosts.endpoint.name}/session") is None, 20)
    with pytest.raises(StoreLostError, match="is not there any more"):
        first.exchange("key", "x", "y")
    assert hosts.meet().read("key") is None


@needs_etcd
def test_another_secret_and_a_strangers_session_are_refused(hosts: Hosts, etcd: EtcdServer) -> None:
    hosts.meet()
    with pytest.raises(ConfigError, match=r"was not signed with this host's secret.*every run a name of its own"):
        hosts.meet(b"another secret 16")
    etcd.client.put(f"allranks/{hosts.endpoint.name}/session", "cos\nsystem\n(S'touch harm'\ntR.", 0)
    with pytest.raises(ConfigError, match="was not signed") as caught:
        hosts.meet()
    assert "\n" not in str(caught.value)


@needs_etcd
def test_etcd_may_be_away_for_a_while(tmp_path: Path) -> None:
    with etcd_server(tmp_path) as server:
        found = Hosts(server.port, "run")
        first, second = found.meet(seconds=3.0), found.meet(seconds=3.0)
        first.claim("1")
        first.write("key", "before")
        server.signal(signal.SIGKILL)
        before, asked = second.clock(), time.monotonic()
        answers: list[str | None] = []
        waiting = threading.Thread(target=lambda: answers.append(second.read("key")))
        waiting.start()
        time.sleep(1.0)
        assert second.clock() - before < 0.5, "nobody could give a sign of life"
        server.start()
        waiting.join()
        assert answers == ["before"] and time.monotonic() - asked > 1.0
        first.write("key", "after")
        assert second.claim("2") == "1" and second.read("key") == "after"
        server.signal(signal.SIGKILL)
        with pytest.raises(StoreLostError, match=r"no answer for 3 s: .*refused"):
            second.read("key")
        found.close()
