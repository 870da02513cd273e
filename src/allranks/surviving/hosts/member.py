"""What an agent does as one of several: it looks after the others' workers, reports its own, and obeys the leader.

Every host reports how its workers of a round ended, and goes to the next round; the leader first judges, with its
Supervisor's budget of restarts, from what all have reported: either it goes there as well, or it ends the run for all.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from signal import SIGINT
from typing import Literal, final

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc

from allranks.failure import PREEMPTED, Failure, first_failure
from allranks.process_environment import ATTEMPT, HOSTS
from allranks.surviving.hosts.company import Company
from allranks.surviving.hosts.ending import Ending, Report
from allranks.surviving.hosts.hearing import Hearing
from allranks.surviving.hosts.losses import FORGED, LOST
from allranks.surviving.hosts.moments import Moments
from allranks.surviving.hosts.statement import Statement, find_absent, find_alarm, gather
from allranks.surviving.hosts.staying import count_staying, find_leaving, is_unheard, may_part
from allranks.surviving.hosts.table import host_of
from allranks.surviving.interrupts import Interrupts
from allranks.surviving.outcome import Outcome
from allranks.surviving.ruling import Ruling
from allranks.surviving.supervisor import Supervisor

LOOK_SECONDS = 0.5  # between two looks into the store
LINGER_SECONDS = 2.0  # after a failure elsewhere: time for the workers of this host to say what they met
CAUSE_SECONDS = 2.0  # after a lost host would have been seen: then the cause is what has been reported

Next = Literal["wait", "again", "end"]


@final
class Member:
    """This host in the company.

    Attributes:
        outcome: how the run ended, once `settle` has said "end".
    """

    def __init__(self, company: Company, supervisor: Supervisor | None, interrupts: Interrupts) -> None:
        self.outcome: Outcome | None = None
        self._company = company
        self._supervisor = supervisor
        self._interrupts = interrupts
        self._looked = 0.0
        self._reported_at: float | None = None
        self._lost: Failure | None = None
        self._hung: Failure | None = None
        self._ending: Ending | None = None
        self._hearing: Hearing | None = None
        self._workers: tuple[Mapping[int, int], Mapping[int, int]] = ({}, {})
        self._admitting: tuple[str, ...] = ()
        self._has_said_stopped = False
        self._moments = Moments()
        company.heed(interrupts)

    def begin(self) -> dict[str, str]:
        """Workers of a new round are about to start; after the loss of a leader, under another.

        Returns:
            the variables that say to them of which attempt they are, and where all hosts are.

        Raises:
            ProcessError: the store has gone.
        """
        if self._company.succeeded is not None and self._supervisor is not None:
            self._supervisor.succeeding(self._company.succeeded)
            self._company.succeeded = None
        if self._company.apart and self._company.leads and self._supervisor is not None:
            self._supervisor.parted(self._company.apart)
        self._company.apart = ""
        self._reported_at = self._lost = self._hung = self._ending = None
        self._workers, self._moments = ({}, {}), Moments()
        self._hearing = Hearing(self._company.notices, self._company.table, self._company.place)
        self._admitting = ()
        self._has_said_stopped = False
        table = self._company.table
        hosts = {HOSTS: ",".join(table.addresses)} if self._company.guard.bad_link == "warn" else {}
        return {ATTEMPT: str(table.attempt), **hosts}

    def watch(self, pids: Mapping[int, int], ranks: Mapping[int, int]) -> None:
        """See how this host's living workers do, and ask all hosts where something is wrong; as Supervisor.look."""
        if self._supervisor is not None and self._hearing is not None and self._supervisor.notice(pids, ranks):
            self._hearing.ask()

    def look(self, pids: Mapping[int, int], ranks: Mapping[int, int]) -> float | None:
        """See how the others do: the seconds after which this host's workers are to be ended; None: all is well.

        Args:
            pids: local rank -> process id, of those that live.
            ranks: local rank -> global rank.

        Raises:
            ProcessError: the store has gone, or holds what no host wrote.
        """
        self._workers = (pids, ranks)
        if self._ending is not None or time.monotonic() - self._looked < LOOK_SECONDS:
            return None if self._ending is None else 0.0
        self._looked = time.monotonic()
        try:
            if self._lost is None:
                self._lost = self._company.lost()
            self._attend()
            self._ending = self._company.notices.ending()
            if self._lost or self._hung or self._ending is not None:
                return 0.0
            in_trouble = self._company.in_trouble()
            if self._company.leads:
                self._moments.look(self._company.reports if in_trouble else list)
            return LINGER_SECONDS if in_trouble else None
        except (*LOST, *FORGED) as error:
            raise self._company.explain(error) from error

    def _attend(self) -> None:
        """Do what is due in a hearing of what hangs, and tell what has been found."""
        if self._supervisor is None or self._hearing is None:
            return
        judge = self._rule if self._company.leads else None
        for ruling in self._hearing.attend(self._state, judge, self._is_outdated if self._workers[0] else None):
            found = self._supervisor.obey(ruling)
            if found is not None:  # the leader has found it, by its own clock
                self._hung = replace(found, time=time.time())

    def _state(self) -> Statement:
        assert self._supervisor is not None
        found = self._supervisor.question(*self._workers)
        monitor = self._supervisor.monitor
        return Statement(tuple(found), monitor.stopped, monitor.delayed_seconds)

    def _rule(self, statements: Sequence[Statement | None]) -> Ruling | None:
        assert self._supervisor is not None
        found = gather(statements)
        alarm = find_alarm(found, statements, self._company.guard)
        if alarm is None:
            return None
        return self._supervisor.judge(found, alarm, find_absent(self._company.table, statements))

    def _is_outdated(self, ruling: Ruling) -> bool:
        assert self._supervisor is not None
        return self._supervisor.is_outdated(ruling, *self._workers)

    def admits(self) -> bool:
        """Whether the leader's workers are to save and end now, so that hosts that wait can join; said once.

        Not before the first step: workers that start cannot save yet.
        """
        if not self._company.leads or self._admitting or self._interrupts.first is not None:
            return False
        if self._supervisor is None or min(self._supervisor.monitor.beats.steps()) == 0:
            return False
        self._admitting = self._company.newcomers()
        return bool(self._admitting)

    def settle(self, outcome: Outcome) -> Next:
        """All workers of this host have ended: whether it waits for the others, starts its workers again, or ends."""
        try:
            return self._settle(outcome)
        except (*LOST, *FORGED) as error:
            raise self._company.explain(error) from error

    def _settle(self, outcome: Outcome) -> Next:
        company = self._company
        self._workers = ({}, {})
        if self._ending is not None:  # the store may have gone since, with the leader
            return self._obey(self._ending, outcome)
        self._attend()  # what ended the workers is told before they start again
        if self._reported_at is None:
            self._reported_at = time.monotonic()
            failure = first_failure(filter(None, (outcome.first_failure, self._lost, self._hung)))
            self._has_said_stopped = self._interrupts.first is not None
            company.report(Report(outcome.exit_code, failure, self._has_said_stopped))
            if failure is not None and not company.leads:
                company.tell(f"{failure.brief()}; the leader decides what follows")
        ending = company.notices.ending()
        if ending is None and self._interrupts.urgent:
            ending = Ending(outcome.exit_code)
            company.end(ending)
        if ending is not None:
            return self._obey(ending, outcome)
        if company.leads:
            following = self._judge(outcome)
            if following == "again" and self._has_said_stopped:
                company.notices.hand_over()
                return self._leave(outcome)
            return following
        starts_again = company.notices.starts_again(company.table.number)
        if starts_again and self._has_said_stopped:
            return self._leave(outcome)
        return "again" if starts_again or self._lost is not None or self._need_not_ask() else "wait"

    def _leave(self, outcome: Outcome) -> Next:
        saved = "what all have saved" if outcome.exit_code == PREEMPTED else "the newest checkpoint"
        self._company.tell(f"this host leaves; the others go on from {saved}")
        self.outcome = outcome
        return "end"

    def _need_not_ask(self) -> bool:
        """Whether another round follows a failure without a word of the leader, who has failed as well.

        Else `look` finds out whether the leader is lost, which nobody would in the next round.
        """
        company = self._company
        if not company.in_trouble():
            return False
        return company.notices.has_reported(company.table.number, 0)

    def _obey(self, ending: Ending, outcome: Outcome) -> Next:
        self.outcome = replace(ending.outcome(), others=outcome.others)
        return "end"

    def _judge(self, outcome: Outcome) -> Next:
        """The leader's: what follows for all. Whose time has ended, because it was frozen, ends here."""
        company = self._company
        company.seek()
        reports = self._moments.look(company.reports)
        said = [report for report in reports if report is not None]
        failures = [report.failure for report in said if report.failure is not None]
        if not failures and self._lost is None:
            if None in reports:
                return "wait"
            over = self._supervisor is not None and self._supervisor.time_is_over()
            if not over and (self._may_admit(said) or self._may_leave(said)):
                return "again"
            return self._end(Ending(next((one.exit_code for one in said if one.exit_code), 0)), outcome)
        cause = self._moments.first(reports, company.place, filter(None, [self._lost]))
        assert cause is not None
        if (cause.consequence or may_part(said, cause)) and self._may_hear_more(reports):
            return "wait"
        if self._goes_on_without(reports, cause):
            company.notices.start_again(company.table.number)
            return "again"
        if any(report.stopped for report in said):
            code = next((one.exit_code for one in said if one.stopped and one.exit_code), cause.exit_code)
            return self._end(Ending(code, None if cause.consequence else cause), outcome)
        if self._supervisor is not None and self._supervisor.may_restart(cause):
            company.seating.doubts = cause.consequence or cause.hung
            self._supervisor.restarting(cause)
            return "again"
        if self._supervisor is not None:
            cause = self._supervisor.conclude(cause)
        return self._end(Ending(cause.exit_code, cause), outcome)

    def _may_admit(self, said: Sequence[Report]) -> bool:
        """Whether all have saved and ended for hosts that wait to join; then all start again, with these."""
        if not self._admitting or any(one.stopped or one.exit_code != PREEMPTED for one in said):
            return False
        assert self._supervisor is not None
        self._supervisor.admitting(self._admitting)
        self._company.notices.start_again(self._company.table.number)
        return True

    def _may_leave(self, said: Sequence[Report]) -> bool:
        """Whether all have saved for hosts that were asked to stop; then the others start again, if they are enough."""
        leaving = find_leaving(self._company.table.members, said)
        if not leaving or any(one.exit_code != PREEMPTED for one in said):
            return False
        if self._supervisor is None or not self._are_enough_without(leaving):
            return False
        self._supervisor.leaving(list(map(host_of, leaving)))
        self._company.notices.start_again(self._company.table.number)
        return True

    def _goes_on_without(self, reports: Sequence[Report | None], cause: Failure) -> bool:
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
        if first is not None and (first == SIGINT or not (self._has_said_stopped and company.outlives_leader)):
            return False
        return count_staying(company.table.members, leaving, company.presence, company.notices) >= company.least

    def _may_hear_more(self, reports: Sequence[Report | None]) -> bool:
        """Whether a host of which nothing is known may still report, or be found to be lost as another one is."""
        assert self._reported_at is not None
        lost = self._company.lost()
        if self._lost is None and lost is not None:
            self._lost = lost
            return True  # this is the cause: it is judged anew
        has_waited = time.monotonic() - self._reported_at > self._company.guard.host_seconds + CAUSE_SECONDS
        return not has_waited and is_unheard(self._company.table.members, reports, self._company.presence)

    def _end(self, ending: Ending, outcome: Outcome) -> Next:
        self._company.end(ending)
        return self._obey(ending, outcome)
