"""Who is missing among NCCL's timeouts: nobody is accused of whom a log knows nothing."""

from collections.abc import Iterable

import pytest

from allranks.reporting.timeouts import Job, Timeouts, compare

MESSAGE = "NCCL waited in vain in ALLREDUCE (number 41, 4096 values)"
WHOLE = "0(default_pg)"


def lines(rank: int, place: int | None = None, group: str = "", seq: int = 41, op: str = "ALLREDUCE") -> list[str]:
    """What torch 2.13 prints of one rank, as far as it says which group waits."""
    place = rank if place is None else place
    at = f"[rank{rank}]:[E606 09:09:08.164985384 ProcessGroupNCCL.cpp:757] "
    call = f"WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn=4096, NumelOut=4096, Timeout(ms)=600000)"
    caught = f"[Rank {place}] Watchdog caught collective operation timeout: {call} ran for 600004 milliseconds\n"
    here = f"[PG ID 1 PG GUID {group} Rank {place}] "
    failed = (
        f"{at}{here} failure detected by watchdog at work sequence id: {seq} PG status: last enqueued work: {seq}\n"
    )
    ended = f"  what():  {here}Process group watchdog thread terminated with exception: {caught}"
    return [at + caught, failed, ended] if group else [at + caught]


def read(*told: Iterable[str]) -> Timeouts:
    timeouts = Timeouts()
    every = [line for one in told for line in one]
    assert list(timeouts.passing(every)) == every
    return timeouts


def said(*told: Iterable[str], job: Job | None = None) -> tuple[str, str]:
    found = compare(read(*told).newest(), job)
    assert found is not None
    return found


@pytest.mark.parametrize("group", ["", WHOLE])
def test_a_nodes_log_accuses_no_rank_of_another_node(group: str) -> None:
    what, move = said(*(lines(rank, group=group) for rank in range(8, 16)))
    assert what == f"{MESSAGE}: ranks 8 to 15, all that this log has, alike"
    assert move.startswith("if the job has other ranks (behind the last one, on other nodes), look at their logs first")
    assert "rank 0" not in what + move


@pytest.mark.parametrize("group", ["", WHOLE])
def test_a_last_rank_that_died_comes_before_the_network(group: str) -> None:
    what, move = said(*(lines(rank, group=group) for rank in range(7)))
    assert what == f"{MESSAGE}: ranks 0 to 6, all that this log has, alike"
    assert move.index("behind the last one") < move.index("died or stands in code of its own") < move.index("network")


@pytest.mark.parametrize("group", ["", WHOLE])
def test_a_gap_between_those_that_are_seen_is_named(group: str) -> None:
    what, move = said(*(lines(rank, group=group) for rank in (8, 9, 11, 12)))
    assert what == f"{MESSAGE}: rank 10 did not come" and move.startswith("rank 10 died")


def test_ranks_without_order_are_listed_as_far_as_there_is_room() -> None:
    what, _ = said(*(lines(rank) for rank in range(0, 50, 2)))
    assert what.endswith("21, 23, 25, 27, 29, 31 and 8 more did not come")


def test_a_group_of_every_second_rank_has_no_gaps() -> None:
    """dp=4 beside tp=2: places 0, 1, 3 are ranks 0, 2, 6, and place 2 is rank 4."""
    what, _ = said(*(lines(2 * place, place, "5(mesh_dp)") for place in range(4)))
    assert what == f"{MESSAGE} of group mesh_dp: ranks 0, 2, 4, 6, all that this log has, alike"
    what, move = said(*(lines(2 * place + 1, place, "6(mesh_dp)") for place in (0, 1, 3)))
    assert what == f"{MESSAGE} of group mesh_dp: rank 5 did not come" and move.startswith("rank 5 died")


def test_who_waits_in_another_group_is_not_missing() -> None:
    """tp=4 twice: rank 2 died, and 5 waits for 1 in a group of its own."""
    first = [lines(rank, rank, "1(mesh_tp)") for rank in (0, 1, 3)]
    second = [lines(rank, rank - 4, "2(mesh_tp)", 12) for rank in (4, 6, 7)]
    what, _ = said(*first, *second, lines(5, 1, "8(mesh_dp)", 3))
    assert what == f"{MESSAGE} of group mesh_tp: rank 2 did not come"


