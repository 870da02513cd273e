"""What one host does among others: whom it looks after, and how the leader judges. The company is a stand-in."""

import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc

from allranks.config_guard import GuardConfig
from allranks.errors import ProcessError
from allranks.failure import Failure
from allranks.hosts_request import Endpoint
from allranks.observing.heartbeat import STEP
from allranks.surviving.hosts import member as module
from allranks.surviving.hosts.ending import Ending, Report
from allranks.surviving.hosts.meeting import MeetingStore
from allranks.surviving.hosts.member import LINGER_SECONDS, Member
from allranks.surviving.hosts.notices import Notices
from allranks.surviving.hosts.place import StoreLostError
from allranks.surviving.hosts.seal import Seal
from allranks.surviving.hosts.table import Table
from allranks.surviving.interrupts import Interrupts
from allranks.surviving.monitor import Alarm
from allranks.surviving.outcome import Outcome
from allranks.surviving.supervisor import Supervision, Supervisor
from allranks.verdict import Verdict
from tests.surviving.rows import collective, witness

KILLED = Failure(1, "b", 9, 2.5, 76, "was killed by SIGKILL", signal="SIGKILL")
CLOSED = Failure(0, "a", 8, 2.0, 76, "Connection closed by peer", consequence=True)
ERROR = Failure(1, "b", 9, 2.5, 1, "ValueError: x", traceback="...")
SPARE = _NodeDesc("c", 10, 0)
GONE = Failure(1, "b", 9, 2.5, 76, "its host is lost")


class Board:
    """The notices."""

    ended: Ending | None = None
    again = False
    handed_over = False
    gone: tuple[_NodeDesc, ...] = ()
    leader_has_reported = False

    def __init__(self) -> None:
        self.said: list[Report | None] = [None, None]

    def in_trouble(self, number: int) -> bool:
        return any(report is not None and report.failure is not None for report in self.said)

    def report(self, number: int, place: int, report: Report) -> None:
        self.said[place] = report

    def reports(self, number: int, num_hosts: int) -> list[Report | None]:
        assert num_hosts == len(self.said)
        return self.said

    def has_reported(self, number: int, place: int) -> bool:
        return place == 0 and self.leader_has_reported

    def starts_again(self, number: int) -> bool:
        return self.again

    def start_again(self, number: int) -> None:
        self.again = True

    def has_left(self, node: _NodeDesc) -> bool:
        return node in self.gone

    def hand_over(self) -> None:
        self.handed_over = True

    def ending(self) -> Ending | None:
        return self.ended

    def read(self, key: str) -> None:
        """Nobody asks."""


class Others:
    """A company of two, whose leader this host is or is not."""

    def __init__(self, *, leads: bool = True) -> None:
        self.leads = leads
        self.guard = GuardConfig()
        self.notices = Board()
        self.gone: Failure | None = None
        self.broken: Exception | None = None
        self.heard: list[str] = []
        self.table = Table(1, (_NodeDesc("a", 8, 0), _NodeDesc("b", 9, 0)), "", 0, (1, 1), 3)
        self.place = 0 if leads else 1
        self.waiting: tuple[str, ...] = ()
        self.succeeded: Failure | None = None
        self.time_ended = False
        self.seating = SimpleNamespace(doubts=None)
        self.apart = ""
        self.least = 2
        self.outlives_leader = False
        self.beside: set[_NodeDesc] = set()
        self.presence = SimpleNamespace(waiting=lambda: self.beside, lost=set())
        self.seated: Any = None
        self.news: Verdict | None = None
        self.can_train = True
        self.spares = SimpleNamespace(
            news=lambda table: self.news, suffice=lambda nodes, least: len(nodes) >= least and self.can_train
        )

    def seek(self) -> bool:
        if self.leads and self.time_ended:
            raise StoreLostError("this host led")
        return self.leads

    def newcomers(self) -> tuple[str, ...]:
        return self.waiting

    def heed(self, interrupts: Interrupts) -> None:
        """Nothing."""

    def lost(self) -> Failure | None:
        if self.broken is not None:
            raise self.broken
        return self.gone

    def explain(self, error: Exception) -> ProcessError:
        return ProcessError(f"explained: {error}")

    def end(self, ending: Ending) -> None:
        self.notices.ended = ending

    def tell(self, line: str) -> None:
        self.heard.append(line)


