"""Sends and receives of the user's own are compared: what has no other end, or another one than it should, hangs."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from allranks.planning.hardware import find_cluster
from allranks.rehearsal import Finding, RankRehearsal, Rehearsal
from allranks.rehearsed_messages import ANY_RANK, Message
from allranks.rehearsing.exchanges import compare_exchanges, find_circle, list_unmatched, next_peer
from allranks.rehearsing.refusals import Unrehearsable
from allranks.rehearsing.whole import Question, rehearse
from tests.rehearsing.parting import (
    around,
    calling,
    from_any,
    from_nobody,
    functionally,
    other_type,
    reads_what_comes,
    send_first,
    sum_first,
    to_nobody,
    too_small,
    two_on,
)
from tests.rehearsing.tasks import configured

Way = Callable[..., Any]


def answered(way: Way, world: int, *ranks: int, follow: bool = False, device: str = "cpu") -> Rehearsal:
    task = calling(way)
    config, layout = configured(task, "ddp", world)
    cluster = find_cluster(f"1x{world}:{device}")
    return rehearse(Question("exchanging", task, config, cluster, layout, ranks, follow=follow))


def of_exchanges(told: Rehearsal) -> list[str]:
    return [line for line in told.unrehearsed if "parting.py" in line]


@pytest.mark.parametrize("way", [around, functionally])
def test_what_both_ends_do_is_no_finding(way: Way) -> None:
    told = answered(way, 2, 0, 1)
    assert told.findings == () and of_exchanges(told) == []
    ops = [one.op for one in told.ranks[0].collectives if "parting.py" in one.line]
    assert sorted(ops) == (["receive", "send"] if way is around else ["receive", "send", "send"])


@pytest.mark.parametrize(
    ("way", "kind", "message"),
    [
        (
            to_nobody,
            "hang",
            r"rank 0 sends to rank 1 once in the step, and rank 1 receives from it 0 times with tag 3: send to rank 1 "
            r"\(float32, 512 B, asked for by parting.py:\d+ to_nobody\) has no other end; the run would hang there",
        ),
        (
            too_small,
            "message",
            r"rank 0 sends rank 1 float32, 512 B \(.* too_small\), which receives float32, 128 B \(.* too_small\): the "
            "process would end there",
        ),
        (other_type, "message", r"sends rank 1 float32, .*, which receives int32, .*: it would hold other numbers"),
        (
            send_first,
            "hang",
            r"ranks 0 and 1 wait for each other: rank 0 in send to rank 1 \(.* send_first\), rank 1 in send to rank 0",
        ),
        (
            sum_first,
            "hang",
            r"ranks 0 and 1 wait for each other: rank 0 in all-reduce .* sum_first\), rank 1 in receive from rank 0",
        ),
    ],
)
def test_what_would_hang_or_end_is_found(way: Way, kind: str, message: str) -> None:
    (found,) = answered(way, 2, 0, 1).findings
    assert found.fails and found.kind == kind and re.search(message, found.what), found.what


def test_tags_are_ways_of_their_own_but_on_gpus() -> None:
    lost, wanted = answered(from_nobody, 2, 0, 1).findings
    assert "receive from rank 0 (float32" in lost.what and lost.what.endswith("the run would hang there")
    assert "with tag 2: send to rank 1" in wanted.what and wanted.what.endswith("where that is waited for")
    assert answered(from_nobody, 2, 0, 1, device="h100").findings == (), "NCCL has no tags"


def test_an_end_that_was_not_rehearsed_is_said_with_its_line() -> None:
    told = answered(two_on, 4, 0, 3)
    assert told.findings == ()
    first, second = of_exchanges(told)
    assert re.fullmatch(
        r"parting.py:\d+ two_on: rank 0 sends to rank 2: whether it is received there \(--ranks 0,2\)", first
    )
    assert first != second, "two lines of code"


def test_the_other_end_is_rehearsed_where_nobody_chose_the_ranks() -> None:
    told = answered(two_on, 4, 0, 3, follow=True)
    assert list(told.ranks) == [0, 2, 3] and of_exchanges(told) == []
    (found,) = told.findings
    assert "rank 0 sends to rank 2 2 times in the step, and rank 2 receives from it once" in found.what
    assert told.unrehearsed[-1].startswith("ranks other than 0, 2, 3: ")


def test_a_ring_of_which_neighbours_are_there_is_followed_no_further() -> None:
    told = answered(around, 4, 0, 3, follow=True)
    assert list(told.ranks) == [0, 3] and told.findings == ()
    assert len(of_exchanges(told)) == 2


def test_an_other_end_of_which_nothing_is_known_is_said() -> None:
    told = answered(reads_what_comes, 4, 0, 3, follow=True)
    assert list(told.ranks) == [0, 3] and told.findings == ()
    (line,) = (one for one in told.unrehearsed if one.startswith("rank 2, with which others exchange messages: "))
    assert "_local_scalar_dense" in line


def test_a_receive_from_any_rank_is_compared_with_nothing() -> None:
    told = answered(from_any, 2, 0, 1)
    assert told.findings == ()
    took, sent = of_exchanges(told)
    assert took.endswith("rank 0 receives from any rank: whether one sends what it takes")
    assert sent.endswith("rank 1 sends to rank 0: whether it is received there, which receives from any rank, too")


def test_a_receive_that_returns_its_source_is_not_rehearsed() -> None:
    import torch
    import torch.distributed as dist

    def takes(value: torch.Tensor) -> torch.Tensor:
        dist.recv(torch.empty_like(value))
        return value

    with pytest.raises(Unrehearsable, match=r"test_exchanges.py:\d+\); from which rank .*: name the rank"):
        answered(takes, 2, 0)


LINE = "task.py:1 forward"
SENT = Message("all", "send", 8, 4, LINE, members="0-3", terms="float32", waits=True, peer=1, own=True)
TAKEN = replace(SENT, op="receive", peer=0)
MET = Message("all", "barrier", 0, 4, "task.py:2 forward", members="0-3", waits=True)


def told(rank: int, *sequence: Message, stage: int = 0, blocks: int = 0, micro_steps: int = 0) -> RankRehearsal:
    counted = RankRehearsal(rank, stage, 0, {}, "", (), 0, (), sequence, 0.0, blocks=blocks)
    return replace(counted, traced_micro_steps=micro_steps)


def compared(*ranks: RankRehearsal) -> list[Finding]:
    return compare_exchanges({one.rank: one for one in ranks})


def circle_of(*ranks: RankRehearsal) -> Finding | None:
    return find_circle({one.rank: one for one in ranks})


def test_a_circle_needs_everyone_in_it_to_wait() -> None:
    first = SENT, replace(TAKEN, peer=1)
    second = replace(SENT, peer=0), TAKEN
    assert circle_of(told(0, *first), told(1, *second)) is not None
    assert circle_of(told(0, *first), told(1, *second[::-1])) is None
    assert circle_of(told(0, replace(SENT, waits=False), first[1]), told(1, *second)) is None
    assert circle_of(told(0, *first), told(2, *second)) is None, "rank 1 was not rehearsed"


def test_three_ranks_may_wait_in_a_ring() -> None:
    ring = [told(rank, replace(SENT, peer=(rank + 1) % 3), replace(TAKEN, peer=(rank - 1) % 3)) for rank in range(3)]
    found = circle_of(*ring)
    assert found is not None and found.what.startswith("ranks 0, 1 and 2 wait for each other: rank 0 in send to rank 1")
    turned = told(2, *reversed(ring[2].sequence))
    assert circle_of(*ring[:2], turned) is None


def test_a_collective_is_waited_in_by_the_members_of_its_stage() -> None:
    behind, before = told(0, MET, SENT), told(1, TAKEN, MET)
    assert circle_of(behind, before) is not None
    assert circle_of(told(0, SENT, MET), before) is None
    assert circle_of(told(0, replace(MET, waits=False), SENT), before) is None
    assert circle_of(told(0, replace(MET, members="0,2"), SENT), told(1, TAKEN, replace(MET, members="1,3"))) is None
    assert circle_of(behind, told(1, TAKEN, MET, stage=1)) is None, "stages are compared elsewhere"


def test_messages_keep_their_order_within_a_group_and_a_tag() -> None:
    large = replace(SENT, num_bytes=16)
    assert compared(told(0, SENT, large), told(1, TAKEN, replace(TAKEN, num_bytes=16))) == []
    (found,) = compared(told(0, large, SENT), told(1, TAKEN, replace(TAKEN, num_bytes=16)))
    assert "16 B" in found.what and found.what.endswith("the process would end there")
    tagged = replace(large, tag=1), replace(TAKEN, num_bytes=16, tag=1)
    assert compared(told(0, tagged[0], SENT), told(1, TAKEN, tagged[1])) == []
    assert len(compared(told(0, SENT), told(1, replace(TAKEN, members="0-1")))) == 2, "of another group"


def test_stages_of_which_blocks_were_left_out_are_not_counted() -> None:
    ranks = {0: told(0, SENT), 1: told(1, stage=1, blocks=9)}
    assert compare_exchanges(ranks) == [] and next_peer(ranks) is None
    (line,) = list_unmatched(ranks)
    assert line == f"{LINE}: rank 0 sends to rank 1: whether it is received there (--full-trace)"
    assert len(compare_exchanges(ranks | {1: told(1, stage=1)})) == 1


def test_ranks_that_were_traced_with_other_micro_steps_are_not_counted() -> None:
    ranks = {0: told(0, SENT, SENT), 1: told(1, TAKEN, micro_steps=1)}
    assert compare_exchanges(ranks) == [] and list_unmatched(ranks)[0].endswith("(--full-trace)")
    assert len(compare_exchanges(ranks | {1: told(1, TAKEN)})) == 1


def test_a_receive_of_more_than_comes_is_told_with_what_gloo_does() -> None:
    (found,) = compare_exchanges({0: told(0, SENT), 1: told(1, replace(TAKEN, num_bytes=2 * TAKEN.num_bytes))})
    assert ": over gloo only its first part would be what was sent, and for NCCL" in found.what


def test_many_ends_are_named_shortly() -> None:
    ranks = {rank: told(rank, replace(SENT, peer=rank + 20)) for rank in range(20)}
    (line,) = list_unmatched(ranks)
    assert line.startswith(f"{LINE}: each of ranks 0-19 sends to each of ranks 20-39: ") and line.endswith(" all)")
    assert next_peer(ranks) == 20
    assert next_peer({0: told(0, replace(TAKEN, peer=ANY_RANK))}) is None
