"""Whom the leader lets in, and what it tells of those whom it does not."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc

from allranks.errors import LayoutError
from allranks.surviving.hosts.spares import Spares, own_words
from allranks.surviving.hosts.table import Table, key_of

A, B, C, D, E = (_NodeDesc(name, pid, 0) for pid, name in enumerate("abcde", 8))


class Board:
    """The notices."""

    def __init__(self) -> None:
        self.posted: list[tuple[str, Any]] = []

    def post(self, key: str, value: Any) -> None:
        self.posted.append((key, value))


def pairs(workers: Sequence[int]) -> tuple[int, ...]:
    """What a layout with tp=2 takes of hosts with one worker each."""
    if len(workers) < 2:
        raise LayoutError("too few")
    return (1,) * (len(workers) // 2 * 2) + (0,) * (len(workers) % 2)


def spares(board: Board, *unknown: _NodeDesc, most: int = 4) -> Spares:
    seating: Any = SimpleNamespace(seat=pairs, workers_of=lambda node: 0 if node in unknown else 1)
    notices: Any = board
    return Spares(notices, seating, most)


def table(*nodes: _NodeDesc, spares: tuple[str, ...] = ()) -> Table:
    return Table(3, nodes, "", 0, (1,) * len(nodes), spares=spares)


def test_who_comes_is_let_in_where_more_workers_train_then() -> None:
    board, two = Board(), table(A, B)
    found = spares(board)
    found.begin_round(two)
    assert found.news(two) is None and found.let_in(two, set()) == () and board.posted == []
    assert found.let_in(two, {C}) == ()
    assert board.posted == [("spares/3", {"workers": 2, "hosts": [key_of(C)]})]
    told = found.news(two)
    assert told is not None and told.kind == "spare"
    assert (
        told.what
        == "c waits as a spare: of the workers that are there 2 train, and layout and global batch take no more"
    )
    assert found.let_in(two, {C}) == () and len(board.posted) == 1 and found.news(two) is None, "once"
    assert found.let_in(two, {C, D}) == ("c", "d")


def test_no_more_hosts_are_let_in_than_the_run_has_places() -> None:
    found = spares(Board(), most=3)
    two = table(A, B)
    found.begin_round(two)
    assert found.let_in(two, {C, D}) == ()


def test_who_has_not_said_how_many_workers_it_has_is_asked_again() -> None:
    board = Board()
    found = spares(board, D)
    two = table(A, B)
    found.begin_round(two)
    assert found.let_in(two, {D}) == () and board.posted == []
    assert found.let_in(two, {C, D}) == () and board.posted[0][1]["hosts"] == [key_of(C)]


def test_a_spare_of_a_round_is_told_again_only_where_another_one_comes() -> None:
    found, two = spares(Board()), table(A, B, spares=("c",))
    for expected in (True, False):
        found.begin_round(two)
        assert (found.news(two) is not None) == expected
    more = table(A, B, spares=("1 of 2 workers on b", "c"))
    found.begin_round(more)
    told = found.news(more)
    assert told is not None and told.what.startswith("1 of 2 workers on b waits as a spare: ")


@pytest.mark.parametrize(("nodes", "enough"), [((A, B, C), True), ((A, B), True), ((A,), False), ((), False)])
def test_how_few_can_train(nodes: tuple[_NodeDesc, ...], enough: bool) -> None:
    assert spares(Board()).can_train(nodes) == enough


def test_a_spare_hears_what_it_waits_for() -> None:
    assert own_words(2).endswith("take no more; it takes the place of a host that is lost or leaves")