class Budget:
    """A supervisor with so many restarts."""

    def __init__(self, restarts: int) -> None:
        self.restarts = restarts
        self.causes: list[Failure] = []
        self.admitted: list[tuple[str, ...]] = []
        self.left: list[list[str]] = []
        self.told: list[Verdict] = []
        self.succeeded: list[Failure] = []
        self.steps = [0]
        self.over = False
        self.monitor = self

    @property
    def all_have_made_a_step(self) -> bool:
        return min(self.steps) > 0

    def time_is_over(self) -> bool:
        return self.over

    def may_restart(self, failure: Failure) -> bool:
        self.restarts -= 1
        return self.restarts >= 0 and failure.exit_code == 76

    def restarting(self, failure: Failure) -> None:
        self.causes.append(failure)

    def succeeding(self, failure: Failure) -> None:
        self.succeeded.append(failure)

    def conclude(self, failure: Failure) -> Failure:
        return failure

    def tell(self, verdict: Verdict) -> None:
        self.told.append(verdict)

    def admitting(self, hosts: tuple[str, ...]) -> None:
        self.admitted.append(hosts)

    def leaving(self, hosts: list[str]) -> None:
        self.left.append(hosts)


def member(others: Others, budget: Budget | Supervisor | None = None) -> tuple[Member, Interrupts]:
    interrupts = Interrupts(lambda: None)
    company: Any = others
    supervisor: Any = budget or Budget(1)
    spec: Any = SimpleNamespace(local_world_size=1)
    found = Member(company, supervisor, interrupts, spec)
    found.begin()
    return found, interrupts


def test_the_run_is_done_when_all_are() -> None:
    others = Others()
    leader, _ = member(others)
    assert leader.settle(Outcome(0)) == "wait"
    others.notices.said[1] = Report(0)
    assert leader.settle(Outcome(0)) == "end" and leader.outcome == Outcome(0)
    assert others.notices.ended == Ending(0)


def test_an_agreed_stop_is_everybodys_code() -> None:
    others = Others()
    leader, _ = member(others)
    others.notices.said[1] = Report(75, stopped=True)
    assert leader.settle(Outcome(75)) == "end" and leader.outcome == Outcome(75)


def test_a_failure_elsewhere_is_judged_by_the_leader_and_again_means_all() -> None:
    others, budget = Others(), Budget(1)
    leader, _ = member(others, budget)
    others.notices.said[1] = Report(76, KILLED)
    assert leader.settle(Outcome(76, CLOSED)) == "again"
    assert budget.causes == [KILLED], "the cause, not the consequence that came earlier"
    assert others.seating.doubts is False, "nothing says that the network is to blame"
    leader.begin()
    others.notices.said = [None, Report(76, KILLED)]
    assert leader.settle(Outcome(76, CLOSED)) == "end" and leader.outcome == Outcome(76, KILLED)
    assert others.notices.ended == Ending(76, KILLED)


@pytest.mark.parametrize("leads", [True, False])
def test_who_did_not_reach_whom_is_told_once_by_the_leader(leads: bool) -> None:
    others, budget = Others(leads=leads), Budget(1)
    one, _ = member(others, budget)
    others.apart = "waiting for the network: 1 of 2 ways is closed"
    one.begin()
    one.begin()
    assert [one.what for one in budget.told] == (["waiting for the network: 1 of 2 ways is closed"] if leads else [])


@pytest.mark.parametrize("failure", [CLOSED, replace(KILLED, hung=True)], ids=["a connection lost", "a hang"])
def test_what_the_network_may_have_done_has_all_ways_tried(failure: Failure) -> None:
    others, budget = Others(), Budget(1)
    leader, _ = member(others, budget)
    others.notices.said[1] = Report(76, failure)
    assert leader.settle(Outcome(76, failure)) == "again"
    assert others.seating.doubts is True


@pytest.mark.parametrize("fast_seconds", [-20.0, 0.0, 20.0])
def test_no_wrong_clock_makes_another_cause(monkeypatch: pytest.MonkeyPatch, fast_seconds: float) -> None:
    """The other host raises the user's error; a second later a worker of this one is aborted for it."""
    now = [1000.0]
    monkeypatch.setattr("allranks.surviving.hosts.moments.time.time", lambda: now[0])
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.0)
    others = Others()
    leader, _ = member(others)
    now[0] = 1010.0
    leader.look({}, {})
    error, aborted = replace(ERROR, time=1010.1 + fast_seconds), replace(KILLED, rank=0, time=1011.0, signal="SIGABRT")
    others.notices.said[1] = Report(1, error).posted(1010.3 + fast_seconds)
    now[0] = 1010.5
    leader.look({}, {})
    now[0] = 1013.0
    assert leader.settle(Outcome(1, aborted)) == "end"
    assert others.notices.ended == Ending(1, error)


