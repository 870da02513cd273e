"""Hosts that meet, in threads of one process; tests/cli/test_running_hosts.py has real commands."""

import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import RendezvousGracefulExitError, RendezvousTimeoutError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _RendezvousState

from allranks.config_guard import GuardConfig
from allranks.errors import LayoutError, ProcessError
from allranks.failure import Failure
from allranks.hosts_request import Endpoint
from allranks.surviving.hosts import company as module
from allranks.surviving.hosts.company import Company
from allranks.surviving.hosts.doors import Ways
from allranks.surviving.hosts.ending import Ending, Report, RunEnded
from allranks.surviving.hosts.meeting import MeetingStore, open_meeting
from allranks.surviving.hosts.presence import SUSPECT_SECONDS
from allranks.surviving.hosts.seal import Seal
from allranks.surviving.hosts.table import Table
from allranks.surviving.interrupts import Interrupts
from tests.free_port import free_port
from tests.processes import wait_until

FAILURE = Failure(1, "b", 9, 2.5, 76, "lost")


class Hosts:
    """Companies of one run, each in a thread's hands."""

    def __init__(self) -> None:
        self.endpoint = Endpoint("127.0.0.1", free_port())
        self.heard: list[str] = []
        self._pool = ThreadPoolExecutor(8)
        self._companies: list[Company] = []

    def company(self, nodes: int = 2, nproc: int = 1, least: int | None = None, **guard: float) -> Company:
        guarded = GuardConfig.model_validate({"host_seconds": 3.0, "join_seconds": 30.0} | guard)
        meeting = open_meeting(self.endpoint, connect_seconds=10, call_seconds=5, tell=self.heard.append)
        seal = Seal(b"0123456789abcdef")
        number = {"nodes": nodes, "least": least or nodes, "nproc": nproc}
        self._companies.append(Company(meeting, seal, **number, guard=guarded, tell=self.heard.append))
        self._companies[-1].seek()
        return self._companies[-1]

    def together(self, *calls: Callable[[], Any]) -> list[Any]:
        return [future.result(60) for future in [self.beside(call) for call in calls]]

    def beside(self, call: Callable[[], Any]) -> "Future[Any]":
        return self._pool.submit(call)

    def close(self) -> None:
        for company in self._companies:
            company._inner._stop_heartbeats()
        self._pool.shutdown()


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    found = Hosts()
    yield found
    found.close()


def report(company: Company, ended: Report) -> None:
    company.notices.report(company.table.number, company.place, ended)


def test_two_rounds_and_the_end(hosts: Hosts) -> None:
    leader, other = hosts.company(nproc=2), hosts.company(nproc=1)
    assert (leader.leads, other.leads) == (True, False)
    first, second = hosts.together(leader.next_rendezvous, other.next_rendezvous)
    assert [(one.rank, one.world_size) for one in (first, second)] == [(0, 2), (1, 2)]
    assert leader.table == other.table and leader.table.workers == (2, 1)
    places = {(one.bootstrap_store_info.master_addr, one.bootstrap_store_info.master_port) for one in (first, second)}
    assert places == {("127.0.0.1", leader.table.port)}
    assert (
        leader.lost() is None and not leader.notices.in_trouble(leader.table.number) and leader.num_nodes_waiting() == 0
    )
    report(other, Report(76, FAILURE))
    assert leader.notices.in_trouble(leader.table.number) and leader.notices.reports(leader.table.number, 2) == [
        None,
        Report(76, FAILURE),
    ]

    again = hosts.beside(other.next_rendezvous)

    def has_left() -> bool:
        assert leader.lost() is None, "who has reported and left for the next round is not lost"
        return other._node not in leader.presence.state.participants

    wait_until(has_left)
    leader.next_rendezvous()
    assert again.result(60).rank == 1
    assert leader.table.number == other.table.number > 0 and leader.table.port not in {port for _, port in places}
    assert not leader.notices.in_trouble(leader.table.number), "that was another round"

    leader.end(Ending(93, FAILURE))
    leader.end(Ending(0))
    assert other.notices.ending() == Ending(93, FAILURE)
    wait_until(other.is_closed)
    with pytest.raises(RunEnded) as caught:
        other.next_rendezvous()
    assert caught.value.ending == Ending(93, FAILURE)
    hosts.together(leader.leave, other.leave)


