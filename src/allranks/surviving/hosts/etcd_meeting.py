"""Hosts that meet in etcd, which lives on none of them: any of them may be lost, and another one leads.

    allranks/NAME/session          which meeting is held now, and the lease that all its hosts keep alive
    allranks/NAME/SESSION/leader   the word of who leads, for as long as its own lease is kept alive
    allranks/NAME/SESSION/KEY      what hosts tell each other

When all hosts have gone, the session's lease ends and etcd forgets everything; the next hosts hold another meeting. A
host that has led writes only as long as it does: each of its changes is made on the condition that its word stands.
"""

import contextlib
import math
import re
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from allranks.errors import ConfigError, ProcessError
from allranks.hosts_request import Endpoint
from allranks.parallel.store import wait_for_listener
from allranks.surviving.hosts.etcd import LEASE_GONE, Etcd, Json, LeaseGoneError, is_absent, stands, was_created
from allranks.surviving.hosts.meeting import LEADER, PATIENCE_SECONDS, address_of_route
from allranks.surviving.hosts.patience import Patience
from allranks.surviving.hosts.place import MeetingPlace, StoreLostError
from allranks.surviving.hosts.seal import Seal, SealError

LEAST_VERSION = (3, 4)  # the gateway's paths begin with /v3 since then
CALLS_IN_PATIENCE = 4  # a call that nobody answers may be made so often before the meeting is lost
BEATS_IN_PATIENCE = 8


@final
@dataclass(frozen=True, slots=True)
class Term:
    """This host's time as the leader: its lease, and etcd's revision at which its word was put there."""

    lease: int
    revision: int
    word: str


@final
class EtcdMeeting(MeetingPlace):
    """One host's part in a meeting; a thread keeps alive what lasts only as long as hosts do."""

    def __init__(self, etcd: Etcd, endpoint: Endpoint, session: str, lease: int, address: str, seconds: float) -> None:
        """`lease`: the session's; `seconds`: how long etcd may be away, and the leader silent."""
        self.endpoint = endpoint
        self.scope = f"{endpoint.name}/{session}"
        self.address = self.reached_at = address
        self.stuck = False
        self._etcd = etcd
        self._lease = lease
        self._seconds = seconds
        self._patience = Patience(seconds)
        self._term: Term | None = None
        self._closing = threading.Event()
        self._keeper = threading.Thread(target=self._keep_alive, name="allranks-etcd", daemon=True)
        self._keeper.start()

    def read(self, key: str) -> str | None:
        """As the interface says."""
        found = self._patience.call(self._etcd.read, self._path(key))
        return None if found is None else found.text

    def write(self, key: str, text: str) -> None:
        """As the interface says."""
        self._put(key, text)

    def exchange(self, key: str, expected: str, wanted: str) -> str:
        """As the interface says."""
        return self._put(key, wanted, stands(self._path(key), expected) if expected else is_absent(self._path(key)))

    def _put(self, key: str, text: str, *conditions: Json) -> str:
        """What stands there afterwards. Who has led and does not any more changes nothing."""
        path, term = self._path(key), self._term
        if term is not None:
            conditions = (*conditions, was_created(self._path(LEADER), term.revision))
        changed, found = self._patience.call(self._etcd.put, path, text, self._lease, conditions)
        if not changed and term is not None:
            self._see_that_it_leads(term)
        if found is None:
            self._patience.lose(f"{path} is not there any more")
            raise StoreLostError(f"{path} is not there any more")
        return found.text

    def _see_that_it_leads(self, term: Term) -> None:
        found = self._patience.call(self._etcd.read, self._path(LEADER))
        if found is None or found.created != term.revision:
            self._patience.lose(self._deposed)
            raise StoreLostError(self._deposed)

    @property
    def _deposed(self) -> str:
        return f"this host led, and gave no sign of life for {self._lead_seconds} s: the others go on without it"

    @property
    def _lead_seconds(self) -> int:
        return lead_seconds(self._seconds)

    def claim(self, word: str) -> str | None:
        """As the interface says; whoever comes first leads."""
        if self._term is not None:
            return self._term.word
        path = self._path(LEADER)
        found = self._patience.call(self._etcd.read, path)
        if found is not None:
            return found.text
        lease = self._patience.call(self._etcd.grant, self._lead_seconds)
        _, found = self._patience.call(self._etcd.put, path, word, lease, [is_absent(path)])
        if found is not None and found.text == word:
            self._term = Term(lease, found.created, word)
        else:
            self._patience.call(self._etcd.revoke, lease)
        return None if found is None else found.text

    def clock(self) -> float:
        """As the interface says: without the time in which etcd did not answer this host."""
        return self._patience.clock()

    def close(self, *, over: bool) -> None:
        """As the interface says; another host may lead at once. Said twice: as once."""
        if self._closing.is_set():
            return
        self._closing.set()
        leases = [self._term.lease] if self._term is not None else []
        with contextlib.suppress(StoreLostError):
            for lease in [*leases, self._lease] if over else leases:
                self._patience.call(self._etcd.revoke, lease)

    def _path(self, key: str) -> str:
        return f"allranks/{self.scope}/{key}"

    def _keep_alive(self) -> None:
        while not self._closing.wait(self._seconds / BEATS_IN_PATIENCE):
            term = self._term
            with contextlib.suppress(StoreLostError):
                if term is not None:
                    self._keep(term.lease, self._deposed)
                self._keep(self._lease, LEASE_GONE)

    def _keep(self, lease: int, otherwise: str) -> None:
        def keep() -> None:
            try:
                self._etcd.keep_alive(lease)
            except LeaseGoneError:
                if not self._closing.is_set():
                    self._patience.lose(otherwise)

        self._patience.call(keep)