def test_a_consequence_alone_waits_for_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    others, budget = Others(), Budget(5)
    leader, _ = member(others, budget)
    now = [100.0]
    monkeypatch.setattr("allranks.surviving.hosts.member.time.monotonic", lambda: now[0])
    assert leader.settle(Outcome(76, CLOSED)) == "wait"
    now[0] += others.guard.host_seconds + module.CAUSE_SECONDS - 0.1
    assert leader.settle(Outcome(76, CLOSED)) == "wait", "the other host may be lost"
    now[0] += 0.2
    assert leader.settle(Outcome(76, CLOSED)) == "again" and budget.causes == [CLOSED]


def test_a_lost_host_is_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    others, budget = Others(), Budget(1)
    leader, _ = member(others, budget)
    assert leader.settle(Outcome(76, CLOSED)) == "wait"
    others.gone = GONE
    assert leader.look({}, {}) == 0.0
    assert leader.settle(Outcome(76, CLOSED)) == "again" and budget.causes == [GONE]


def test_an_error_of_the_users_ends_all() -> None:
    others = Others()
    leader, _ = member(others)
    others.notices.said[1] = Report(1, ERROR)
    assert leader.settle(Outcome(76, CLOSED)) == "end" and leader.outcome == Outcome(1, ERROR)


def test_who_was_asked_to_stop_is_not_started_again() -> None:
    others, budget = Others(), Budget(3)
    leader, _ = member(others, budget)
    others.notices.said[1] = Report(130, stopped=True)
    assert leader.settle(Outcome(76, CLOSED)) == "end" and leader.outcome == Outcome(130)


@pytest.mark.parametrize("case", ["goes on", "too few", "the leader", "an error", "Ctrl-C", "no restarts"])
def test_a_host_that_was_asked_to_stop_and_could_not_save_is_as_a_lost_one(case: str) -> None:
    others, budget = Others(), Budget(0 if case == "no restarts" else 1)
    others.least = 2 if case == "too few" else 1
    leader, interrupts = member(others, budget)
    if case == "the leader":
        interrupts.first = signal.SIGTERM
    code = 130 if case == "Ctrl-C" else 76
    others.notices.said[1] = Report(code, ERROR if case == "an error" else None, stopped=True)
    assert leader.settle(Outcome(76, CLOSED)) == ("again" if case == "goes on" else "end")
    assert others.notices.again == (case == "goes on") == (others.notices.ended is None)


A, B, C, D = (_NodeDesc(name, pid, 0) for pid, name in enumerate("abcd", 8))


def four_hosts(*said: Report | None) -> Others:
    """Which need two to go on; `a` leads, and has said nothing yet."""
    others = Others()
    others.table, others.notices.said = replace(others.table, members=(A, B, C, D), workers=(1,) * 4), [None, *said]
    return others


@pytest.mark.parametrize("lost", [{C, D}, {C}])
def test_of_two_hosts_that_are_lost_at_once_both_are_missed(lost: set[_NodeDesc]) -> None:
    """Where too few are left without the one that was asked to stop, all stop, and nobody waits for others to come."""
    others, budget = four_hosts(Report(76, CLOSED, stopped=True), None, None), Budget(1)
    others.gone, others.presence.lost = GONE, {C}
    leader, _ = member(others, budget)
    leader.look({}, {})
    assert leader.settle(Outcome(76, CLOSED)) == "wait", "of the last one nothing is known"
    others.presence.lost = lost
    if D not in lost:
        others.notices.said[3] = Report(76, CLOSED)
    assert leader.settle(Outcome(76, CLOSED)) == ("end" if D in lost else "again")
    assert others.notices.again == (D not in lost) == (others.notices.ended is None)


def test_a_host_of_which_nothing_is_ever_known_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    others = four_hosts(Report(76, CLOSED, stopped=True), Report(76, KILLED), None)
    leader, _ = member(others)
    assert leader.settle(Outcome(76, CLOSED)) == "wait"
    monkeypatch.setattr(module, "CAUSE_SECONDS", -others.guard.host_seconds)
    assert leader.settle(Outcome(76, CLOSED)) == "again", "the next round finds out whether it lives"


