"""The verdict from where ranks stand: one case for each kind, and what must not be mistaken for another."""

from typing import Any

import pytest

from allranks.surviving.hang import SHOWN_RANKS, Absentee, absent_from, diagnose, find_cause, name_ranks, never_meet
from allranks.surviving.monitor import Alarm
from tests.surviving.rows import collective, witness

HUNG = Alarm("hung", (0, 1), 15.0, act=True)
WAITS, BEFORE = collective(12), collective(11, waits=False)
QUIET: dict[str, Any] = {"quiet_seconds": 20.0}


def test_a_rank_that_loads_while_the_others_wait_is_about_data() -> None:
    found = [witness(0, WAITS), witness(1, BEFORE, phase="input", **QUIET)]
    cause = find_cause(found, HUNG)
    assert (cause.kind, cause.ranks) == ("data", (1,))


def test_a_rank_that_saves_or_waits_for_a_disk_is_about_the_disk() -> None:
    changes: tuple[dict[str, Any], ...] = ({"phase": "checkpoint"}, {"state": "D"})
    for change in changes:
        cause = find_cause([witness(0, WAITS), witness(1, BEFORE, **change, **QUIET)], HUNG)
        assert (cause.kind, cause.ranks) == ("disk", (1,))
        words = "rank 1 is waiting for a disk at /home/me/task.py:31 in loss, and the others wait for it"
        assert cause.words == words


def test_a_rank_in_code_of_its_own_is_a_straggler_and_its_line_is_named() -> None:
    verdict, ranks = diagnose([witness(0, WAITS), witness(1, BEFORE)], HUNG, "nothing")
    assert (verdict.kind, ranks) == ("straggler", (1,))
    assert "rank 1 is busy at /home/me/task.py:31 in loss" in verdict.what
    assert "/home/me/task.py:31" in verdict.next
    assert "  waits in all_reduce number 12 over dp_shard, of [4]" in verdict.evidence
    assert "  last ended all_reduce number 11 over dp_shard, of [4]" in verdict.evidence


@pytest.mark.parametrize(
    "other",
    [
        collective(12, name="broadcast"),
        collective(12, sizes=((5,),)),
        collective(3, group="0", axis="all ranks"),
        collective(13),
    ],
)
def test_ranks_in_different_collectives_diverge(other: object) -> None:
    cause = find_cause([witness(0, WAITS), witness(1, other)], HUNG)  # type: ignore[arg-type]
    assert (cause.kind, cause.ranks) == ("divergence", (0, 1))
    assert "they never meet" in cause.words


def test_what_proves_that_ranks_never_meet_is_the_same_place_and_another_collective() -> None:
    for other, proven in (
        (collective(12, name="broadcast"), True),
        (collective(12, sizes=((5,),)), True),
        (WAITS, False),
        (collective(13), False),  # who is further may only be faster
        (collective(12, group="7"), False),
        (collective(12, name="broadcast", waits=False), False),
        (collective(12, name="_allgather_base", p2p=True), False),
    ):
        assert never_meet([witness(0, WAITS), witness(1, other)]) == ((0, 1) if proven else None), other
    one, longer = (collective(12, name="_allgather_base", sizes=sizes) for sizes in (((4,),), ((9,),)))
    assert not never_meet([witness(0, one), witness(1, longer)]) and not never_meet([witness(0), witness(1)])


def test_ranks_that_never_meet_are_to_blame_before_one_that_computes() -> None:
    wide: dict[str, Any] = {"ranks": (0, 1, 2)}
    parted = [witness(0, collective(12, **wide)), witness(1, collective(12, name="broadcast", **wide))]
    cause = find_cause([*parted, witness(2, collective(11, waits=False, **wide))], HUNG)
    assert (cause.kind, cause.ranks) == ("divergence", (0, 1))


