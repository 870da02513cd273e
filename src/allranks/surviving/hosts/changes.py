"""Changes: hosts that join or leave a run, as the one that leads decides it, with what all have saved before."""

from collections.abc import Sequence
from signal import SIGINT
from typing import final

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc

from allranks.failure import PREEMPTED, Failure
from allranks.surviving.hosts.company import Company
from allranks.surviving.hosts.ending import Report
from allranks.surviving.hosts.staying import find_leaving, find_staying, may_part
from allranks.surviving.hosts.table import host_of
from allranks.surviving.interrupts import Interrupts
from allranks.surviving.supervisor import Supervisor
from allranks.verdict import Verdict


@final
class Changes:
    """Those of one run.

    Attributes:
        has_said_stopped: whether this host has reported that its command was asked to stop.
    """

    def __init__(self, company: Company, supervisor: Supervisor | None, interrupts: Interrupts) -> None:
        self.has_said_stopped = False
        self._company, self._supervisor, self._interrupts = company, supervisor, interrupts
        self._admitting: tuple[str, ...] = ()

    def begin(self) -> None:
        """Workers of a new round are about to start: say which hosts are not among them."""
        company = self._company
        if company.apart:
            self._tell(Verdict("network", company.apart, (), "nothing; those that start now do"))
        company.apart = ""
        self._tell(company.spares.news(company.table))
        self._admitting, self.has_said_stopped = (), False

    def _tell(self, verdict: Verdict | None) -> None:
        if verdict is not None and self._company.leads and self._supervisor is not None:
            self._supervisor.tell(verdict)

    def admits(self) -> bool:
        """Whether the leader's workers are to save and end now, so that hosts that wait can join; said once.

        Not before the first step: workers that start cannot save yet.
        """
        if not self._company.leads or self._admitting or self._interrupts.first is not None:
            return False
        if self._supervisor is None or not self._supervisor.monitor.all_have_made_a_step:
            return False
        self._admitting = self._company.newcomers()
        self._tell(self._company.spares.news(self._company.table))
        return bool(self._admitting)

    def may_admit(self, said: Sequence[Report]) -> bool:
        """Whether all have saved and ended for hosts that wait to join; then all start again, with these."""
        if not self._admitting or any(one.stopped or one.exit_code != PREEMPTED for one in said):
            return False
        assert self._supervisor is not None
        self._supervisor.admitting(self._admitting)
        self._company.notices.start_again(self._company.table.number)
        return True

    def may_leave(self, said: Sequence[Report]) -> bool:
        """Whether all have saved for hosts that were asked to stop; then the others start again, if they are enough."""
        leaving = find_leaving(self._company.table.members, said)
        if not leaving or any(one.exit_code != PREEMPTED for one in said):
            return False
        if self._supervisor is None or not self._are_enough_without(leaving):
            return False
        self._supervisor.leaving(list(map(host_of, leaving)))
        self._company.notices.start_again(self._company.table.number)
        return True

    def goes_on_without(self, reports: Sequence[Report | None], cause: Failure) -> bool:
        """Whether the others go on without hosts that were asked to stop and could not save: as if these were lost."""
        leaving = find_leaving(self._company.table.members, reports)
        if not may_part(filter(None, reports), cause) or not self._are_enough_without(leaving):
            return False
        if self._supervisor is None or not self._supervisor.may_restart(cause):
            return False
        self._supervisor.restarting(cause)
        return True

    def _are_enough_without(self, leaving: Sequence[_NodeDesc]) -> bool:
        """Whether the others can go on, with hosts that wait for room, and without this one, which leads, if it leaves.

        What this host was asked after it had reported is for all, who have counted on it, and so is Ctrl-C.
        """
        company, first = self._company, self._interrupts.first
        if first is not None and (first == SIGINT or not (self.has_said_stopped and company.outlives_leader)):
            return False
        staying = find_staying(company.table.members, leaving, company.presence, company.notices)
        return company.spares.suffice(staying, company.least)