def test_a_loss_that_is_found_while_the_leader_waits_for_the_cause_is_the_cause() -> None:
    others, budget = Others(), Budget(1)
    leader, _ = member(others, budget)
    assert leader.settle(Outcome(76, CLOSED)) == "wait"
    others.gone, others.presence.lost = GONE, {others.table.members[1]}
    assert leader.settle(Outcome(76, CLOSED)) == "wait" and budget.causes == []
    assert leader.settle(Outcome(76, CLOSED)) == "again" and budget.causes == [GONE]


def test_a_host_that_was_asked_to_stop_and_is_lost_as_well_is_missed_once() -> None:
    others = four_hosts(Report(76, CLOSED, stopped=True), Report(76, CLOSED), Report(76, CLOSED))
    others.gone, others.presence.lost, others.least = GONE, {B}, 3
    leader, _ = member(others)
    leader.look({}, {})
    assert leader.settle(Outcome(76, CLOSED)) == "again" and others.notices.ended is None


def test_a_second_request_ends_the_run_for_all_at_once() -> None:
    others = Others(leads=False)
    other, interrupts = member(others)
    interrupts.first, interrupts.urgent = signal.SIGINT, True
    assert other.settle(Outcome(130)) == "end" and others.notices.ended == Ending(130)


def test_who_does_not_lead_reports_and_obeys() -> None:
    others, budget = Others(leads=False), Budget(3)
    other, _ = member(others, budget)
    assert other.settle(Outcome(0)) == "wait" and others.notices.said[1] == Report(0)
    others.notices.ended = Ending(0)
    assert other.settle(Outcome(0)) == "end" and other.outcome == Outcome(0)
    others.notices.ended = None
    other.begin()
    assert other.settle(Outcome(76, KILLED)) == "wait" and others.notices.said[1] == Report(76, KILLED)
    others.notices.leader_has_reported = True
    assert other.settle(Outcome(76, KILLED)) == "again"
    assert others.heard == [f"{KILLED.brief()}; the leader decides what follows"]
    assert budget.causes == []


@pytest.mark.parametrize("lost", [None, GONE], ids=["no host is lost", "a host is lost"])
def test_who_has_read_the_end_needs_no_leader_any_more(monkeypatch: pytest.MonkeyPatch, lost: Failure | None) -> None:
    """Its workers may take longer to end than the leader stays, and the store goes with that."""
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.0)
    others = Others(leads=False)
    other, _ = member(others)
    others.notices.ended, others.gone = Ending(1, ERROR), lost
    assert other.look({0: 100}, {0: 1}) == 0.0
    others.broken = StoreLostError("the leader has left")
    monkeypatch.setattr(other, "_attend", others.lost)
    monkeypatch.setattr(others.notices, "ending", others.lost)
    assert other.look({0: 100}, {0: 1}) == 0.0, "some still live"
    assert other.settle(Outcome(76, CLOSED)) == "end" and other.outcome == Outcome(1, ERROR)


def test_who_does_not_lead_finds_out_whether_the_leader_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.0)
    others = Others(leads=False)
    other, _ = member(others)
    assert other.settle(Outcome(76, CLOSED)) == "wait"
    others.gone = replace(GONE, rank=0, host="a")
    other.look({}, {})
    assert other.settle(Outcome(76, CLOSED)) == "again"


def test_a_leader_whose_time_has_ended_judges_nothing() -> None:
    others, budget = Others(), Budget(1)
    found, _ = member(others, budget)
    others.notices.said[1] = Report(76, KILLED)
    others.time_ended = True
    with pytest.raises(ProcessError, match="explained: this host led"):
        found.settle(Outcome(0))
    assert budget.causes == [] and others.notices.ended is None


def test_workers_are_told_of_which_attempt_they_are() -> None:
    found, _ = member(Others(), Budget(1))
    found._company.table = replace(found._company.table, addresses=("10.0.0.1", "10.0.0.2"))
    assert found.begin() == {"ALLRANKS_ATTEMPT": "3", "ALLRANKS_HOST_ADDRESSES": "10.0.0.1,10.0.0.2"}
    found._company.guard = GuardConfig(bad_link="off")
    assert found.begin() == {"ALLRANKS_ATTEMPT": "3"}, "nobody looks"


