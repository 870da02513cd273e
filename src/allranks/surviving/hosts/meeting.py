"""Hosts that meet at one of them: in a store that the host of the endpoint serves and the others reach.

Every call has a limit. torch's client waits without end for a host that says nothing more, and a command that waits
there could not even end its workers. A call that is not answered is made again on a new connection until then: TCP
sends what was lost in a cut of ten seconds again after thirteen, a new connection finds the network back at once.
"""

import errno
import ipaddress
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Generic, TypeVar, final

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from allranks.errors import ConfigError, ProcessError
from allranks.hosts_request import Endpoint
from allranks.parallel.interface import outward_address
from allranks.parallel.store import connect, listen, serve, wait_for_listener
from allranks.surviving.hosts.place import MeetingPlace, StoreLostError
from allranks.surviving.unended import CALL

STORE_TIMEOUT = timedelta(minutes=5)  # of what torchelastic itself waits for in the store
PATIENCE_SECONDS = 5.0  # then the user hears for whom this command waits
GREETING_SECONDS = 10.0  # what listens has to answer as a store within this
SLOW_SECONDS = 1.0  # without an answer: then other connections are tried
REACH_SECONDS = 0.5  # for one of them
GLANCE_SECONDS = 0.05
LOOK_SECONDS = 3.0  # of a wait that count at most from one look to the next: longer, and this host itself was frozen
Answer = TypeVar("Answer")
LEADER = "leader"
NOT_OURS = (errno.EADDRINUSE, errno.EADDRNOTAVAIL)


@final
class MeetingStore(MeetingPlace):
    """The store at the endpoint. Who serves it leads: it goes with that host, and the others end with it.

    Attributes:
        serves: whether this process serves it.
        on_close: called when this host needs it no more, once or oftener.
    """

    outlives_leader = False

    def __init__(self, store: Store, endpoint: Endpoint, address: str, *, serves: bool, call_seconds: float) -> None:
        """`call_seconds`: how long a call may take, with all of its repetitions."""
        self.store = store
        self.endpoint = endpoint
        self.scope = ""
        self.address = address
        self.reached_at = endpoint.host
        self.serves = serves
        self._lasting: list[_Call[Any]] = []
        self.on_close: Callable[[], None] = lambda: None
        self._call_seconds = call_seconds
        self._lost: str | None = None

    @property
    def stuck(self) -> bool:
        """As the interface says, of whichever call: a later one may be answered on another connection."""
        return any(call.lasts for call in self._lasting)

    def read(self, key: str) -> str | None:
        """As the interface says."""

        def look(store: Store) -> str | None:
            return store.get(key).decode("utf-8", "replace") if store.check([key]) else None

        return self._call(look)

    def write(self, key: str, text: str) -> None:
        """As the interface says."""

        def put(store: Store) -> None:
            store.set(key, text)
            store.check([key])  # a set alone is not answered: it may lie in this host's own buffers

        self._call(put)

    def exchange(self, key: str, expected: str, wanted: str) -> str:
        """As the interface says."""
        return self._call(lambda store: store.compare_set(key, expected, wanted).decode("utf-8", "replace"))

    def claim(self, word: str) -> str | None:
        """Who serves leads, and nobody else ever does."""
        return self.exchange(LEADER, "", word) if self.serves else self.read(LEADER)

    def depose(self, word: str) -> None:
        """As the interface says: the store goes with its host, and nobody leads after it."""

    def clock(self) -> float:
        """This host's: with the keeper the meeting is gone."""
        return time.monotonic()

    def close(self, *, over: bool) -> None:
        """The store goes with its process."""
        self.on_close()

    def _call(self, function: Callable[[Store], Answer]) -> Answer:
        """What the store answers. Every call that is made here may be made twice."""
        if self._lost is not None:
            raise StoreLostError(self._lost)
        looked, waited = time.monotonic(), 0.0
        calls = [_Call(function, self.store)]
        calls[0].wait(min(SLOW_SECONDS, self._call_seconds))
        while not (calls[-1].errors or any(call.answers for call in calls)) and waited < self._call_seconds:
            if self.store is calls[-1].store:
                self._connect_again()
            if self.store is not calls[-1].store:
                calls.append(_Call(function, self.store))
            calls[-1].wait(GLANCE_SECONDS)
            # A host that wakes up has not read yet what came while it was frozen: that is nobody's silence.
            now = time.monotonic()
            looked, waited = now, waited + min(LOOK_SECONDS, now - looked)
        self._lasting = [call for call in (*self._lasting, *calls) if call.lasts]
        for call in calls:
            if call.answers:
                return call.answers[0]
        silence = f"no answer for {self._call_seconds:g} s"
        errors = calls[-1].errors
        self._lost = str(errors[0]).strip().splitlines()[0].partition(". ")[0] if errors else silence
        raise StoreLostError(self._lost)

    def _connect_again(self) -> None:
        """Reach the store anew, where the network lets a connection through."""
        host, port = self.endpoint.host, self.endpoint.port
        if self.serves or wait_for_listener(host, port, time.monotonic() + REACH_SECONDS) is not None:
            return
        self.store = connect(host, port, STORE_TIMEOUT, time.monotonic() + REACH_SECONDS) or self.store


