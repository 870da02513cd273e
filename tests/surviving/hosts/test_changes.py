"""Who joins or leaves, as the leader decides it; test_member.py has what follows of it."""

import signal
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc

from allranks.surviving.hosts.changes import Changes
from allranks.surviving.hosts.ending import Report
from allranks.surviving.interrupts import Interrupts
from allranks.verdict import Verdict
from tests.surviving.hosts.test_member import KILLED, Budget, Others

SPARE = Verdict("spare", "c waits as a spare", (), "nothing")
STOPPED = [Report(75), Report(75, stopped=True)]


def changes(others: Others, budget: Budget | None = None) -> tuple[Changes, Interrupts]:
    interrupts = Interrupts(lambda: None)
    company: Any = others
    supervisor: Any = budget or Budget(1)
    return Changes(company, supervisor, interrupts), interrupts


@pytest.mark.parametrize("leads", [True, False])
def test_who_waits_as_a_spare_is_told_by_the_leader(leads: bool) -> None:
    others, budget = Others(leads=leads), Budget(1)
    found, _ = changes(others, budget)
    others.news, others.apart = SPARE, "waiting for the network"
    found.begin()
    assert [one.kind for one in budget.told] == (["network", "spare"] if leads else []) and others.apart == ""


def test_who_comes_and_is_of_no_use_is_told_of_and_stops_nobody() -> None:
    others, budget = Others(), Budget(1)
    found, _ = changes(others, budget)
    budget.steps, others.news = [0], SPARE
    assert not found.admits() and budget.told == [], "not before the first step"
    budget.steps = [1]
    assert not found.admits() and budget.told == [SPARE]
    others.news, others.waiting = None, ("c", "d")
    assert found.admits() and not found.admits(), "once"
    assert found.may_admit([Report(75), Report(75)]) and budget.admitted == [("c", "d")] and others.notices.again


@pytest.mark.parametrize("can_train", [True, False])
def test_who_is_asked_to_stop_leaves_where_the_layout_takes_the_others(can_train: bool) -> None:
    others, budget = Others(), Budget(1)
    others.least, others.can_train = 1, can_train
    found, _ = changes(others, budget)
    assert found.may_leave(STOPPED) == can_train and others.notices.again == can_train
    assert found.goes_on_without([Report(76), Report(76, stopped=True)], KILLED) == can_train
    assert budget.left == ([["b"]] if can_train else [])


def test_the_layout_is_asked_about_those_that_stay_and_those_that_wait() -> None:
    asked: list[list[_NodeDesc]] = []

    def suffice(nodes: list[_NodeDesc], least: int) -> bool:
        asked.append(nodes)
        return len(nodes) >= least

    others = Others()
    others.beside = {_NodeDesc("c", 10, 0)}
    others.spares = SimpleNamespace(news=lambda table: None, suffice=suffice)
    found, interrupts = changes(others)
    assert found.may_leave(STOPPED)
    assert [[node.addr for node in nodes] for nodes in asked] == [["a", "c"]]
    interrupts.first = signal.SIGINT
    assert not found.may_leave(STOPPED), "Ctrl-C is for all"