def test_the_leader_lets_hosts_join_once_all_have_saved() -> None:
    others, budget = Others(), Budget(0)
    leader, _ = member(others, budget)
    budget.steps = [3]
    assert not leader.admits(), "nobody waits"
    others.waiting, budget.steps = ("c",), [0]
    assert not leader.admits(), "workers that start cannot save yet"
    budget.steps = [3]
    assert leader.admits() and not leader.admits(), "said once"
    assert leader.settle(Outcome(75)) == "wait"
    others.notices.said[1] = Report(75)
    assert leader.settle(Outcome(75)) == "again" and budget.admitted == [("c",)]
    assert others.notices.again and others.notices.ended is None

    followers = Others(leads=False)
    follower, _ = member(followers)
    assert not follower.admits() and follower.settle(Outcome(75)) == "wait"
    followers.notices.again = True
    assert follower.settle(Outcome(75)) == "again"


def test_a_host_that_was_asked_to_stop_leaves_and_the_others_start_again() -> None:
    others, budget = Others(), Budget(0)
    others.least = 1
    leader, _ = member(others, budget)
    others.notices.said[1] = Report(75, stopped=True)
    assert leader.settle(Outcome(75)) == "again" and budget.left == [["b"]]
    assert others.notices.again and others.notices.ended is None

    assert not others.notices.handed_over

    followers = Others(leads=False)
    follower, interrupts = member(followers)
    interrupts.first = signal.SIGTERM
    assert follower.settle(Outcome(75)) == "wait"
    followers.notices.again = True
    assert follower.settle(Outcome(75)) == "end" and follower.outcome == Outcome(75)
    assert followers.notices.ended is None, "the run goes on"


def test_a_request_that_comes_after_the_report_is_for_the_next_round() -> None:
    """The leader has counted on this host: what follows is the end for all, as of a request between two rounds."""
    others = Others(leads=False)
    follower, interrupts = member(others)
    assert follower.settle(Outcome(75)) == "wait"
    interrupts.first, others.notices.again = signal.SIGTERM, True
    assert follower.settle(Outcome(75)) == "again"


@pytest.mark.parametrize("stays", [True, False])
def test_a_host_that_waits_counts_for_one_that_leaves_unless_it_was_asked_to_stop_too(stays: bool) -> None:
    others, budget = Others(), Budget(0)
    others.beside = {SPARE, others.table.members[1]}
    others.notices.gone = () if stays else (SPARE,)
    leader, _ = member(others, budget)
    others.notices.said[1] = Report(75, stopped=True)
    assert leader.settle(Outcome(75)) == ("again" if stays else "end") and budget.left == ([["b"]] if stays else [])


def test_a_host_that_is_lost_does_not_go_on_without_the_leader() -> None:
    others, budget = Others(), Budget(1)
    others.least, others.outlives_leader, others.gone = 1, True, GONE
    others.presence.lost = {others.table.members[1]}
    leader, interrupts = member(others, budget)
    leader.look({}, {})
    interrupts.first = signal.SIGTERM
    assert leader.settle(Outcome(76, CLOSED)) == "end" and not others.notices.again
    assert others.notices.ended is not None and budget.causes == []


@pytest.mark.parametrize("saved", [True, False])
def test_who_leads_and_was_asked_to_stop_leaves_where_the_meeting_outlives_it(saved: bool) -> None:
    others, budget = Others(), Budget(1)
    others.least, others.outlives_leader = 1, True
    leader, interrupts = member(others, budget)
    interrupts.first = signal.SIGTERM
    others.notices.said[1] = Report(75) if saved else Report(76, CLOSED)
    mine = Outcome(75) if saved else Outcome(76, CLOSED)
    assert leader.settle(mine) == "end" and leader.outcome == mine
    assert others.notices.again and others.notices.handed_over and others.notices.ended is None
    assert (budget.left, budget.causes) == (([["a"]], []) if saved else ([], [CLOSED]))
    where = "what all have saved" if saved else "the newest checkpoint"
    assert others.heard == [f"this host leaves; the others go on from {where}"]


