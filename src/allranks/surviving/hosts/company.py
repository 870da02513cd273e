"""The hosts of one run, as one of them meets the others: torch's rendezvous, round after round, in a meeting place.

One host leads. It has rank 0, and the lease of the Run directory. In every round each host says how many workers it
has; the leader opens the store in which these meet and says so. So a round begins only when all of its hosts live, and
nothing that is not sealed decides who is which rank. Where the place outlives the leader, another host leads after it.
"""

import contextlib
import math
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import final

from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from allranks.config_guard import GuardConfig
from allranks.errors import ProcessError
from allranks.failure import INTERRUPTED, TRANSIENT, Failure
from allranks.surviving.hosts.backend import SealedBackend
from allranks.surviving.hosts.doors import look_around
from allranks.surviving.hosts.ending import Ending, Report, RunEnded
from allranks.surviving.hosts.farewell import farewell_seconds, is_last
from allranks.surviving.hosts.handler import leave_round, make_handler
from allranks.surviving.hosts.lead import Lead
from allranks.surviving.hosts.losses import FORGED, LOST, explain_loss, who_is_here
from allranks.surviving.hosts.meeting import PATIENCE_SECONDS
from allranks.surviving.hosts.notices import Notices
from allranks.surviving.hosts.place import MeetingPlace
from allranks.surviving.hosts.presence import Presence
from allranks.surviving.hosts.seal import Seal
from allranks.surviving.hosts.seating import Seating
from allranks.surviving.hosts.suspicion import find_lost, find_more_lost
from allranks.surviving.hosts.table import Table, host_of
from allranks.surviving.interrupts import Interrupts
from allranks.surviving.rendezvous import QuietRendezvous

POLL_SECONDS = 0.05
SEEK_SECONDS = 0.5  # between two looks whether anybody leads