def test_the_two_that_have_parted_are_named_and_not_whoever_waits_first() -> None:
    """Two groups of an axis: in one of them a rank computes, in the other one two wait in what never meets."""
    there: dict[str, Any] = {"group": "2", "ranks": (2, 3)}
    parted = [witness(2, collective(9, **there)), witness(3, collective(9, name="broadcast", **there))]
    cause = find_cause([witness(0, WAITS), witness(1, BEFORE), *parted], HUNG)
    assert (cause.kind, cause.ranks) == ("divergence", (2, 3))
    assert cause.words.startswith("rank 2 waits in all_reduce number 9 over dp_shard, of [4], rank 3 in broadcast")


def test_all_ranks_in_the_same_collective_is_the_network() -> None:
    assert find_cause([witness(0, WAITS), witness(1, WAITS)], HUNG).kind == "network"


def test_a_gather_of_unequal_parts_is_no_divergence() -> None:
    one, other = collective(12, name="_allgather_base"), collective(12, name="_allgather_base", sizes=((9,),))
    assert find_cause([witness(0, one), witness(1, other)], HUNG).kind == "network"


def test_neighbours_that_send_and_receive_do_not_diverge() -> None:
    one, other = collective(7, p2p=True, name="send 0->1"), collective(3, p2p=True, name="recv 1<-0")
    assert find_cause([witness(0, one), witness(1, other)], HUNG).kind == "network"


@pytest.mark.parametrize(("one", "other"), [("recv 0<-1", "recv 1<-0"), ("send 0->1", "send 1->0")])
def test_neighbours_that_both_receive_or_both_send_diverge(one: str, other: str) -> None:
    """Also behind others that wait for them, and with the ranks of their group in the names."""
    group: dict[str, Any] = {"p2p": True, "group": "7", "axis": "pp", "ranks": (1, 2)}
    found = [
        witness(0, collective(4, ranks=(0, 3), name="recv 0<-1", p2p=True)),
        witness(1, collective(7, name=one, **group)),
        witness(2, collective(3, name=other, **group)),
    ]
    absent = {3: Absentee("c", 7, ended=False)}
    cause = find_cause(found, HUNG, absent)
    assert (cause.kind, cause.ranks) == ("divergence", (1, 2))
    assert cause.words.startswith(f"rank 1 waits in {one} number 7 over pp, of [4], rank 2 waits in {other} number 3 ")


@pytest.mark.parametrize(
    "names",
    [
        ("recv 0<-1 with send 0->1", "recv 1<-0 with send 1->0"),  # a batch goes both ways at once
        ("recv 0<-2", "recv 1<-0", "recv 2<-1"),  # what each sends to its other neighbour may be on its way
        ("recv 0<-1", "send 1->2", "recv 2<-1"),  # a pipeline whose link from 1 to 2 is broken
        ("send", "send"),
    ],
)
def test_what_may_go_on_is_no_divergence(names: tuple[str, ...]) -> None:
    ranks = tuple(range(len(names)))
    found = [witness(rank, collective(5, p2p=True, name=names[rank], ranks=ranks)) for rank in ranks]
    assert find_cause(found, HUNG).kind == "network"


def test_the_same_pair_in_two_groups_is_no_divergence() -> None:
    found = [
        witness(0, collective(5, p2p=True, name="recv 0<-1", group="1")),
        witness(1, collective(5, p2p=True, name="recv 1<-0", group="2")),
    ]
    assert find_cause(found, HUNG).kind == "network"


def test_a_rank_that_is_gone_is_named() -> None:
    cause = find_cause([witness(0, WAITS)], HUNG)
    assert (cause.kind, cause.ranks) == ("dead_peer", (1,))


def test_nobody_waits_for_anybody() -> None:
    cause = find_cause([witness(0)], Alarm("hung", (0,), 15.0, act=True))
    assert (cause.kind, cause.ranks) == ("stuck", (0,))