@pytest.mark.parametrize(
    "case", ["too few", "the leader", "the leader, late", "Ctrl-C", "Ctrl-C at the leader", "both"]
)
def test_where_a_host_cannot_leave_all_stop(case: str) -> None:
    others, budget = Others(), Budget(0)
    others.least, others.outlives_leader = 2 if case == "too few" else 1, case != "the leader"
    leader, interrupts = member(others, budget)
    if case in ("the leader", "Ctrl-C at the leader", "both"):
        interrupts.first = signal.SIGTERM if case == "the leader" else signal.SIGINT
    code = 130 if case.startswith("Ctrl-C") else 75
    if case == "the leader, late":
        assert leader.settle(Outcome(code)) == "wait"
        interrupts.first = signal.SIGTERM
    others.notices.said[1] = Report(code, stopped=case != "the leader")
    assert leader.settle(Outcome(code)) == "end" and others.notices.ended == Ending(code)
    assert budget.left == [] and not others.notices.again and not others.notices.handed_over


@pytest.mark.parametrize("change", ["join", "leave"])
def test_a_run_whose_time_is_over_is_not_started_again_with_other_hosts(change: str) -> None:
    others, budget = Others(), Budget(1)
    others.least = 1
    leader, _ = member(others, budget)
    if change == "join":
        others.waiting, budget.steps = ("c",), [3]
        assert leader.admits()
    budget.over = True
    others.notices.said[1] = Report(75, stopped=change == "leave")
    assert leader.settle(Outcome(75)) == "end" and others.notices.ended == Ending(75)
    assert not others.notices.again and (budget.admitted, budget.left) == ([], [])


def test_a_run_that_is_done_or_stopped_meanwhile_admits_nobody() -> None:
    for said in (Report(0), Report(75, stopped=True)):
        others, budget = Others(), Budget(0)
        leader, _ = member(others, budget)
        others.waiting, budget.steps = ("c",), [3]
        assert leader.admits()
        others.notices.said[1] = said
        assert leader.settle(Outcome(said.exit_code)) == "end" and budget.admitted == []
        assert leader.outcome == Outcome(said.exit_code)


def test_workers_are_ended_for_what_happens_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    others = Others()
    leader, _ = member(others)
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.0)
    assert leader.look({}, {}) is None
    others.notices.said[1] = Report(76, KILLED)
    assert leader.look({}, {}) == LINGER_SECONDS
    others.notices.ended = Ending(130)
    assert leader.look({}, {}) == 0.0


def test_who_leads_after_another_says_so_once() -> None:
    others, budget = Others(), Budget(0)
    leader, _ = member(others, budget)
    assert budget.succeeded == []
    others.succeeded = GONE
    leader.begin()
    leader.begin()
    assert budget.succeeded == [GONE]


def test_a_round_may_have_a_place_for_fewer_workers_of_a_host() -> None:
    company, supervisor, spec = Others(), Budget(1), SimpleNamespace(local_world_size=3)
    given: Any = (company, supervisor, Interrupts(lambda: None), spec)
    Member(*given)
    company.seated(2)
    assert spec.local_world_size == 2


def test_a_lost_store_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    others = Others(leads=False)
    other, _ = member(others)
    others.broken = StoreLostError("reset")
    with pytest.raises(ProcessError, match="explained: reset"):
        other.look({}, {})


