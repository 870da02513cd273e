"""A rank that takes another way than those who wait for it is found, within a stage and across the stages."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from allranks.planning.hardware import find_cluster
from allranks.rehearsal import Finding, RankRehearsal
from allranks.rehearsed_messages import Message
from allranks.rehearsing.comparing import compare_ranks
from allranks.rehearsing.whole import Question, rehearse
from allranks.rehearsing.world_of_ranks import choose_ranks
from allranks.task import Task
from tests.rehearsing.parting import (
    SummingInUpdate,
    Tied,
    apart,
    by_barrier,
    by_environment,
    by_root,
    by_rows,
    by_size,
    by_type,
    calling,
    in_blocks,
    in_loss,
    in_pairs,
    on_odd_ranks,
    on_second_pair,
    on_second_rank,
    over_all,
    over_first_and_last,
    wait_for_all,
)
from tests.rehearsing.tasks import Layered, Tokens, configured, lopsided, rehearsed, unequal
from tests.test_rehearsal import rank


def test_a_rank_that_takes_another_way_is_found() -> None:
    first, last = (rehearsed(calling(lopsided), "fsdp", 4, rank=rank) for rank in (0, 3))
    (found,) = compare_ranks({0: first, 3: last})
    assert found.fails and found.kind == "hang"
    assert re.search(r"ranks 0 and 3 part at collective \d+ of the step: rank 0 executes all-reduce", found.what)
    assert re.search(r"over dp_shard \(.* asked for by tasks.py:\d+ lopsided\), rank 3 .*would hang", found.what)
    assert "nothing in them may depend on the rank" in found.next
    same = rehearsed(Layered(), "fsdp", 4), rehearsed(Layered(), "fsdp", 4, rank=3)
    assert compare_ranks(dict(enumerate(same))) == []


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("way", "message"),
    [
        (by_environment, r"rank 0 executes all-reduce over dp_replicate \(float32.* by_environment\), rank 3"),
        (by_barrier, r"rank 0 executes barrier over dp_replicate \(asked for by .* by_barrier\), rank 3"),
        (by_size, r"rank 0 executes all-gather .* by_size\), rank 3 all-gather .* by_size\)"),
        (by_type, r"rank 0 executes all-reduce .*\(int32, .* rank 3 all-reduce .*\(float32, "),
        (by_root, r"broadcast .*\(float32 from member 0 of its group, .* rank 3 .*from member 3 of its group"),
        (by_rows, r"rank 0 executes all-gather .* by_rows\), rank 3 all-gather .* by_rows\)"),
    ],
)
def test_what_ranks_have_to_say_alike_is_compared(way: Callable[..., Any], message: str) -> None:
    words = "train.global_batch=10"  # 3, 3, 2 and 2 samples
    first, last = (rehearsed(calling(way), "ddp", 4, words, rank=rank) for rank in (0, 3))
    (found,) = compare_ranks({0: first, 3: last})
    assert found.fails and re.search(message, found.what)


@pytest.mark.full
def test_a_group_of_the_users_own_is_compared_among_its_members() -> None:
    two = {rank: rehearsed(calling(in_pairs), "dp_shard=2,dp_replicate=2", 4, rank=rank) for rank in (0, 3)}
    assert compare_ranks(two) == []
    three = {rank: rehearsed(calling(apart), "ddp", 4, rank=rank) for rank in (0, 2, 3)}
    assert compare_ranks({rank: three[rank] for rank in (0, 3)}) == []
    (found,) = compare_ranks(three)
    assert re.search(r"2 and 3 part at collective 1 of the group 2-3 .*rank 2 executes none, rank 3 all-r", found.what)


def test_an_all_reduce_of_ranks_that_bring_unequal_sizes_is_found() -> None:
    first, last = (rehearsed(calling(unequal), "ddp", 4, rank=rank) for rank in (0, 3))
    (found,) = compare_ranks({0: first, 3: last})
    assert re.search(r"all-reduce over dp_replicate \(.* unequal\), rank 3 all-reduce over dp_replicate", found.what)


def sending(number: int, stage: int, *messages: tuple[str, int, int, str], micro_steps: int = 1) -> RankRehearsal:
    """A rank whose step has (op, peer, bytes, axis) alone."""
    told = tuple(
        Message(
            axis, op, size, 2, "task.py:3 forward", only=() if axis == "pp" else (number,), terms="float32", peer=at
        )
        for op, at, size, axis in messages
    )
    return replace(rank(number), stage=stage, sequence=told, traced_micro_steps=micro_steps)


def test_what_one_rank_sends_the_other_one_has_to_receive() -> None:
    def between(*received: tuple[str, int, int, str], **other: Any) -> list[Finding]:
        sent = ("send", 2, 8, "pp"), ("send", 5, 1, "pp"), ("send", 2, 4, "pp")
        return compare_ranks({0: sending(0, 0, *sent), 2: sending(2, 1, *received, **other)})

    first, second = ("receive", 0, 8, "pp"), ("receive", 0, 4, "pp")
    assert between(first, second) == between(second, micro_steps=2) == []
    (found,) = between(second, first)
    assert found.kind == "sent" and not found.fails
    assert re.search(r"rank 0 \(stage 0\) and rank 2 \(stage 1\) .*message 1 leaves as send over pp.* 8 B", found.what)
    (found,) = between(first)
    assert found.what.endswith("2 messages leave, and 1 are expected")


def test_what_parts_of_a_sequence_send_is_compared_within_a_stage_alone() -> None:
    sent, received = ("send", 1, 8, "cp"), ("receive", 0, 4, "cp")
    (found,) = compare_ranks({0: sending(0, 0, sent), 1: sending(1, 0, received)})
    assert found.fails and "message 1 leaves as send over cp" in found.what
    assert compare_ranks({0: sending(0, 0, sent), 1: sending(1, 1, received)}) == []
    other = replace(sending(1, 0, ("receive", 0, 8, "cp")).sequence[0], terms="int64")
    (found,) = compare_ranks({0: sending(0, 0, sent), 1: replace(sending(1, 0), sequence=(other,))})
    assert "float32" in found.what and "int64" in found.what


@pytest.mark.parametrize(
    ("way", "layout", "rank"),
    [(on_second_rank, "ddp", 1), pytest.param(on_second_pair, "tp=2,dp_shard=3", 2, marks=pytest.mark.full)],
)
def test_a_rank_that_is_neither_the_first_nor_the_last_is_found(
    way: Callable[..., Any], layout: str, rank: int
) -> None:
    task = calling(way) if layout == "ddp" else in_loss(way, **SMALL)
    (found,) = findings_of(task, layout, 6, "train.global_batch=6")
    assert found.kind == "hang" and re.match(rf"ranks 0 and {rank} part at collective", found.what), found.what


SMALL: dict[str, Any] = {"layers": 2, "hidden": 32, "seq": 16}
CUT = ("train.micro_batch=2",)
OF_ONE_STAGE = "call there only groups whose ranks are of one stage"


def findings_of(task: Task, layout: str, world: int, *words: str, ranks: str = "kinds") -> tuple[Finding, ...]:
    config, found = configured(task, layout, world, *words)
    question = Question("parting", task, config, find_cluster(f"1x{world}:cpu"), found, choose_ranks(ranks, found))
    return rehearse(question).findings


@pytest.mark.full
def test_ranks_of_the_last_stage_are_compared_in_the_loss() -> None:
    task = in_loss(on_odd_ranks, **SMALL)
    (found,) = findings_of(task, "pp=2,dp_shard=2", 4, *CUT)
    assert found.kind == "hang" and found.what.startswith("ranks 2 and 3 part at collective")
    assert re.search(r"rank 3 all-reduce over \w+ \(.*parting.py:\d+ on_odd_ranks\)", found.what)


@pytest.mark.full
def test_a_loss_that_sums_over_all_ranks_hangs_the_other_stages() -> None:
    (found,) = findings_of(in_loss(over_all, **SMALL), "pp=2,dp_shard=2", 4, *CUT, ranks="0,2")
    assert found.fails and found.kind == "hang" and OF_ONE_STAGE in found.next
    assert re.search(
        r"ranks 0 and 2 \(stages 0 and 1 of the pipeline\) part at collective 1 of the group 0-3 of the step: rank 0 "
        r"executes none, rank 2 all-reduce over all \(float32, .* asked for by parting.py:\d+ over_all\)",
        found.what,
    )


@pytest.mark.full
def test_a_loss_that_waits_for_all_ranks_does_too() -> None:
    (found,) = findings_of(in_loss(wait_for_all, **SMALL), "pp=2", 2, *CUT)
    assert re.search(r"rank 0 executes all-gather over pp .*norm.py.*rank 1 barrier .* wait_for_all\)", found.what)


@pytest.mark.full
def test_so_does_one_that_sums_over_a_group_of_its_own_with_ranks_of_another_stage() -> None:
    (found,) = findings_of(in_loss(over_first_and_last, **SMALL), "pp=2,dp_shard=2", 4, *CUT)
    assert re.search(r"ranks 0 and 3 .* of the group 0,3 of .*rank 0 executes none, rank 3 all-reduce", found.what)


@pytest.mark.full
def test_as_many_barriers_on_every_stage_hang_where_one_waits_before_it_sends() -> None:
    (found,) = findings_of(in_blocks(wait_for_all, **SMALL), "pp=2", 2, *CUT)
    assert re.search(
        r"rank 0 \(stage 0 of the pipeline\) waits in barrier .* wait_for_all\) for rank 1, which comes there only "
        r"with what rank 0 sends afterwards",
        found.what,
    )
    assert found.fails and OF_ONE_STAGE in found.next


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "layout", "world", "words"),
    [
        (SummingInUpdate, "pp=2", 2, CUT),
        (Tied, "pp=2,schedule=interleaved", 2, CUT),
        (Tied, "pp=2,schedule=zbv", 2, CUT),
        (Tied, "pp=2", 2, CUT),
        (Tokens, "pp=2,dp_replicate=2,dp_shard=2", 8, ("train.global_batch=16", *CUT)),
        (Tokens, "pp=2,tp=2", 4, CUT),
        (partial(in_loss, over_all), "fsdp", 2, ()),
    ],
)
def test_sound_ranks_part_nowhere(kind: Callable[..., Task], layout: str, world: int, words: tuple[str, ...]) -> None:
    """The norm of clipping and the gradients of tied weights go over the stages, too."""
    assert findings_of(kind(**SMALL | {"layers": 4}), layout, world, "train.max_norm=1.0", *words) == ()


PAIR, WORLD = (0, 2), (0, 1, 2, 3)
SENT, RECEIVED = (Message("pp", op, 8, 2, "schedule", members="0,2") for op in ("send", "receive"))
WAITING = Message("all", "barrier", 0, 4, "task.py:1 forward", across=WORLD, waits=True)
GOING_ON = replace(WAITING, waits=False)


def told(rank: int, *sequence: Message) -> RankRehearsal:
    return RankRehearsal(rank, rank // 2, 0, {}, "", (), 0, (), sequence, 0.0)


def test_a_stage_may_wait_only_for_what_comes_without_it() -> None:
    def compared(first: tuple[Message, ...], last: tuple[Message, ...], rank: int = 2) -> list[Finding]:
        return compare_ranks({rank: told(rank, *last), 0: told(0, *first)})

    (found,) = compared((WAITING, SENT), (RECEIVED, WAITING))
    assert found.what.startswith("rank 0 (stage 0 of the pipeline) waits in barrier over all")
    (found,) = compared((WAITING, WAITING, SENT), (WAITING, RECEIVED, WAITING))
    assert "rank 0 (stage 0 of the pipeline) waits" in found.what
    assert compared((WAITING, SENT), (WAITING, RECEIVED)) == []
    assert compared((SENT, WAITING), (RECEIVED, WAITING)) == []
    assert compared((GOING_ON, SENT), (RECEIVED, GOING_ON)) == []
    of_another = replace(RECEIVED, members="1,3")
    assert compared((WAITING, SENT), (of_another, WAITING), rank=3) == []


def test_calls_on_two_groups_over_the_stages_are_compared_each_by_itself() -> None:
    over_pair = replace(GOING_ON, op="all-reduce", across=PAIR)
    assert compare_ranks({0: told(0, GOING_ON, over_pair), 2: told(2, over_pair, GOING_ON)}) == []
    (found,) = compare_ranks({0: told(0, GOING_ON, over_pair), 2: told(2, GOING_ON)})
    assert "part at collective 1 of the group 0,2 of the step" in found.what
    assert compare_ranks({0: told(0, GOING_ON, over_pair), 3: told(3, GOING_ON)}) == []  # 3 is no member


def test_two_groups_over_the_stages_in_another_order_hang_where_both_wait() -> None:
    of_pair = replace(WAITING, op="all-reduce", across=PAIR)

    def compared(first: tuple[Message, ...], last: tuple[Message, ...]) -> list[Finding]:
        return compare_ranks({0: told(0, *first), 2: told(2, *last)})

    (found,) = compared((WAITING, of_pair), (of_pair, WAITING))
    assert found.what.startswith(
        "ranks 0 and 2 (stages 0 and 1 of the pipeline) wait for each other: rank 0 in barrier"
    )
    (found,) = compared((WAITING, of_pair, WAITING), (WAITING, WAITING, of_pair))
    assert "rank 0 in all-reduce" in found.what and "rank 2 in barrier" in found.what and found.fails
    assert compared((WAITING, of_pair), (WAITING, of_pair)) == []
    going_on = replace(of_pair, waits=False)
    assert compared((WAITING, going_on), (going_on, WAITING)) == []
    assert compared((going_on, WAITING), (WAITING, of_pair)) == [], "it is there already, whoever waits for it"
