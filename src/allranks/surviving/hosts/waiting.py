"""Waiting: what a host that waits for the next round tells its user, and what ends its wait."""

import time
from collections.abc import Callable
from signal import SIGINT
from typing import final

from torch.distributed.elastic.rendezvous.api import RendezvousGracefulExitError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc

from allranks.config_guard import GuardConfig
from allranks.failure import INTERRUPTED, TRANSIENT
from allranks.surviving.hosts.ending import Ending
from allranks.surviving.hosts.losses import who_is_here
from allranks.surviving.hosts.meeting import PATIENCE_SECONDS
from allranks.surviving.hosts.notices import Notices
from allranks.surviving.hosts.presence import Presence
from allranks.surviving.hosts.spares import own_words
from allranks.surviving.hosts.table import key_of
from allranks.surviving.interrupts import Interrupts


@final
class Waiting:
    """One host's.

    Attributes:
        interrupts: of its command; None: nobody can ask that to stop yet.
        since: when it began, on the monotonic clock; None: it does not wait, or nothing shall end that.
    """

    def __init__(self, node: _NodeDesc, nodes: int, guard: GuardConfig, tell: Callable[[str], None]) -> None:
        """`nodes`: hosts of a round at most; `tell`: says a line to this host's user."""
        self.interrupts: Interrupts | None = None
        self.since: float | None = None
        self._node, self._nodes, self._guard, self._tell = node, nodes, guard, tell
        self._said: dict[str, str] = {}
        self._asked_at = self._beside_at = 0.0

    def begin(self) -> None:
        """From now on it waits."""
        self.since, self._said = time.monotonic(), {}
        self._asked_at = self._beside_at = 0.0

    @property
    def is_asked_to_stop(self) -> bool:
        """Whether somebody has asked this host's command to stop."""
        return self.interrupts is not None and self.interrupts.first is not None

    @property
    def is_interrupted(self) -> bool:
        """Whether that was Ctrl-C, which is meant for all hosts."""
        return self.interrupts is not None and self.interrupts.first == SIGINT

    def was_beside(self, seconds: float) -> bool:
        """Whether others have trained beside this host, which waits, within so many seconds."""
        return self._beside_at > 0.0 and time.monotonic() - self._beside_at < seconds

    def asked_ending(self) -> Ending | None:
        """The end that was asked of it, or None."""
        if self.interrupts is None or self.interrupts.first is None:
            return None
        return Ending(INTERRUPTED if self.interrupts.first == SIGINT else TRANSIENT)

    def look(self, presence: Presence, notices: Notices) -> None:
        """A state was read or written: tell what this host waits for, after some seconds of it.

        Raises:
            RendezvousGracefulExitError: the run has ended, or this host is asked to stop.
            StoreLostError, SealError
        """
        if self.since is None:
            return
        if presence.state.closed or self.is_asked_to_stop:
            raise RendezvousGracefulExitError
        now, beside = time.monotonic(), presence.is_beside(self._node)
        began = self.since if beside else max(self.since, self._beside_at)  # a round that ends is followed at once
        self._beside_at = now if beside else self._beside_at
        if now - began < PATIENCE_SECONDS or (presence.state.complete and not beside):
            return
        if not beside:
            here = who_is_here(presence, self._node, self._nodes)
            self._say_once("here", f"{here}: waiting up to {self._guard.join_seconds:g} s (guard.join_seconds)")
        elif self._node in presence.state.redundancy_list:
            self._say_once("room", f"all {self._nodes} places are taken: this host waits until one is free")
        elif "spare" not in self._said and now - self._asked_at > PATIENCE_SECONDS:
            self._asked_at = now
            told = notices.read(f"spares/{presence.state.round}")
            if told is not None and key_of(self._node) in told["hosts"]:
                self.is_spare(told["workers"])

    def is_spare(self, workers: int) -> None:
        """This host is, beside so many workers that train."""
        if self._said.get("spare") != own_words(workers):
            self._said.pop("spare", None)
            self._say_once("spare", own_words(workers))

    def is_short(self, why: str) -> None:
        """The hosts that are there are too few for the layout."""
        self._say_once("short", f"{why}: waiting up to {self._guard.join_seconds:g} s for more (guard.join_seconds)")

    def _say_once(self, kind: str, line: str) -> None:
        if kind not in self._said:
            self._said[kind] = line
            self._tell(line)
