"""The hosts of one run, as one of them meets the others: torch's rendezvous, round after round, in a meeting place.

One host leads. It has rank 0, and the lease of the Run directory. In every round each host says how many workers it
has; the leader opens the store in which these meet and says so. So a round begins only when all of its hosts live, and
nothing that is not sealed decides who is which rank. Where the place outlives the leader, another host leads after it.
"""

import contextlib
import math
import time
from collections.abc import Callable
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
from allranks.failure import TRANSIENT, Failure
from allranks.surviving.hosts.backend import SealedBackend
from allranks.surviving.hosts.doors import look_around
from allranks.surviving.hosts.ending import Ending, RunEnded
from allranks.surviving.hosts.farewell import is_over
from allranks.surviving.hosts.handler import leave_round, make_handler
from allranks.surviving.hosts.lead import Lead
from allranks.surviving.hosts.losses import FORGED, LOST, explain_loss, explain_want
from allranks.surviving.hosts.notices import Notices
from allranks.surviving.hosts.place import MeetingPlace
from allranks.surviving.hosts.presence import Presence
from allranks.surviving.hosts.seal import Seal
from allranks.surviving.hosts.seating import Seating
from allranks.surviving.hosts.spares import Spares
from allranks.surviving.hosts.suspicion import find_lost, find_more_lost
from allranks.surviving.hosts.table import Table, host_of
from allranks.surviving.hosts.waiting import Waiting
from allranks.surviving.interrupts import Interrupts
from allranks.surviving.rendezvous import QuietRendezvous

POLL_SECONDS = 0.05
SEEK_SECONDS = 0.5  # between two looks whether anybody leads


