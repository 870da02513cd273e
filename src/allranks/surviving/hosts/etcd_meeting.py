"""Hosts that meet in etcd, which lives on none of them: any of them may be lost, and another one leads.

    allranks/NAME/session          which meeting is held now, and the lease that all its hosts keep alive
    allranks/NAME/SESSION/leader   the word of who leads, for as long as its own lease is kept alive
    allranks/NAME/SESSION/KEY      what hosts tell each other

When all hosts have gone, the session's lease ends and etcd forgets everything; the next hosts hold another meeting. A
host that has led writes only as long as it does: each of its changes is made on the condition that its word stands.
Where workers have lost their connection to a leader that is silent, the others end its lease before its time.
"""

import contextlib
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar, final

from allranks.hosts_request import Endpoint
from allranks.surviving.hosts.etcd import (
    LEASE_GONE,
    Etcd,
    Json,
    LeaseGoneError,
    is_absent,
    stands,
    was_created,
)
from allranks.surviving.hosts.meeting import LEADER
from allranks.surviving.hosts.patience import Patience
from allranks.surviving.hosts.place import MeetingPlace, StoreLostError

CALLS_IN_PATIENCE = 8  # a call that nobody answers may be made so often before the meeting is lost
BEATS_IN_PATIENCE = 16
DEPOSED = "this host led, and was taken for lost: the others go on without it"
MARGIN_SECONDS = 1  # by which a host takes its own lead for ended before etcd does
Answer = TypeVar("Answer")
Words = ParamSpec("Words")


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

    outlives_leader = True

    def __init__(self, etcd: Etcd, endpoint: Endpoint, session: str, lease: int, address: str, seconds: float) -> None:
        """`lease`: the session's; `seconds`: how long etcd may be away, and the leader silent."""
        self.endpoint = endpoint
        self.scope = f"{endpoint.name}/{session}"
        self.address = self.reached_at = address
        self._etcd = etcd
        self._lease = lease
        self._seconds = seconds
        self._patience = Patience(seconds)
        self._term: Term | None = None
        self._leads_until = 0.0  # on `_boot_seconds`
        self._closing = threading.Event()
        self._keeper = threading.Thread(target=self._keep_alive, name="allranks-etcd", daemon=True)
        self._keeper.start()

    @property
    def stuck(self) -> bool:
        """As the interface says: every call has a limit of its own."""
        return False

    def read(self, key: str) -> str | None:
        """As the interface says."""
        found = self._call(self._etcd.read, self._path(key))
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
        changed, found = self._call(self._etcd.put, path, text, self._lease, conditions)
        if not changed and term is not None:
            self._see_that_it_leads(term)
        if found is None:
            self._patience.lose(f"{path} is not there any more")
            raise StoreLostError(f"{path} is not there any more")
        return found.text

    def _see_that_it_leads(self, term: Term) -> None:
        found = self._call(self._etcd.read, self._path(LEADER))
        if found is None or found.created != term.revision:
            self._patience.lose(DEPOSED)
            raise StoreLostError(DEPOSED)

    def _call(self, function: Callable[Words, Answer], *args: Words.args, **kwargs: Words.kwargs) -> Answer:
        """What etcd answers this host, which has not let its own time as the leader go by."""
        self._check_time()
        return self._patience.call(function, *args, **kwargs)

    def _check_time(self) -> None:
        """See by this host's own clock, without asking anybody, that nobody else can lead yet where it does."""
        if self._term is not None and _boot_seconds() > self._leads_until:
            self._patience.lose(self._too_late)
            raise StoreLostError(self._too_late)

    @property
    def _too_late(self) -> str:
        return f"this host led, and gave no sign of life for {self._lead_seconds} s: the others go on without it"

    @property
    def _lead_seconds(self) -> int:
        return lead_seconds(self._seconds)

    def claim(self, word: str) -> str | None:
        """As the interface says; whoever comes first leads."""
        if self._term is not None:
            self._check_time()
            self._see_that_it_leads(self._term)
            return self._term.word
        path = self._path(LEADER)
        found = self._patience.call(self._etcd.read, path)
        if found is not None:
            return found.text
        sent = _boot_seconds()
        lease = self._patience.call(self._etcd.grant, self._lead_seconds)
        _, found = self._patience.call(self._etcd.put, path, word, lease, [is_absent(path)])
        if found is not None and found.text == word:
            self._leads_until = self._time_from(sent)
            self._term = Term(lease, found.created, word)
            self._check_time()
        else:
            self._patience.call(self._etcd.revoke, lease)
        return None if found is None else found.text

    def depose(self, word: str) -> None:
        """As the interface says: its lease ends now, and not after the seconds for which it may be silent."""
        found = self._call(self._etcd.read, self._path(LEADER))
        if found is not None and found.text == word and found.lease:
            self._call(self._etcd.revoke, found.lease)

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
                    self._keep(self._prolong, term.lease, DEPOSED)
                self._keep(self._etcd.keep_alive, self._lease, LEASE_GONE)

    def _keep(self, function: Callable[[int], None], lease: int, otherwise: str) -> None:
        def keep() -> None:
            try:
                function(lease)
            except LeaseGoneError:
                if not self._closing.is_set():
                    self._patience.lose(otherwise)

        self._patience.call(keep)

    def _prolong(self, lease: int) -> None:
        """Lead for as long again, from the moment in which this was asked for."""
        sent = _boot_seconds()
        self._etcd.keep_alive(lease)
        self._leads_until = self._time_from(sent)

    def _time_from(self, sent: float) -> float:
        return sent + self._lead_seconds - MARGIN_SECONDS


def _boot_seconds() -> float:
    """Seconds that also go on while this machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def lead_seconds(seconds: float) -> int:
    """How long a leader that is silent still leads, where etcd may be away for `seconds`.

    Who cannot keep its lead gives up before: after those seconds from its first call that failed, which was at most one
    beat after the last that did not, and the call in hand.
    """
    return math.ceil(seconds * (1 + 1 / BEATS_IN_PATIENCE + 1 / CALLS_IN_PATIENCE)) + MARGIN_SECONDS