def test_groups_that_wait_in_different_calls_have_not_parted() -> None:
    told = [lines(rank, rank, "1(mesh_tp)") for rank in (0, 1)]
    told += [lines(rank, rank - 2, "2(mesh_tp)", 12, "ALLGATHER") for rank in (2, 3)]
    what, move = said(*told)
    assert "ranks 0, 1 in ALLREDUCE of group mesh_tp; ranks 2, 3 in ALLGATHER of group mesh_tp" in what
    assert "different collectives" not in what and "within each group" in move
    what, _ = said(lines(4, 0, "3(mesh_tp)"), lines(5, 1, "3(mesh_tp)", 42))
    assert what.startswith("the ranks waited in different collectives of group mesh_tp: rank 4 in ALLREDUCE number 41,")


@pytest.mark.parametrize("told", [[(0, 0), (1, 1), (4, 0), (5, 1)], [(0, 0), (2, 1), (6, 3)]])
def test_groups_that_no_line_names_accuse_nobody(told: list[tuple[int, int]]) -> None:
    """Places that are not the ranks tell that there are several groups; not which of them a rank is in."""
    what, move = said(*(lines(rank, place) for rank, place in told))
    assert what.startswith("NCCL waited in vain in several groups") and "did not come" not in what
    assert "network" not in move


def test_a_group_without_order_accuses_nobody() -> None:
    what, _ = said(lines(0, 0, "7(mesh_x)"), lines(3, 1, "7(mesh_x)"), lines(8, 3, "7(mesh_x)"))
    assert what == f"{MESSAGE} of group mesh_x: ranks 0, 3, 8, all that this log has, alike"


@pytest.mark.parametrize("seen", [((0, 0), (4, 2)), ((0, 0), (4, 2), (5, 3)), ((0, 0), (4, 2), (8, 4))])
def test_a_spacing_that_two_members_or_no_neighbours_tell_is_none(seen: tuple[tuple[int, int], ...]) -> None:
    """Of a group 0, 1, 4, 5, 8, 9, place 1 is missing, which is rank 1; a line through those seen leads to rank 2."""
    what, move = said(*(lines(rank, place, "7(mesh_x)") for rank, place in seen))
    assert "did not come" not in what and what.endswith("all that this log has, alike")
    assert "rank 1 " not in move and "rank 2" not in move
    job = Job(10, frozenset(range(10)))
    assert "did not come" not in said(*(lines(rank, place, "7(mesh_x)") for rank, place in seen), job=job)[0]


def test_one_rank_alone_says_no_more_than_its_line() -> None:
    assert compare(read(lines(3, group=WHOLE)).newest()) is None
    assert compare([]) is None and compare(read(["[rank1] Watchdog is well\n"]).newest()) is None


def test_the_last_timeout_of_a_rank_counts() -> None:
    """A log goes on over steps, and over attempts where nobody knows where they begin."""
    early, late = [lines(rank) for rank in (0, 1)], [lines(rank, seq=9) for rank in (0, 1)]
    assert {one.call[0] for one in read(*early, *late).newest()} == {"9"}


def test_lines_of_old_torch_have_places_alone() -> None:
    told = [[line.split("] ", 1)[1] for line in lines(rank)] for rank in (0, 2)]
    assert said(*told)[0] == f"{MESSAGE}: rank 1 did not come"


def test_a_run_knows_who_is_missing_behind_the_last_one() -> None:
    told = [lines(rank, group=WHOLE) for rank in range(1, 7)]
    what, _ = said(*told, job=Job(8, frozenset(range(1, 8))))
    assert what == f"{MESSAGE}: rank 7 did not come"
    what, move = said(*told, job=Job(8, frozenset(range(1, 8)), frozenset({0, 7})))
    assert what == f"{MESSAGE}: all ranks alike" and move.startswith("the same call everywhere: look at network")


def test_a_run_accuses_no_rank_whose_words_are_elsewhere() -> None:
    """Rank 0's go to the terminal, another host's may be in another directory, and a subgroup may not have them."""
    what, move = said(*(lines(rank, group=WHOLE) for rank in (1, 2)), job=Job(4, frozenset({1, 2})))
    assert what == f"{MESSAGE}: ranks 1, 2 alike; the logs here have no such wait of ranks 0, 3"
    assert "rank 0 prints to the terminal" in move
    part = said(*(lines(rank, rank, "1(mesh_tp)") for rank in (0, 1)), job=Job(4, frozenset(range(4))))
    assert part[0].endswith("ranks 0, 1 alike; the logs here have no such wait of ranks 2, 3")
    assert said(lines(1, group=WHOLE), job=Job(2, frozenset({1})))[0].endswith("no such wait of rank 0")
