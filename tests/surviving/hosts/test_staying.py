"""Who stays, and who may leave the others to go on."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc

from allranks.failure import Failure
from allranks.surviving.hosts.ending import Report
from allranks.surviving.hosts.staying import find_leaving, find_staying, is_unheard, may_part

A, B, C, SPARE = (_NodeDesc(name, pid, 0) for pid, name in enumerate("abcs", 8))
STOPPED = Report(75, stopped=True)


def presence(*, lost: set[_NodeDesc], waiting: set[_NodeDesc]) -> Any:
    return SimpleNamespace(lost=frozenset(lost), waiting=lambda: waiting)


@pytest.mark.parametrize(
    ("leaving", "lost", "waiting", "left", "staying"),
    [
        ((), set(), set(), set(), 3),
        ((B,), {C}, set(), set(), 1),
        ((), {B, C}, set(), set(), 1),
        ((B,), {B}, set(), set(), 2),
        ((B,), {C}, {SPARE}, set(), 2),
        ((B,), {C}, {SPARE}, {SPARE}, 1),
        ((), set(), {B, SPARE}, set(), 4),
        ((B,), {C}, {B, C}, set(), 1),
        ((), set(), set(), {C}, 2),
    ],
)
def test_every_host_is_counted_once(leaving: Any, lost: Any, waiting: Any, left: set[_NodeDesc], staying: int) -> None:
    notices: Any = SimpleNamespace(has_left=lambda node: node in left)
    assert len(find_staying((A, B, C), leaving, presence(lost=lost, waiting=waiting), notices)) == staying


def test_who_leaves_and_of_whom_nothing_is_known() -> None:
    reports = [Report(75), STOPPED, None]
    assert find_leaving((A, B, C), reports) == [B]
    assert is_unheard((A, B, C), reports, presence(lost=set(), waiting=set()))
    assert not is_unheard((A, B, C), reports, presence(lost={C}, waiting=set()))
    assert not is_unheard((A, B), reports[:2], presence(lost=set(), waiting=set()))


@pytest.mark.parametrize(
    ("exit_code", "consequence", "stopped", "parts"),
    [
        (76, False, Report(76, stopped=True), True),
        (1, True, Report(76, stopped=True), True),
        (1, False, Report(76, stopped=True), False),
        (76, False, Report(130, stopped=True), False),
        (76, False, Report(76), False),
    ],
)
def test_what_a_host_leaves_to_the_others(exit_code: int, consequence: bool, stopped: Report, parts: bool) -> None:
    cause = Failure(0, "a", 8, 2.0, exit_code, "what", consequence=consequence)
    assert may_part([Report(76), stopped], cause) == parts