@pytest.mark.parametrize("state", ["T", "t"])
@pytest.mark.parametrize("alarm", [HUNG, Alarm("stopped", (1,), 10.0, act=True)])
def test_a_stopped_rank_comes_before_all_else(state: str, alarm: Alarm) -> None:
    found = [witness(0, WAITS), witness(1, BEFORE, state=state, pulse_seconds=20.0, **QUIET)]
    verdict, ranks = diagnose(found, alarm, "x")
    assert (verdict.kind, ranks) == ("stopped", (1,)) and "kill -CONT 101" in verdict.next
    assert "rank 1 (pid 101, stopped): in a step for 20.0 s, step 12 done" in verdict.evidence
    assert not any("holds Python's lock" in line for line in verdict.evidence)


def test_who_computes_on_is_not_blamed_beside_one_that_is_late() -> None:
    busy = witness(2, BEFORE, quiet_seconds=1.0)
    wide = collective(12, ranks=(0, 1, 2))
    assert find_cause([witness(0, wide), witness(1, BEFORE), busy], HUNG).ranks == (1,)


def test_compiled_code_that_holds_pythons_lock_is_seen() -> None:
    verdict, _ = diagnose([witness(0, pulse_seconds=18.0, **QUIET)], HUNG, "x")
    assert any("holds Python's lock" in line for line in verdict.evidence)
    assert not any("holds Python's lock" in line for line in diagnose([witness(0)], HUNG, "x")[0].evidence)


def test_who_has_not_come() -> None:
    by_rank = {0: witness(0, WAITS), 1: witness(1, BEFORE), 2: witness(2, collective(12, group="9"))}
    assert absent_from(collective(12, ranks=(0, 1, 2, 3)), by_rank) == [1, 2, 3]
    assert absent_from(collective(11, ranks=(0, 1)), by_rank) == []


def test_names() -> None:
    assert [name_ranks([1], {}), name_ranks([0, 2], {1: "b", 2: ""})] == ["rank 1 is", "ranks 0, 2 are"]
    assert name_ranks([0, 1], {0: "a", 1: "b"}) == "ranks 0 on a, 1 on b are"


def test_a_rank_of_another_host_is_gone_only_where_that_host_says_so() -> None:
    ended = find_cause([witness(0, WAITS)], HUNG, {1: Absentee("b", 7, ended=True)})
    assert (ended.kind, ended.ranks) == ("dead_peer", (1,)) and "rank 1 on b is not there" in ended.words
    unheard = find_cause([witness(0, WAITS)], HUNG, {1: Absentee("b", 7, ended=False)})
    assert (unheard.kind, unheard.ranks) == ("network", (1,))
    assert unheard.words == "rank 1 on b is waited for, and that host says nothing"


def test_what_is_known_comes_before_a_host_that_says_nothing() -> None:
    wide, ended = collective(12, ranks=(0, 1, 2)), collective(11, waits=False, ranks=(0, 1, 2))
    absent = {2: Absentee("c", 7, ended=False)}
    busy = find_cause([witness(0, wide), witness(1, ended)], HUNG, absent)
    assert (busy.kind, busy.ranks) == ("straggler", (1,))
    other = collective(12, name="broadcast", ranks=(0, 1, 2))
    assert find_cause([witness(0, wide), witness(1, other)], HUNG, absent).kind == "divergence"


def test_of_many_ranks_who_is_in_the_way_is_always_shown() -> None:
    ranks = tuple(range(SHOWN_RANKS + 4))
    waiting = [witness(rank, collective(12, ranks=ranks)) for rank in ranks[:-1]]
    late = witness(ranks[-1], collective(11, waits=False, ranks=ranks))
    evidence = diagnose([*waiting, late], HUNG, "x")[0].evidence
    assert sum(line.startswith("rank ") for line in evidence) == SHOWN_RANKS
    assert any(line.startswith(f"rank {ranks[-1]} ") for line in evidence)
    assert evidence[-2:] == ("4 ranks more are not shown", "x")