@final
class Company(QuietRendezvous):
    """The rendezvous of an agent among others.

    Attributes:
        guard, least: how long to wait for whom, and for how many.
        notices, tell: what hosts tell each other; says a line to this host's user.
        table, seating, spares: the hosts of the round under way, how they find it, and who waits beside it.
        presence: which hosts live.
        seated: called with how many workers this host has in a round that begins.
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
        self.apart, self._apart_since, self.outlives_leader = "", 0.0, meeting.outlives_leader
        self._meeting, self._nodes, self.least = meeting, nodes, least
        self.guard, self.tell = guard, tell
        backend = SealedBackend(meeting, seal, self._see)
        self.presence = Presence(guard.host_seconds, backend.reader)
        self._inner = make_handler(backend, least, nodes, guard)
        self._node: _NodeDesc = self._inner._this_node
        self._waiting = Waiting(self._node, nodes, guard, self.tell)
        self._lead = Lead(meeting, seal, self._node)
        self.seating = Seating(meeting, self.notices, self._node, nproc)
        self.spares = Spares(self.notices, self.seating, nodes)
        self.seated: Callable[[int], None] = lambda workers: None

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
        self._waiting.interrupts = interrupts

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
        self._apart_since = 0.0
        self._waiting.begin()
        try:
            find_more_lost(self.lost, self.table, self._node, self.notices, self.presence)
            self.presence.await_survivors(self._node, self.notices.staying(self.table.number, self.table.members))
            self.seating.introduce()
            table = self._meet()
        except (RendezvousClosedError, RendezvousGracefulExitError):
            raise RunEnded(self._how_it_ended()) from None
        except RendezvousTimeoutError:
            raise self._late() from None
        except (*LOST, *FORGED) as error:
            raise self.explain(error) from error
        finally:
            self._waiting.since = None
        self.table = table
        self.presence.begin_round(table.members)
        self.spares.begin_round(table)
        self.seated(table.workers[self.place])
        if not self.leads:
            self.tell(table.describe(self.place))
        store = RendezvousStoreInfo(table.address, table.port)
        return RendezvousInfo(table.assignments(), self.place, len(table.members), store)

    def _meet(self) -> Table:
        """A round in which this host has a place, and all hosts reach each other."""
        while True:
            try:
                self._inner.next_rendezvous()
            except RendezvousTimeoutError:
                # However long others train, it may take the place of one: only since then it waits for hosts to come.
                if not (self.presence.is_beside(self._node) or self._waiting.was_beside(self.guard.join_seconds)):
                    raise
                continue
            table = self._seat(self.presence.state)
            if table is not None and self._node not in table.members:
                self._waiting.is_spare(sum(table.workers))
                self.presence.await_survivors(self._node, ())  # who trains knows whom the next round awaits
                with contextlib.suppress(RendezvousTimeoutError):  # to wait again makes it leave, with more patience
                    leave_round(self._inner)
            elif table is not None and self._all_are_reached(table):
                return table

    def _see(self, state: _RendezvousState) -> None:
        """Every state that is read or written."""
        self.presence.state = state
        self._waiting.look(self.presence, self.notices)

    def _late(self) -> ProcessError:
        who = (self.presence, self._node, self._nodes, self.seating.short)
        message = explain_want(*who, self._meeting.endpoint, self.guard)
        if self.leads:
            self.end(Ending(TRANSIENT, message=message))
        return ProcessError(message)

    def _how_it_ended(self) -> Ending:
        """For all, or because somebody asked this command to stop: then it does so for all, if they need it."""
        self._waiting.since = None  # what is written from here on is no waiting that a request ends
        ending = self._waiting.asked_ending()
        if ending is None:
            return self.notices.ending() or Ending(TRANSIENT, message="the run has ended")
        if self._is_needed():
            self.end(ending)
        elif not self.presence.is_beside(self._node):
            with contextlib.suppress(RendezvousError):
                leave_round(self._inner)  # the others begin theirs without it
        return ending

    def _is_needed(self) -> bool:
        """Whether the others can begin no round without this host, which is asked to stop, or shall not."""
        if self.leads or self.presence.is_beside(self._node):
            return self.leads
        here = self.presence.living({*self.presence.state.participants, *self.presence.state.wait_list})
        return self._waiting.is_interrupted or not self.spares.suffice(sorted(here - {self._node}), self.least)

    def explain(self, error: Exception) -> ProcessError:
        """The one line on a store that has gone, or in which somebody else writes."""
        return explain_loss(error, self._meeting.endpoint)

    def _seat(self, state: _RendezvousState) -> Table | None:
        """All hosts of a round with their workers; None where one has gone since, or none leads: there is another."""
        number, members = state.round, tuple(sorted(state.participants))
        self.seating.announce(number, members)
        deadline, sought_at = time.monotonic() + self.guard.join_seconds, -math.inf
        while True:
            is_over = self._is_over(number, members)
            if not is_over and time.monotonic() - sought_at > SEEK_SECONDS:
                sought_at, led, leader = time.monotonic(), self.leads, self._lead.seek()
                if self.leads and not led:
                    self.succeeded = self.on_lead()
                if leader in {*self.presence.state.wait_list, *self.presence.state.redundancy_list}:
                    return None  # it lives, and did not find room: now it does
            if self.leads:
                found = None if is_over else self.seating.open(number, members)
            else:  # a spare has gone, perhaps, because it has read before this host where it has no place
                found = self.seating.find(number, members)
                is_over = is_over and (found is None or self._is_over(number, found.members))
            if self.seating.short:
                self._waiting.is_short(self.seating.short)
                is_over = is_over or (len(members) < self._nodes and bool(self.presence.waiting()))
                self.presence.await_survivors(self._node, members)
            if is_over or found is not None:
                return None if is_over else found
            if time.monotonic() > deadline:
                raise RendezvousTimeoutError
            time.sleep(POLL_SECONDS)

    def _all_are_reached(self, table: Table) -> bool:
        """Whether workers can start. Who is new and kept apart ends; the others meet again, until they are reached."""
        if not table.tried:
            return True
        place, since = table.place_of(self._node), self._waiting.since
        self._waiting.since = None  # a request to stop is obeyed as of one whose workers start
        try:
            ways = look_around(
                *(self.notices, table, place),
                lambda: self._waiting.is_asked_to_stop or self._is_over(table.number, table.members),
            )
        finally:
            self._waiting.since = since
        if ways is None:
            return not self._is_over(table.number, table.members)
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

    def _is_over(self, number: int, members: tuple[_NodeDesc, ...]) -> bool:
        """Whether a round has ended before it began: somebody left, or says nothing any more."""
        self._inner.num_nodes_waiting()  # reads the state where it is older than a poll
        return self.presence.state.round != number or bool(self.presence.gone(members))

    def lost(self) -> Failure | None:
        """As `find_lost`, of this round."""
        self._inner.num_nodes_waiting()  # reads the state where it is older than a poll
        return find_lost(self.table, self._node, self.notices, self.presence, self._lead, self.guard)

    def newcomers(self) -> tuple[str, ...]:
        """The names of hosts that wait to join the round under way, and with which more workers would train."""
        waiting = self.presence.living(self.presence.state.wait_list) - {*self.table.members}
        return self.spares.let_in(self.table, waiting)

    def end(self, ending: Ending) -> None:
        """End the run for all hosts; the first word holds."""
        with contextlib.suppress(*LOST, RendezvousError):
            self.notices.end(ending)
            self.set_closed()

    def leave(self) -> None:
        """The last call. The leader stays until the others have read the end: a store of its own goes with it."""
        over, met = False, (self._node, self.table, self.presence, self.notices)
        with contextlib.suppress(*LOST, *FORGED, RendezvousError):
            self.notices.say_goodbye(self._node)
            if self.notices.ending() is not None:
                over = is_over(*met, self._waiting.interrupts, leads=self.leads)
            elif self.notices.starts_again(self.table.number):
                leave_round(self._inner)  # the others go on
        self._inner._stop_heartbeats()
        self._meeting.close(over=over)