class Hosts:
    """Two hosts with one worker each, real Supervisors and a real board; how the workers stand is made up."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **guard: Any) -> None:
        monkeypatch.setattr(module, "LOOK_SECONDS", 0.0)
        monkeypatch.setattr("allranks.surviving.hosts.hearing.OBJECT_SECONDS", 0.0)
        store = MeetingStore(HashStore(), Endpoint("here", 1), "here", serves=True, call_seconds=5.0)
        self.told: tuple[list[Verdict], list[Verdict]] = ([], [])
        self.others = [Others(leads=leads) for leads in (True, False)]
        self.members: list[Member] = []
        for others, told in zip(self.others, self.told, strict=True):
            others.notices = Notices(store, Seal(b"0123456789abcdef"))  # type: ignore[assignment]
            others.guard = GuardConfig(**{"hang_seconds": 15.0, **guard})
            supervisor = Supervisor(Supervision(others.guard, told.append, lambda: None), 1, folder)
            self.members.append(member(others, supervisor)[0])
            supervisor.monitor.beats.close()

    def stand(self, monkeypatch: pytest.MonkeyPatch, *workers: Any) -> None:
        """So the worker of each host stands from now on."""
        for one, worker in zip(self.members, workers, strict=True):
            alarm = Alarm("hung", (worker.row.rank,), 15.0, act=True)
            monkeypatch.setattr(one._supervisor, "notice", lambda pids, ranks, alarm=alarm: alarm)
            monkeypatch.setattr(one._supervisor, "question", lambda pids, ranks, worker=worker: [worker])

    def look(self) -> list[float | None]:
        """What the hosts look like to themselves after the first has asked, and all have had time to answer."""
        self.members[0].watch({0: 100}, {0: 0})
        for _ in range(4):
            seen = [one.look({0: 100 + rank}, {0: rank}) for rank, one in enumerate(self.members)]
        return seen


def test_who_hangs_on_another_host_is_named_on_all_and_blamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = Hosts(tmp_path, monkeypatch)
    hosts.stand(monkeypatch, witness(0, collective(12)), witness(1, collective(11, waits=False)))
    assert hosts.look() == [0.0, 0.0], "the workers of both are ended"
    (verdict,), (other,) = hosts.told
    assert verdict == other and verdict.kind == "straggler"
    assert "rank 1 on b is busy at /home/me/task.py:31 in loss, and the others wait for it" in verdict.what
    assert any(line.startswith("rank 0 on a (pid 100") for line in verdict.evidence)
    hosts.others[1].notices.report(1, 0, Report(0))
    assert hosts.members[1].settle(Outcome(0)) == "again"
    told = hosts.others[1].notices.reports(1, 2)[1]
    failure = None if told is None else told.failure
    assert failure is not None and (failure.rank, failure.host, failure.pid, failure.hung) == (1, "b", 101, True)


def test_a_host_whose_workers_ended_first_tells_the_verdict_before_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = Hosts(tmp_path, monkeypatch)
    hosts.stand(monkeypatch, witness(0, collective(12)), witness(1, collective(11, waits=False)))
    leader, follower = hosts.members
    leader.watch({0: 100}, {0: 0})
    leader.look({0: 100}, {0: 0})
    follower.look({0: 101}, {0: 1})
    leader.look({0: 100}, {0: 0})
    assert len(hosts.told[0]) == 1 and hosts.told[1] == []
    follower.settle(Outcome(76, CLOSED))
    assert hosts.told[1] == hosts.told[0]


def test_a_checkpoint_on_another_host_is_no_hang_and_is_looked_at_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = Hosts(tmp_path, monkeypatch)
    hosts.stand(monkeypatch, witness(0, collective(12)), witness(1, phase="checkpoint"))
    assert hosts.look() == [None, None] and hosts.told == ([], [])
    assert all(one._supervisor is not None and one._supervisor._doubted_at is not None for one in hosts.members)


def test_a_run_that_goes_on_anywhere_while_it_is_judged_is_not_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = Hosts(tmp_path, monkeypatch)
    hosts.stand(monkeypatch, witness(0, collective(12)), witness(1, collective(11, waits=False)))
    monkeypatch.setattr("allranks.surviving.hosts.hearing.OBJECT_SECONDS", 0.3)
    assert hosts.look() == [None, None]
    supervisor = hosts.members[1]._supervisor
    assert supervisor is not None
    supervisor.monitor.beats.slot(0)[STEP] = 13
    time.sleep(0.3)
    assert [hosts.members[place].look({0: 100 + place}, {0: place}) for place in (1, 0)] == [None, None]
    assert hosts.told == ([], [])
    assert all(one._supervisor is not None and one._supervisor._doubted_at is not None for one in hosts.members)


def test_a_host_that_says_nothing_is_named_and_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allranks.surviving.hosts.hearing.COLLECT_SECONDS", 0.0)
    hosts = Hosts(tmp_path, monkeypatch)
    hosts.stand(monkeypatch, witness(0, collective(12)), witness(1))
    leader = hosts.members[0]
    leader.watch({0: 100}, {0: 0})
    assert [leader.look({0: 100}, {0: 0}) for _ in range(2)] == [None, 0.0]
    assert "rank 1 on b is waited for, and that host says nothing" in hosts.told[0][0].what
    leader.settle(Outcome(0))
    report = hosts.others[0].notices.reports(1, 2)[0]
    assert report is not None and report.failure is not None
    assert (report.failure.rank, report.failure.host, report.failure.pid) == (1, "b", 9)


def test_a_store_that_goes_while_hosts_wait_to_join_is_explained() -> None:
    others = Others()

    def ask_nobody() -> tuple[str, ...]:
        raise StoreLostError("reset")

    others.newcomers = ask_nobody  # type: ignore[method-assign]
    budget = Budget(1)
    budget.steps = [1]
    with pytest.raises(ProcessError, match="explained: reset"):
        member(others, budget)[0].admits()