def lead_seconds(seconds: float) -> int:
    """How long a leader that is silent still leads, where etcd may be away for `seconds`.

    Who cannot keep its lead gives up before: after those seconds from its first call that failed, which was at most one
    beat after the last that did not, and the call in hand.
    """
    return math.ceil(seconds * (1 + 1 / BEATS_IN_PATIENCE + 1 / CALLS_IN_PATIENCE)) + 1


def open_etcd_meeting(
    endpoint: Endpoint, secret: bytes, *, connect_seconds: float, seconds: float, tell: Callable[[str], None]
) -> EtcdMeeting:
    """Take part in the meeting of the endpoint's name, or begin it.

    Args:
        connect_seconds: how long to wait until etcd answers.
        seconds: how long it may be away later.
        tell: is told once, after some seconds, who is waited for.

    Raises:
        ConfigError: etcd is too old, or what stands under the name is not signed with this secret.
        ProcessError: nobody answers there, or another program does.
    """
    _wait_for_etcd(endpoint, connect_seconds, tell)
    etcd = Etcd(endpoint.host, endpoint.port, max(1.0, seconds / CALLS_IN_PATIENCE))
    patience = Patience(seconds)
    try:
        _check_version(patience.call(etcd.version), endpoint)
        session, lease = _open_session(etcd, patience, endpoint, Seal(secret), 2 * lead_seconds(seconds))
    except StoreLostError as error:
        raise ProcessError(
            f"what listens at {endpoint} does not answer as etcd does: {error}; see that it is an etcd "
            f"{'.'.join(map(str, LEAST_VERSION))} or newer, which speaks plain HTTP and asks for no user"
        ) from error
    address = address_of_route(endpoint.host, endpoint.port)
    return EtcdMeeting(etcd, endpoint, session, lease, address, seconds)


def _wait_for_etcd(endpoint: Endpoint, seconds: float, tell: Callable[[str], None]) -> None:
    began = time.monotonic()
    error = wait_for_listener(endpoint.host, endpoint.port, began + min(PATIENCE_SECONDS, seconds))
    if error is not None and seconds > PATIENCE_SECONDS:
        tell(
            f"nobody listens at {endpoint} yet ({error.strerror or error}): waiting up to {seconds:g} s"
            " (guard.join_seconds) for etcd"
        )
        error = wait_for_listener(endpoint.host, endpoint.port, began + seconds)
    if error is not None:
        raise ProcessError(
            f"nobody listened at {endpoint} for {seconds:g} s (guard.join_seconds): {error.strerror or error};"
            " start etcd, and see that its name, port (--listen-client-urls) and firewall are right"
        )


def _check_version(version: str, endpoint: Endpoint) -> None:
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or (int(match[1]), int(match[2])) < LEAST_VERSION:
        least = ".".join(map(str, LEAST_VERSION))
        raise ConfigError(f"the etcd at {endpoint} is of version {version or 'unknown'}: at least {least} is needed")


def _open_session(etcd: Etcd, patience: Patience, endpoint: Endpoint, seal: Seal, seconds: int) -> tuple[str, int]:
    """The id and the lease of the meeting that is held under the endpoint's name, from now on at the latest."""
    key = f"allranks/{endpoint.name}/session"
    while True:
        lease = patience.call(etcd.grant, seconds)
        mine = seal.close(key, {"id": secrets.token_hex(8), "lease": str(lease)})
        _, found = patience.call(etcd.put, key, mine, lease, [is_absent(key)])
        if found is None or found.text != mine:
            patience.call(etcd.revoke, lease)
        if found is None:
            continue  # it ended in this moment
        try:
            held = seal.open(key, found.text)
        except SealError as error:
            raise ConfigError(
                f"what stands at {endpoint} was not signed with this host's secret: give every host of the run the "
                "same one, and every run a name of its own: etcd://HOST:PORT/NAME"
            ) from error
        return held["id"], int(held["lease"])
