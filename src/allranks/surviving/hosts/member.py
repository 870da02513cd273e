"""What an agent does as one of several: it looks after the others' workers, reports its own, and obeys the leader.

Every host reports how its workers of a round ended, and goes to the next round; the leader first judges, with its
Supervisor's budget of restarts, from what all have reported: either it goes there as well, or it ends the run for all.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, final

from torch.distributed.elastic.agent.server.api import WorkerSpec

from allranks.failure import PREEMPTED, Failure, first_failure
from allranks.process_environment import ATTEMPT, HOSTS
from allranks.surviving.hosts.changes import Changes
from allranks.surviving.hosts.company import Company
from allranks.surviving.hosts.ending import Ending, Report
from allranks.surviving.hosts.hearing import Hearing
from allranks.surviving.hosts.losses import FORGED, LOST
from allranks.surviving.hosts.moments import Moments
from allranks.surviving.hosts.statement import Statement, find_absent, find_alarm, gather
from allranks.surviving.hosts.staying import is_unheard, may_part
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

    def __init__(
        self,
        company: Company,
        supervisor: Supervisor | None,
        interrupts: Interrupts,
        spec: WorkerSpec,
    ) -> None:
        """`spec`: of this host's workers; a round may have a place for fewer of them."""
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
        self._changes = Changes(company, supervisor, interrupts)
        self._moments = Moments()
        company.heed(interrupts)
        company.seated = partial(setattr, spec, "local_world_size")

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
        self._reported_at = self._lost = self._hung = self._ending = None
        self._workers, self._moments = ({}, {}), Moments()
        self._hearing = Hearing(self._company.notices, self._company.table, self._company.place)
        self._changes.begin()
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
            in_trouble = self._company.notices.in_trouble(self._company.table.number)
            if self._company.leads:
                self._moments.look(self._reports if in_trouble else list)
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
        """As `Changes.admits`. Raises ProcessError as `look`."""
        try:
            return self._changes.admits()
        except (*LOST, *FORGED) as error:
            raise self._company.explain(error) from error

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
            self._changes.has_said_stopped = self._interrupts.first is not None
            report = Report(outcome.exit_code, failure, self._changes.has_said_stopped)
            company.notices.report(company.table.number, company.place, report)
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
            if following == "again" and self._changes.has_said_stopped:
                company.notices.hand_over()
                return self._leave(outcome)
            return following
        starts_again = company.notices.starts_again(company.table.number)
        if starts_again and self._changes.has_said_stopped:
            return self._leave(outcome)
        return "again" if starts_again or self._lost is not None or self._need_not_ask() else "wait"

    def _reports(self) -> list[Report | None]:
        """What each host of this round has said of its end; None: nothing yet."""
        table = self._company.table
        return self._company.notices.reports(table.number, len(table.members))

    def _leave(self, outcome: Outcome) -> Next:
        saved = "what all have saved" if outcome.exit_code == PREEMPTED else "the newest checkpoint"
        self._company.tell(f"this host leaves; the others go on from {saved}")
        self.outcome = outcome
        return "end"

    def _need_not_ask(self) -> bool:
        """Whether another round follows a failure without a word of the leader, who has failed as well.

        Else `look` finds out whether the leader is lost, which nobody would in the next round.
        """
        notices, number = self._company.notices, self._company.table.number
        return notices.in_trouble(number) and notices.has_reported(number, 0)

    def _obey(self, ending: Ending, outcome: Outcome) -> Next:
        self.outcome = replace(ending.outcome(), others=outcome.others)
        return "end"

    def _judge(self, outcome: Outcome) -> Next:
        """The leader's: what follows for all. Whose time has ended, because it was frozen, ends here."""
        company = self._company
        company.seek()
        reports = self._moments.look(self._reports)
        said = [report for report in reports if report is not None]
        failures = [report.failure for report in said if report.failure is not None]
        if not failures and self._lost is None:
            if None in reports:
                return "wait"
            over = self._supervisor is not None and self._supervisor.time_is_over()
            if not over and (self._changes.may_admit(said) or self._changes.may_leave(said)):
                return "again"
            return self._end(Ending(next((one.exit_code for one in said if one.exit_code), 0)), outcome)
        cause = self._moments.first(reports, company.place, filter(None, [self._lost]))
        assert cause is not None
        if (cause.consequence or may_part(said, cause)) and self._may_hear_more(reports):
            return "wait"
        if self._changes.goes_on_without(reports, cause):
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