@final
class _Call(Generic[Answer]):
    """One call, in a thread that may wait for ever."""

    def __init__(self, function: Callable[[Store], Answer], store: Store) -> None:
        self.store = store
        self.answers: list[Answer] = []
        self.errors: list[Exception] = []
        self._function = function
        self._thread = threading.Thread(target=self._make, name=CALL, daemon=True)
        self._thread.start()

    def _make(self) -> None:
        try:
            self.answers.append(self._function(self.store))
        except (dist.DistError, RuntimeError, ValueError, TimeoutError) as error:
            self.errors.append(error)

    @property
    def lasts(self) -> bool:
        """Whether it has not ended yet."""
        return self._thread.is_alive()

    def wait(self, seconds: float) -> None:
        """Until it ends, or so long."""
        self._thread.join(seconds)


def open_meeting(
    endpoint: Endpoint, *, connect_seconds: float, call_seconds: float, tell: Callable[[str], None]
) -> MeetingStore:
    """Serve the store where the endpoint is an address of this host and free; else reach who serves it.

    Args:
        connect_seconds: how long to wait until somebody serves it.
        call_seconds: how long a call may take later.
        tell: is told once, after some seconds, who is waited for.

    Raises:
        ConfigError: the address cannot be listened on, for another reason than that it is taken or another host's.
        ProcessError: nobody came, or another program listens there.
    """
    listener = _listen_here(endpoint)
    if listener is not None:
        address = str(listener.getsockname()[0])
        store = serve(listener, address, STORE_TIMEOUT)
        return MeetingStore(store, endpoint, address, serves=True, call_seconds=call_seconds)
    _wait_for_host(endpoint, connect_seconds, tell)
    client = connect(endpoint.host, endpoint.port, STORE_TIMEOUT, time.monotonic() + GREETING_SECONDS)
    if client is None:
        raise ProcessError(
            f"what listens on {endpoint} is no allranks: another program has the port; name a free one on every host"
        )
    return MeetingStore(client, endpoint, endpoint.host, serves=False, call_seconds=call_seconds)


def _listen_here(endpoint: Endpoint) -> socket.socket | None:
    """A listening socket at the endpoint; None where it is another host's, or taken."""
    address = _address_of(endpoint.host)
    if address is None:
        return None
    try:
        return listen(address, endpoint.port)
    except OSError as error:
        if error.errno in NOT_OURS:
            return None
        reason = error.strerror or str(error)
        raise ConfigError(f"--rendezvous {endpoint} cannot be listened on: {reason}; name another port") from error


def _address_of(host: str) -> str | None:
    """The address that a name stands for, None for none.

    Debian's /etc/hosts gives the host's own name an address that other hosts cannot reach: then the one by which this
    host reaches others.
    """
    try:
        found = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return None
    number = ipaddress.ip_address(found.partition("%")[0])
    if number.is_unspecified or number.is_multicast:
        raise ConfigError(f"--rendezvous: {host} is not the address of one host; name one that the others reach")
    if not number.is_loopback or host in (found, "localhost"):
        return found
    return outward_address() or found


def address_of_route(host: str, port: int) -> str:
    """The number by which this host is seen from another, which it reaches; loopback where the user named that.

    Raises OSError: it does not reach it.
    """
    with socket.create_connection((host, port), GREETING_SECONDS) as probe:
        found = str(probe.getsockname()[0])
    if host == "localhost" or host == found or not ipaddress.ip_address(found.partition("%")[0]).is_loopback:
        return found
    return outward_address() or found


def _wait_for_host(endpoint: Endpoint, seconds: float, tell: Callable[[str], None]) -> None:
    began = time.monotonic()
    error = wait_for_listener(endpoint.host, endpoint.port, began + min(PATIENCE_SECONDS, seconds))
    if error is not None and seconds > PATIENCE_SECONDS:
        tell(
            f"nobody listens at {endpoint} yet ({error.strerror or error}): waiting up to {seconds:g} s"
            " (guard.join_seconds) for the command on that host"
        )
        error = wait_for_listener(endpoint.host, endpoint.port, began + seconds)
    if error is not None:
        raise ProcessError(
            f"nobody listened at {endpoint} for {seconds:g} s (guard.join_seconds): {error.strerror or error};"
            " start the command on that host, and see that its name, port and firewall are right"
        )
