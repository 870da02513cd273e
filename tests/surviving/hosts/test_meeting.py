"""The store at the endpoint: who serves it, who reaches it, and what is said when nobody answers."""

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import psutil
import pytest

from allranks.errors import ConfigError, ProcessError
from allranks.hosts_request import Endpoint
from allranks.surviving.hosts.meeting import MeetingStore, open_meeting
from allranks.surviving.hosts.place import StoreLostError
from allranks.surviving.unended import hinders_the_end
from tests.free_port import free_port
from tests.processes import wait_until


def meet(endpoint: Endpoint, seconds: float = 20.0, heard: list[str] | None = None) -> MeetingStore:
    return open_meeting(
        endpoint, connect_seconds=seconds, call_seconds=2.0, tell=([] if heard is None else heard).append
    )


def test_the_first_serves_at_the_endpoints_address_and_the_second_reaches_it() -> None:
    endpoint = Endpoint("127.0.0.1", free_port())
    first, second = meet(endpoint), meet(endpoint)
    assert (first.serves, second.serves) == (True, False)
    listening = {
        one.laddr.ip
        for one in psutil.Process().net_connections()
        if one.status == psutil.CONN_LISTEN and one.laddr.port == endpoint.port
    }
    assert listening == {"127.0.0.1"}
    assert second.read("key") is None
    assert second.exchange("key", "", "a") == "a"
    assert first.exchange("key", "", "b") == "a", "somebody was first"
    assert first.exchange("key", "a", "b") == second.read("key") == "b"
    second.write("key", "c")
    assert first.read("key") == "c"


def test_nobody_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allranks.surviving.hosts.meeting.PATIENCE_SECONDS", 0.3)
    heard: list[str] = []
    elsewhere = Endpoint("127.0.0.1", free_port())
    monkeypatch.setattr("allranks.surviving.hosts.meeting._listen_here", lambda endpoint: None)
    with pytest.raises(ProcessError, match=f"nobody listened at {elsewhere} for 0.8 s.*refused.*firewall"):
        meet(elsewhere, 0.8, heard)
    assert len(heard) == 1 and "waiting up to 0.8 s (guard.join_seconds)" in heard[0]


def test_a_name_that_stands_for_nothing() -> None:
    with pytest.raises(ProcessError, match=r"nobody listened at no-such-host\.invalid:29400 for 0\.2 s"):
        meet(Endpoint("no-such-host.invalid", 29400), 0.2)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "224.0.0.1"])
def test_an_address_of_no_single_host_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=f"{host} is not the address of one host"):
        meet(Endpoint(host, 29400), 0.2)


def test_a_port_that_cannot_be_listened_on_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def listen(address: str, port: int) -> socket.socket:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("allranks.surviving.hosts.meeting.listen", listen)
    said = r"--rendezvous 127\.0\.0\.1:80 cannot be listened on: Permission denied; name another port"
    with pytest.raises(ConfigError, match=said):
        meet(Endpoint("127.0.0.1", 80), 0.2)


def test_another_program_on_the_port_is_no_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allranks.surviving.hosts.meeting.GREETING_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        endpoint = Endpoint("127.0.0.1", stranger.getsockname()[1])

        def answer() -> None:
            for _ in range(2):
                taken, _address = stranger.accept()
                taken.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 20)
                taken.close()

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ProcessError, match=f"what listens on {endpoint} is no allranks"):
            meet(endpoint, 5.0)
        thread.join()


class Cut:
    """Between a store and its clients: a network that can be cut. What was on its way then never comes."""

    def __init__(self, port: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._behind = port
        self.whole = threading.Event()
        self.whole.set()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _address = self._listener.accept()
            except OSError:
                return
            self.whole.wait()
            far = socket.create_connection(("127.0.0.1", self._behind))
            self._pairs.append((near, far))
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if not self.whole.is_set():
                    return  # for this connection for ever: TCP would send it again long after the network is back
                sink.sendall(data)

    def close(self) -> None:
        self._listener.close()
        for pair in self._pairs:
            for one in pair:
                one.close()


def test_a_cut_that_is_shorter_than_the_limit_is_overcome_on_a_new_connection() -> None:
    first = meet(Endpoint("127.0.0.1", free_port()))
    cut = Cut(first.endpoint.port)
    try:
        second = open_meeting(Endpoint("127.0.0.1", cut.port), connect_seconds=20, call_seconds=30.0, tell=print)
        second.write("key", "before")
        cut.whole.clear()
        healing = threading.Timer(2.0, cut.whole.set)
        healing.start()
        began = time.monotonic()
        second.write("key", "after")
        assert time.monotonic() - began > 1.5 and first.read("key") == "after"
        assert second.exchange("key", "after", "later") == "later" and second.read("key") == "later"
        healing.join()
    finally:
        cut.close()


SERVE = """
import sys, time
from allranks.hosts_request import Endpoint
from allranks.surviving.hosts.meeting import open_meeting
kept = open_meeting(Endpoint("127.0.0.1", int(sys.argv[1])), connect_seconds=1, call_seconds=1, tell=print)
print("ready", flush=True)
time.sleep(100)
"""


def test_a_host_that_was_frozen_in_a_call_does_not_take_that_for_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where all of a host's threads are stopped between the question and its answer, and go on much later."""
    first, frozen = meet(Endpoint("127.0.0.1", free_port())), threading.Event()
    clock = time.monotonic

    def look(store: object) -> str:
        frozen.set()
        time.sleep(1.5)  # the first wait is over, and the answer not read
        return "answer"

    monkeypatch.setattr(
        "allranks.surviving.hosts.meeting.time.monotonic", lambda: clock() + (60.0 if frozen.is_set() else 0.0)
    )
    first._call_seconds = 12.0
    assert first._call(look) == "answer"


def test_a_call_that_lasts_is_not_forgotten_when_a_later_one_is_answered() -> None:
    first = meet(Endpoint("127.0.0.1", free_port()))
    asked, answer = threading.Event(), threading.Event()

    def wait(store: object) -> str:
        asked.set()
        answer.wait()
        return "late"

    first._call_seconds = 0.1
    with pytest.raises(StoreLostError):
        first._call(wait)
    first._lost, first._call_seconds = None, 30.0  # as where the call was made again on another connection
    first.write("key", "x")
    assert asked.is_set() and first.stuck and hinders_the_end()
    answer.set()
    wait_until(lambda: not first.stuck)


def test_a_lost_store_is_told_of_in_time() -> None:
    endpoint = Endpoint("127.0.0.1", free_port())
    leader = subprocess.Popen([sys.executable, "-c", SERVE, str(endpoint.port)], stdout=subprocess.PIPE)
    try:
        assert leader.stdout is not None and leader.stdout.readline() == b"ready\n"
        one, other = meet(endpoint), meet(endpoint)
        assert not one.serves
        one.write("key", "x")
        os.kill(leader.pid, signal.SIGSTOP)
        wait_until(lambda: psutil.Process(leader.pid).status() == psutil.STATUS_STOPPED)
        began = time.monotonic()
        with pytest.raises(StoreLostError, match="no answer for 2 s"):
            one.read("key")
        with pytest.raises(StoreLostError, match="no answer for 2 s"):
            one.write("key", "y")
        assert one.stuck and time.monotonic() - began < 60, "only the first call waits, and that not for ever"
        assert hinders_the_end()
        leader.kill()
        leader.wait()
        with pytest.raises(StoreLostError) as caught:
            other.exchange("key", "", "z")
        assert not other.stuck and "\n" not in str(caught.value)
    finally:
        leader.kill()
        leader.communicate()