@final
class Company(QuietRendezvous):
    """The rendezvous of an agent among others.

    Attributes:
        guard, least: how long to wait for whom, and for how many.
        notices: what hosts tell each other.
        tell: says a line to this host's user.
        table, seating: the hosts of the round under way, and how they find it.
        presence: which hosts live.
        outlives_leader: whether the others can go on without this host where it leads.
        on_lead: called when this host leads after another one, before a round begins; what that was lost by.
        succeeded: what `on_lead` has told, until somebody has taken it from here.
        apart: likewise, which hosts did not reach each other before the round under way began; or "".
    """

    def __init__(
        self,
        meeting: MeetingPlace,
        seal: Seal,
        *,
        nodes: int,
        least: int,
        nproc: int,
        guard: GuardConfig,
        tell: Callable[[str], None],
    ) -> None:
        self.notices = Notices(meeting, seal)
        self.table = Table(0, (), "", 0)
        self.on_lead: Callable[[], Failure | None] = lambda: None
        self.succeeded: Failure | None = None
        self.apart, self.outlives_leader = "", meeting.outlives_leader
        self._meeting, self._nodes, self.least = meeting, nodes, least
        self.guard, self.tell = guard, tell
        self._interrupts: Interrupts | None = None
        self._joining_since: float | None = None
        self._told, self._apart_since = False, 0.0
        backend = SealedBackend(meeting, seal, self._see)
        self.presence = Presence(guard.host_seconds, backend.reader)
        self._inner = make_handler(backend, least, nodes, guard)
        self._node: _NodeDesc = self._inner._this_node
        self._lead = Lead(meeting, seal, self._node)
        self.seating = Seating(meeting, self.notices, self._node, nproc)

    @property
    def leads(self) -> bool:
        """Whether this host decides for all, as of when it last sought to."""
        return self._lead.held

    @property
    def place(self) -> int:
        """This host's number in the round under way."""
        return self.table.place_of(self._node)

    def seek(self) -> bool:
        """Lead, where nobody does: whether this host leads. Raises StoreLostError, SealError."""
        self._lead.seek()
        return self._lead.held

    def heed(self, interrupts: Interrupts) -> None:
        """From now on a request to stop ends also the waiting for others."""
        self._interrupts = interrupts

    def is_closed(self) -> bool:
        """Whether the run has ended for all."""
        return bool(self._inner.is_closed())

    def set_closed(self) -> None:
        """Let nobody join any more."""
        self._inner.set_closed()

    def next_rendezvous(self) -> RendezvousInfo:
        """The next round: wait for all hosts, and agree on the workers' ranks and store.

        Raises:
            RunEnded: the run has ended for all, or somebody asked this command to stop.
            ProcessError: a host did not come, or the leader has gone; one line.
        """
        self._joining_since, self._told, self._apart_since = time.monotonic(), False, 0.0
        try:
            find_more_lost(self.lost, self.table, self._node, self.notices, self.presence)
            self.presence.await_survivors(self._node, self.notices.staying(self.table.number, self.table.members))
            while True:
                self._inner.next_rendezvous()
                table = self._seat(self.presence.state)
                if table is not None and self._all_are_reached(table):
                    break
        except (RendezvousClosedError, RendezvousGracefulExitError):
            raise RunEnded(self._how_it_ended()) from None
        except RendezvousTimeoutError:
            raise self._late() from None
        except (*LOST, *FORGED) as error:
            raise self.explain(error) from error
        finally:
            self._joining_since = None
        self.table = table
        self.presence.begin_round(table.members)
        if not self.leads:
            ranks = table.ranks(self.place)
            own = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
            self.tell(f"{own} of {sum(table.workers)}; {host_of(table.members[0])} leads")
        place = RendezvousStoreInfo(table.address, table.port)
        return RendezvousInfo(table.assignments(), self.place, len(table.members), place)

    def _see(self, state: _RendezvousState) -> None:
        """Every state that is read or written; the waiting ends here for who was asked to stop, and with the run."""
        self.presence.state = state
        if self._joining_since is None:
            return
        if state.closed or (self._interrupts is not None and self._interrupts.first is not None):
            raise RendezvousGracefulExitError
        spare = state.complete and self._node in state.redundancy_list
        if self._told or (state.complete and not spare) or time.monotonic() - self._joining_since < PATIENCE_SECONDS:
            return
        self._told, here = True, who_is_here(self.presence, self._node, self._nodes)
        waiting = f"{here}: waiting up to {self.guard.join_seconds:g} s (guard.join_seconds)"
        self.tell(f"all {self._nodes} places are taken: this host waits until one is free" if spare else waiting)

    def _late(self) -> ProcessError:
        message = (
            f"{who_is_here(self.presence, self._node, self._nodes)}; the others did not come to "
            f"{self._meeting.endpoint} within {self.guard.join_seconds:g} s (guard.join_seconds): start the same "
            "command on every host"
        )
        if self.leads:
            self.end(Ending(TRANSIENT, message=message))
        return ProcessError(message)

    def _how_it_ended(self) -> Ending:
        """For all, or because somebody asked this command to stop: then it does so for all, if they need it."""
        self._joining_since = None  # what is written from here on is no waiting that a request ends
        if self._interrupts is None or self._interrupts.first is None:
            return self.notices.ending() or Ending(TRANSIENT, message="the run has ended")
        ending = Ending(INTERRUPTED if self._interrupts.first == signal.SIGINT else TRANSIENT)
        if self.leads or not self.presence.is_beside(self._node):
            self.end(ending)
        return ending

    def explain(self, error: Exception) -> ProcessError:
        """The one line on a store that has gone, or in which somebody else writes."""
        return explain_loss(error, self._meeting.endpoint)

    def _seat(self, state: _RendezvousState) -> Table | None:
        """All hosts of a round with their workers; None where one has gone since, or none leads: there is another."""
        number, members = state.round, tuple(sorted(state.participants))
        self.seating.announce(number, members)
        deadline, sought_at = time.monotonic() + self.guard.join_seconds, -math.inf
        while not self._is_over(number, members):
            if time.monotonic() - sought_at > SEEK_SECONDS:
                sought_at, leader = time.monotonic(), self._seek_in_round()
                if leader in {*self.presence.state.wait_list, *self.presence.state.redundancy_list}:
                    return None  # it lives, and did not find room: now it does
            found = (self.seating.open if self.leads else self.seating.find)(number, members)
            if found is not None:
                return found
            if time.monotonic() > deadline:
                raise RendezvousTimeoutError
            time.sleep(POLL_SECONDS)
        return None

    def _all_are_reached(self, table: Table) -> bool:
        """Whether workers can start. Who is new and kept apart ends; the others meet again, until they are reached."""
        if not table.tried:
            return True
        place, since = table.place_of(self._node), self._joining_since
        self._joining_since = None  # a request to stop is obeyed as of one whose workers start
        try:
            ways = look_around(self.notices, table, place, partial(self._is_off, table))
        finally:
            self._joining_since = since
        if ways is None:
            return not self._is_over(table.number, tuple(sorted(table.members)))
        if not ways.closed:
            self.seating.know()
            return True
        self._apart_since = self._apart_since or time.monotonic()
        all_end = len(ways.refused) == len(table.members)
        if self.leads and (all_end or time.monotonic() - self._apart_since > self.guard.join_seconds):
            self.end(Ending(TRANSIENT, message=ways.closed))
            raise ProcessError(ways.closed)
        if place in ways.refused:
            if not all_end:
                leave_round(self._inner)  # the others wait for it
            raise ProcessError(ways.closed)
        rest = [node for place, node in enumerate(table.members) if place not in ways.refused]
        apart = ", ".join(host_of(table.members[place]) for place in sorted(ways.refused))
        self.apart = f"{apart} cannot join: {ways.closed}" if apart else f"waiting for the network: {ways.closed}"
        self.tell(self.apart)
        self.presence.await_survivors(self._node, rest)
        return False

    def _is_off(self, table: Table) -> bool:
        asked = self._interrupts is not None and self._interrupts.first is not None
        return asked or self._is_over(table.number, tuple(sorted(table.members)))

    def _seek_in_round(self) -> _NodeDesc | None:
        """Who leads; this host, after what a new leader has to do, where nobody did any more."""
        led = self.leads
        leader = self._lead.seek()
        if self.leads and not led:
            self.succeeded = self.on_lead()
        return leader

    def _is_over(self, number: int, members: tuple[_NodeDesc, ...]) -> bool:
        """Whether a round has ended before it began: somebody left, or says nothing any more."""
        self._inner.num_nodes_waiting()  # reads the state where it is older than a poll
        return self.presence.state.round != number or bool(self.presence.gone(members))

    def lost(self) -> Failure | None:
        """As `find_lost`, of this round."""
        self._inner.num_nodes_waiting()  # reads the state where it is older than a poll
        return find_lost(self.table, self._node, self.notices, self.presence, self._lead, self.guard)

    def newcomers(self) -> tuple[str, ...]:
        """The names of hosts that wait to join the round under way."""
        return tuple(sorted(map(host_of, self.presence.living(self.presence.state.wait_list) - {*self.table.members})))

    def report(self, report: Report) -> None:
        """Say how this host's workers of this round ended."""
        self.notices.report(self.table.number, self.place, report)

    def in_trouble(self) -> bool:
        """Whether workers of any host have failed in this round."""
        return self.notices.in_trouble(self.table.number)

    def reports(self) -> list[Report | None]:
        """What each host of this round has said of its end; None: nothing yet."""
        return self.notices.reports(self.table.number, len(self.table.members))

    def end(self, ending: Ending) -> None:
        """End the run for all hosts; the first word holds."""
        with contextlib.suppress(*LOST, RendezvousError):
            self.notices.end(ending)
            self.set_closed()

    def leave(self) -> None:
        """The last call. The leader stays until the others have read the end: a store of its own goes with it."""
        over = False
        with contextlib.suppress(*LOST, *FORGED, RendezvousError):
            self.notices.say_goodbye(self._node)
            if self.notices.ending() is not None:
                state = self.presence.state
                others = {*self.table.members, *state.participants, *state.wait_list} - {self._node}
                seconds = farewell_seconds(self._interrupts, leads=self.leads)
                last = is_last(others, self.presence, self.notices, seconds)
                over = last or self.leads
            elif self.notices.starts_again(self.table.number):
                leave_round(self._inner)  # the others go on
        self._inner._stop_heartbeats()
        self._meeting.close(over=over)