def test_hosts_join_and_go_between_least_and_most(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allranks.surviving.hosts.handler.LAST_CALL_SECONDS", 0.5)
    leader = hosts.company(nodes=2, least=1)
    assert leader.next_rendezvous().world_size == 1 and leader.newcomers() == ()
    other = hosts.company(nodes=2, least=1)
    waiting = hosts.beside(other.next_rendezvous)
    wait_until(lambda: leader.lost() is None and leader.newcomers() != ())
    assert hosts.together(leader.next_rendezvous)[0].world_size == 2
    assert waiting.result(60).rank == 1 and leader.newcomers() == ()
    other._inner._stop_heartbeats()
    wait_until(lambda: leader.lost() is not None)
    assert leader.next_rendezvous().world_size == 1 and leader.lost() is None


def test_hosts_of_a_first_round_that_do_not_reach_each_other_start_no_worker(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader, other = hosts.company(), hosts.company()
    both = threading.Barrier(2)  # nobody knows of a way before both have looked

    def look(*words: Any) -> Ways:
        both.wait(30)
        return Ways("1 of 2 ways is closed", frozenset({0, 1}))

    monkeypatch.setattr(module, "look_around", look)
    for one in [hosts.beside(one.next_rendezvous) for one in (leader, other)]:
        with pytest.raises(ProcessError, match=r"^1 of 2 ways is closed$"):
            one.result(60)
    assert leader.notices.ending() == Ending(76, message="1 of 2 ways is closed"), "the leader ends the run for all"


def test_a_host_that_joins_and_is_not_reached_ends_and_the_others_go_on(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader, other = (hosts.company(nodes=3, least=2) for _ in range(2))
    looked, everybody = list[tuple[int, ...]](), threading.Barrier(3)  # nobody knows of a way before all have looked

    def look(notices: Any, table: Table, place: int, is_over: Callable[[], bool]) -> Ways:
        assert not is_over()
        looked.append(table.tried)
        if len(table.members) < 3:
            return Ways()
        everybody.wait(30)
        return Ways("a way is closed", frozenset({2}))

    monkeypatch.setattr(module, "look_around", look)
    hosts.together(leader.next_rendezvous, other.next_rendezvous)
    late = hosts.company(nodes=3, least=2)
    refused = hosts.beside(late.next_rendezvous)
    for one in (leader, other):
        wait_until(lambda one=one: one._inner.num_nodes_waiting() == 1)  # type: ignore[misc]
    hosts.together(leader.next_rendezvous, other.next_rendezvous)
    with pytest.raises(ProcessError, match=r"^a way is closed$"):
        refused.result(60)
    assert leader.table == other.table and len(leader.table.members) == 2
    assert leader.notices.ending() is None
    assert looked == [(0, 1)] * 2 + [(2,)] * 3, "nobody is new in the last round"
    assert sum("cannot join: a way is closed" in line for line in hosts.heard) == 2


@pytest.mark.full
def test_hosts_that_do_not_reach_each_other_any_more_meet_again_until_they_do(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader, other = pair = (hosts.company(join_seconds=4.0), hosts.company(join_seconds=4.0))
    monkeypatch.setattr(module, "look_around", lambda *words: Ways())
    hosts.together(*(one.next_rendezvous for one in pair))
    first = leader.table.number
    closed, both = {first + 1, first + 2}, threading.Barrier(2)

    def look(notices: Any, table: Table, place: int, is_over: Callable[[], bool]) -> Ways:
        assert table.tried == (0, 1) and table.new == ()
        both.wait(30)
        return Ways("a way is closed") if table.number in closed else Ways()

    monkeypatch.setattr(module, "look_around", look)
    leader.seating.doubts = True
    hosts.together(*(one.next_rendezvous for one in pair))
    assert leader.table == other.table and leader.table.number == first + 3 and len(leader.table.members) == 2
    assert hosts.heard.count("waiting for the network: a way is closed") == 4
    assert leader.apart == "waiting for the network: a way is closed"

    def wait_and_look(*words: Any) -> Ways:
        time.sleep(0.5)
        return Ways("a way is closed")

    monkeypatch.setattr(module, "look_around", wait_and_look)
    leader.seating.doubts = True
    for one in [hosts.beside(one.next_rendezvous) for one in pair]:
        with pytest.raises((ProcessError, RunEnded)):
            one.result(60)
    assert leader.notices.ending() == Ending(76, message="a way is closed"), "after guard.join_seconds"


def test_who_leaves_is_waited_for_neither_by_the_next_round_nor_by_silence(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader, other = (hosts.company(nodes=2, least=1, host_seconds=600.0) for _ in range(2))
    hosts.together(leader.next_rendezvous, other.next_rendezvous)
    report(other, Report(75, stopped=True))
    leader.notices.start_again(leader.table.number)
    monkeypatch.setattr(leader._inner._settings.timeout, "_last_call", timedelta(seconds=600))
    going_on = hosts.beside(leader.next_rendezvous)  # before the other has left
    other.leave()
    assert going_on.result(60).world_size == 1 and leader.table.members == (leader._node,)
    assert leader.lost() is None


def test_one_more_than_there_is_room_for_waits_and_learns_the_end(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("allranks.surviving.hosts.waiting.PATIENCE_SECONDS", 0.5)
    leader, other = hosts.company(), hosts.company()
    hosts.together(leader.next_rendezvous, other.next_rendezvous)
    surplus = hosts.company()
    surplus.heed(Interrupts(lambda: None))
    waiting = hosts.beside(surplus.next_rendezvous)
    wait_until(lambda: leader.lost() is None and surplus._node in leader.presence.state.redundancy_list)
    assert leader.newcomers() == () and leader.presence.waiting() == {surplus._node}
    wait_until(lambda: hosts.heard[-1:] == ["all 2 places are taken: this host waits until one is free"])
    leader.end(Ending(0))
    with pytest.raises(RunEnded) as caught:
        waiting.result(60)
    assert caught.value.ending == Ending(0)


def test_whose_time_is_up_just_as_a_round_beside_it_ends_waits_on(hosts: Hosts) -> None:
    spare, asked = hosts.company(nodes=2, least=1), list[float]()

    def come_too_late() -> None:
        asked.append(spare._waiting._beside_at)
        if len(asked) == 3:
            spare._waiting._beside_at -= spare.guard.join_seconds
        raise RendezvousTimeoutError

    spare._inner.next_rendezvous = come_too_late  # type: ignore[assignment, method-assign]
    spare._waiting.begin()
    spare._waiting._beside_at = time.monotonic()
    with pytest.raises(RendezvousTimeoutError):
        spare._meet()
    assert len(asked) == 3


@pytest.mark.parametrize(
    ("least", "asked", "ends"),
    [(2, signal.SIGTERM, False), (3, signal.SIGTERM, True), (2, signal.SIGINT, True)],
    ids=["the others are enough", "they are not", "Ctrl-C"],
)
def test_who_is_asked_to_stop_while_a_round_forms_ends_it_for_all_only_where_it_is_needed(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch, least: int, asked: signal.Signals, ends: bool
) -> None:
    monkeypatch.setattr("allranks.surviving.hosts.handler.LAST_CALL_SECONDS", 600.0)
    leader, other, third = three = [hosts.company(nodes=4, least=least) for _ in range(3)]
    interrupts = Interrupts(lambda: None)
    third.heed(interrupts)
    waiting = {one: hosts.beside(one.next_rendezvous) for one in three}

    def all_are_there() -> bool:
        return leader.presence.state.participants.keys() == {one._node for one in three}

    wait_until(all_are_there)
    interrupts.first = asked
    with pytest.raises(RunEnded) as caught:
        waiting[third].result(60)
    code = 130 if asked == signal.SIGINT else 76
    assert caught.value.ending == Ending(code)
    assert leader.notices.ending() == (Ending(code) if ends else None)
    third.leave()
    if not ends:
        wait_until(lambda: third._node not in leader.presence.state.participants)
        leader.end(Ending(0))
    for one in (leader, other):
        with pytest.raises(RunEnded):
            waiting[one].result(60)


def pairs(workers: Sequence[int]) -> tuple[int, ...]:
    """What a layout with tp=2 takes of hosts with one worker each."""
    if len(workers) < 2:
        raise LayoutError(f"the layout does not take {len(workers)} worker(s)")
    return (1,) * (len(workers) // 2 * 2) + (0,) * (len(workers) % 2)


def test_whom_the_layout_leaves_over_waits_as_a_spare_and_takes_a_lost_hosts_place(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("allranks.surviving.hosts.waiting.PATIENCE_SECONDS", 0.2)
    first, second, third = three = [hosts.company(nodes=4, least=1) for _ in range(3)]
    found: dict[Company, Future[Any]] = {}
    for one in three:
        one.seating.seat = pairs
        found[one] = hosts.beside(one.next_rendezvous)
    wait_until(lambda: sum(future.done() for future in found.values()) == 2)
    (spare,) = (one for one in three if not found[one].done())
    (other,) = {second, third} - {spare}
    assert first.table == other.table and first.table.workers == (1, 1) and spare is not first
    assert first.table.spares == (socket.gethostname(),)
    told = first.spares.news(first.table)
    assert told is not None and told.kind == "spare" and "of the workers that are there 2 train" in told.what
    assert first.spares.news(first.table) is None, "once"
    wait_until(lambda: any("this host waits as a spare: of the workers that are" in line for line in hosts.heard))
    wait_until(lambda: first.lost() is None and spare._node in first.presence.state.wait_list)
    assert first.newcomers() == (), "three are of no more use than two"
    late = hosts.company(nodes=4, least=1)
    late.seating.seat = pairs
    found[late] = hosts.beside(late.next_rendezvous)
    wait_until(lambda: first.lost() is None and first.newcomers() != ())
    assert len(first.newcomers()) == 2, "and four are"
    other._inner._stop_heartbeats()
    wait_until(lambda: first.lost() is not None)
    assert first.lost() is not None
    first.next_rendezvous()
    wait_until(lambda: found[spare].done() or found[late].done())
    assert len(first.table.members) == 2 and other._node not in first.table.members
    (left,) = {spare._node, late._node} - {*first.table.members}
    wait_until(lambda: first.lost() is None and left in first.presence.state.wait_list)
    first.end(Ending(0))
    for one, future in found.items():
        if one not in (first, other) and one._node == left:
            with pytest.raises(RunEnded):
                future.result(60)


def test_too_few_hosts_for_the_layout_wait_for_more_and_end_with_76(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("allranks.surviving.hosts.handler.LAST_CALL_SECONDS", 0.5)
    leader = hosts.company(nodes=3, least=1, join_seconds=6.0)
    leader.seating.seat = pairs
    waiting = hosts.beside(leader.next_rendezvous)
    short = "the layout does not take 1 worker(s): waiting up to 6 s for more (guard.join_seconds)"
    wait_until(lambda: short in hosts.heard)
    other = hosts.company(nodes=3, least=1, join_seconds=6.0)
    assert hosts.together(other.next_rendezvous)[0].world_size == 2
    assert waiting.result(60).rank == 0
    other._inner._stop_heartbeats()
    wait_until(lambda: leader.lost() is not None)
    line = (
        r"^1 of 3 hosts are here \(.+\), too few to train: the layout does not take 1 worker\(s\); the others did not"
    )
    with pytest.raises(ProcessError, match=line):
        leader.next_rendezvous()
    ending = leader.notices.ending()
    assert ending is not None and ending.exit_code == 76


def test_who_joins_does_not_outlast_the_run(hosts: Hosts) -> None:
    """Wherever it waits: also for a leader that opens no table any more."""
    company, state = hosts.company(), _RendezvousState()
    company._waiting.begin()
    company._see(state)
    state.closed = True
    with pytest.raises(RendezvousGracefulExitError):
        company._see(state)


def test_who_waits_for_room_and_is_asked_to_stop_ends_nobodys_run(hosts: Hosts) -> None:
    leader, other = hosts.company(), hosts.company()
    hosts.together(leader.next_rendezvous, other.next_rendezvous)
    surplus, interrupts = hosts.company(), Interrupts(lambda: None)
    surplus.heed(interrupts)
    waiting = hosts.beside(surplus.next_rendezvous)
    wait_until(lambda: leader.lost() is None and surplus._node in leader.presence.state.redundancy_list)
    interrupts.first = signal.SIGTERM
    with pytest.raises(RunEnded) as caught:
        waiting.result(60)
    assert caught.value.ending.exit_code == 76
    assert leader.notices.ending() is None and not leader.is_closed()


def test_a_host_that_falls_silent_is_lost_for_all(hosts: Hosts) -> None:
    leader, other, silent = (hosts.company(nodes=3) for _ in range(3))
    hosts.together(*(one.next_rendezvous for one in (leader, other, silent)))
    places = {one.table.place_of(one._node): one for one in (leader, other, silent)}
    silent, other = places[2], places[1]
    time.sleep(1.5)  # signs of life come from now and then while hosts join, steadily afterwards
    began = time.monotonic()
    silent._inner._stop_heartbeats()
    for one in (leader, other):
        wait_until(lambda one=one: one.lost() is not None)  # type: ignore[misc]
        lost = one.lost()
        assert lost is not None
        assert (lost.rank, lost.exit_code, lost.consequence) == (2, 76, False)
        assert "its host is lost: no sign of life for 3 s (guard.host_seconds)" in lost.brief()
    assert time.monotonic() - began > 1.5
    with_new = hosts.company(nodes=3)
    hosts.together(*(one.next_rendezvous for one in (leader, other, with_new)))
    assert len(leader.table.members) == 3 and silent._node not in leader.table.members
    assert leader.lost() is None


@pytest.mark.full
def test_where_workers_have_lost_a_peer_a_short_silence_is_enough_and_the_rest_go_on_at_once(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("allranks.surviving.hosts.handler.LAST_CALL_SECONDS", 60.0)
    leader, other, silent = (hosts.company(nodes=3, least=1, host_seconds=60.0) for _ in range(3))
    hosts.together(*(one.next_rendezvous for one in (leader, other, silent)))
    places = {one.table.place_of(one._node): one for one in (leader, other, silent)}
    silent, other = places[2], places[1]
    silent._inner._stop_heartbeats()
    time.sleep(SUSPECT_SECONDS + 1.5)
    for one in (leader, other):
        one._inner._keep_alive()
    assert leader.lost() is None, "silence alone takes guard.host_seconds"
    report(other, Report(76, replace(FAILURE, consequence=True)))
    lost = leader.lost()
    assert lost is not None and lost.rank == 2 and not lost.consequence
    assert "workers have lost their connection" in lost.brief()
    began = time.monotonic()
    hosts.together(*(one.next_rendezvous for one in (leader, other)))
    assert len(leader.table.members) == 2 and silent._node not in leader.table.members
    assert time.monotonic() - began < 20, "a cap; nobody waits for the lost one, nor for the end of a last call"


@pytest.mark.sample(2)
@pytest.mark.parametrize("later_seconds", [0.0, 1.0], ids=["in the same moment", "a moment later"])
def test_where_two_hosts_fall_silent_the_rest_await_neither(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch, later_seconds: float
) -> None:
    monkeypatch.setattr("allranks.surviving.hosts.handler.LAST_CALL_SECONDS", 60.0)
    four = [hosts.company(nodes=4, least=1, host_seconds=60.0) for _ in range(4)]
    hosts.together(*(one.next_rendezvous for one in four))
    leader, other, first, second = sorted(four, key=lambda one: one.place)
    for one in (first, second):
        one._inner._stop_heartbeats()
        one._inner._keep_alive()
    time.sleep(later_seconds)
    second._inner._keep_alive()
    for one in (leader, other):
        report(one, Report(76, replace(FAILURE, consequence=True)))
    wait_until(lambda: leader.lost() is not None)
    began = time.monotonic()
    wait_until(lambda: leader.lost() is not None and leader.presence.lost == {first._node, second._node})
    hosts.together(*(one.next_rendezvous for one in (leader, other)))
    assert leader.table == other.table and set(leader.table.members) == {leader._node, other._node}
    assert leader.presence.lost == frozenset()
    assert time.monotonic() - began < 20, "a cap; silence alone takes guard.host_seconds"


def test_who_was_suspected_and_lives_joins_again(hosts: Hosts) -> None:
    leader, other = (hosts.company(nodes=2, host_seconds=60.0) for _ in range(2))
    hosts.together(leader.next_rendezvous, other.next_rendezvous)
    leader.lost()
    leader.presence._reader.take_for_lost(other._node)
    hosts.together(leader.next_rendezvous, other.next_rendezvous)
    assert leader.table == other.table and len(leader.table.members) == 2


def test_a_leader_that_has_reported_and_falls_silent_before_it_judges_is_lost(hosts: Hosts) -> None:
    leader, other, third = (hosts.company(nodes=3) for _ in range(3))
    hosts.together(*(one.next_rendezvous for one in (leader, other, third)))
    for one in (leader, third):
        report(one, Report(0))
        one._inner._stop_heartbeats()
    began = time.monotonic()
    wait_until(lambda: other.lost() is not None)
    lost = other.lost()
    assert lost is not None and lost.rank == 0, "of the third, which has reported as well, nobody waits for a word"
    assert time.monotonic() - began > 1.5


def test_who_waits_in_vain_says_who_is_here(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allranks.surviving.hosts.waiting.PATIENCE_SECONDS", 0.5)
    leader = hosts.company(join_seconds=3.0)
    with pytest.raises(ProcessError, match=r"1 of 2 hosts are here \(.+\); the others did not come to .* within 3 s"):
        leader.next_rendezvous()
    assert len(hosts.heard) == 1 and "waiting up to 3 s (guard.join_seconds)" in hosts.heard[0]
    ending = leader.notices.ending()
    assert ending is not None and ending.exit_code == 76, "for those who come too late"


def test_a_request_to_stop_a_host_that_waits_ends_the_waiting_of_all(hosts: Hosts) -> None:
    leader, other = hosts.company(nodes=3), hosts.company(nodes=3)
    interrupts = Interrupts(lambda: None)
    other.heed(interrupts)
    waiting = [hosts.beside(one.next_rendezvous) for one in (leader, other)]
    time.sleep(1.0)
    interrupts.first = signal.SIGTERM
    began = time.monotonic()
    for one in waiting:
        with pytest.raises(RunEnded):
            one.result(60)
    assert leader.is_closed() and time.monotonic() - began < 20, "a cap; guard.join_seconds is 30"


def test_a_request_to_stop_ends_the_waiting(hosts: Hosts) -> None:
    leader = hosts.company()
    interrupts = Interrupts(lambda: None)
    leader.heed(interrupts)
    waiting = hosts.beside(leader.next_rendezvous)
    time.sleep(0.5)
    interrupts._note(2, None)
    with pytest.raises(RunEnded) as caught:
        waiting.result(60)
    assert caught.value.ending.exit_code == 130


def test_a_stranger_who_writes_ends_the_run_with_one_line(hosts: Hosts) -> None:
    leader, other = hosts.company(), hosts.company()
    hosts.together(leader.next_rendezvous, other.next_rendezvous)
    stranger: MeetingStore = open_meeting(hosts.endpoint, connect_seconds=5, call_seconds=5, tell=print)
    stranger.write("rendezvous", "cos\nsystem\n(S'touch harm'\ntR.")
    for one in (leader, other):
        wait_until(lambda one=one: fails(one.lost))  # type: ignore[misc]
    with pytest.raises(ProcessError, match=r"somebody without this run's secret writes at 127\.0\.0\.1"):
        leader.next_rendezvous()


def test_a_flood_of_garbage_on_the_port_changes_nothing(hosts: Hosts) -> None:
    """A thousand connections, a tenth of which stay open to the end, with what no client of the store would send."""
    leader, other = hosts.company(nodes=2, least=1), hosts.company(nodes=2, least=1)
    hosts.together(leader.next_rendezvous, other.next_rendezvous)
    draw, address = random.Random(0), (hosts.endpoint.host, hosts.endpoint.port)
    words = (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\x00" * 4096, b"\x85" + draw.randbytes(300), b"")
    with ExitStack() as stay:
        for number in range(1000):
            flood = socket.create_connection(address, timeout=10)
            with suppress(ConnectionError):
                flood.sendall(words[number % len(words)] or draw.randbytes(number % 97))
            if number % 10:
                flood.close()
            else:
                stay.callback(flood.close)
        assert leader.lost() is None and other.lost() is None
        hosts.together(leader.next_rendezvous, other.next_rendezvous)
    assert leader.table == other.table and len(leader.table.members) == 2
    assert all(line.endswith(" leads") for line in hosts.heard), hosts.heard


def fails(call: Callable[[], object]) -> bool:
    """Whether a call raises what a forged state does."""
    try:
        call()
    except Exception as error:
        return "not signed" in str(error)
    return False


def test_who_leaves_last_closes_the_meeting_where_no_leader_lives(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader, other, third = (hosts.company(nodes=3) for _ in range(3))
    hosts.together(*(one.next_rendezvous for one in (leader, other, third)))
    closed: list[bool] = []

    def close(*, over: bool) -> None:
        closed.append(over)

    for one in (other, third):
        monkeypatch.setattr(one._meeting, "close", close)
    leader._inner._stop_heartbeats()
    other.end(Ending(130))
    wait_until(lambda: other.lost() is not None and other.presence.is_silent(leader._node))
    other.leave()
    wait_until(lambda: third.lost() is not None and third.presence.is_silent(leader._node))
    third.leave()
    assert closed == [False, True]


def test_a_host_that_ends_its_workers_for_seconds_still_reads_the_end(hosts: Hosts) -> None:
    """It looks at nothing meanwhile, and the store goes with the leader."""
    leader, other = hosts.company(), hosts.company()
    hosts.together(leader.next_rendezvous, other.next_rendezvous)
    leader.end(Ending(1, FAILURE))
    done = hosts.beside(leader.leave)
    time.sleep(6.0)
    assert other.notices.ending() == Ending(1, FAILURE) and not done.done()
    other.leave()
    done.result(60)


def test_the_leader_stays_until_the_others_have_left(hosts: Hosts) -> None:
    leader, other = hosts.company(), hosts.company()
    hosts.together(leader.next_rendezvous, other.next_rendezvous)
    leader.end(Ending(0))
    leaving = threading.Event()

    def leave() -> None:
        leader.leave()
        leaving.set()

    done = hosts.beside(leave)
    assert not leaving.wait(0.5)
    other.leave()
    done.result(60)
