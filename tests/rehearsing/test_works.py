"""The work of a step is in order: messages between the FLOPs they came between, micro-steps one after another."""

from collections.abc import Sequence

import pytest

from allranks.rehearsal import Part, Work
from allranks.rehearsed_messages import Message
from allranks.rehearsing.ledger import Stretch
from allranks.rehearsing.replay import GIVEN, Repeats, Window
from allranks.rehearsing.works import list_works
from tests.rehearsing.tasks import Tokens, rehearsed

WAIT = Part()


def gather(unit: str, after: float = 0.0) -> Message:
    return Message("dp_shard", "all-gather", 10, 4, "task.py:3 forward", after=after, unit=unit)


def bucket(num_bytes: int, after: float = 0.0) -> Message:
    return Message("dp_replicate", "all-reduce", num_bytes, 4, "replica_twin.py:9 _launch", once=True, after=after)


def said(works: Sequence[Work]) -> list[tuple[str, str, int, int, str]]:
    """(Phase, block, times, turn, "g" for a gather, "w" for a wait, "m" for another message, "c" for FLOPs)."""
    kinds = [
        ["g" if part.unit else "m" if part.message else "c" if part.flops else "w" for part in w.parts] for w in works
    ]
    return [(w.phase, w.block, w.times, w.turn, "".join(kind)) for w, kind in zip(works, kinds, strict=True)]


def test_parts_are_in_the_order_in_which_they_came() -> None:
    sent = Message("tp", "all-reduce", 5, 2, "task.py:4 forward", after=2.0)
    stretch = Stretch("forward", "layers.0", messages=[gather("layers.0"), sent, gather("layers.1", 3.0)], flops=4.0)
    stretch.waits = [(1, 0.0), (3, 3.0)]
    (work,) = list_works([stretch], Repeats({}))
    assert work.parts == (
        Part(message=("dp_shard", "all-gather", 10), unit="layers.0"),
        WAIT,
        Part(flops=2.0),
        Part(message=("tp", "all-reduce", 5)),
        Part(flops=1.0),
        Part(message=("dp_shard", "all-gather", 10), unit="layers.1"),
        WAIT,
        Part(flops=1.0),
    )


def test_a_window_is_done_from_its_begin_to_its_end_and_then_again() -> None:
    stretches = [
        Stretch("forward", "layers.0", 0, flops=1.0),
        Stretch("forward", "layers.0", 1, flops=1.0),
        Stretch("forward", "layers.1", 1, flops=1.0),
        Stretch("backward", "layers.1", 1, flops=2.0),
        Stretch("forward", "layers.0", 2, flops=1.0),
    ]
    found = list_works(stretches, Repeats({("forward", "layers.1"): 3}, [Window(1, 4, 2)]))
    again = [("forward", "layers.0", 1), ("forward", "layers.1", 3), ("backward", "layers.1", 1)]
    assert [row[:3] for row in said(found)] == [("forward", "layers.0", 1), *again, *again, ("forward", "layers.0", 1)]
    assert [work.turn for work in found] == [1, 2, 2, 3, 4, 4, 5, 6]


def test_forwards_that_follow_one_another_are_turns_of_their_own() -> None:
    """As of gpipe, whose windows hold one forward, and one backward."""
    stretches = [Stretch(phase, "layers.0", 1, flops=1.0) for phase in ("forward", "backward")]
    found = list_works(stretches, Repeats({}, [Window(0, 1, 2), Window(1, 2, 2)]))
    assert [(work.phase, work.turn) for work in found] == [
        ("forward", 1),
        ("forward", 2),
        ("backward", 3),
        ("backward", 4),
    ]


def test_a_bucket_is_sent_by_the_last_micro_step_where_it_came() -> None:
    stretch = Stretch("backward", "layers.0", messages=[bucket(7, 1.0)], flops=3.0)
    assert [row[-1] for row in said(list_works([stretch], Repeats({}, [Window(0, 1, 3)])))] == ["c", "c", "cmc"]


def test_late_buckets_are_spread_over_the_blocks_that_were_left_out() -> None:
    """Of five blocks three are one stretch; buckets 3 to 6 came behind the last one, and are spread with bucket 2."""
    stretches = [
        Stretch("backward", "layers.4", messages=[bucket(1, 2.0)], flops=2.0),
        Stretch("backward", "layers.3", messages=[bucket(2, 2.0)], flops=2.0),
        Stretch("backward", "layers.0", messages=[bucket(n, 2.0) for n in (3, 4)], flops=2.0),
        Stretch(GIVEN, messages=[bucket(5), bucket(6)]),
        Stretch("update", messages=[gather("")]),
    ]
    found = list_works(stretches, Repeats({("backward", "layers.3"): 3}))
    assert [[part.message[2] if part.message else "c" for part in work.parts] for work in found] == [
        ["c", 1],
        ["c", 2],
        ["c", 3],
        ["c", 4],
        ["c", 5, 6],
        [10],
    ]
    assert [work.turn for work in found] == [1, 1, 1, 1, 1, 2]


def test_blocks_without_products_have_late_buckets_spread_over_them_too() -> None:
    """Their stretches count no FLOPs."""
    stretches = [
        Stretch("forward", "layers.0", flops=1.0),
        Stretch("backward", "layers.3", messages=[bucket(2)]),
        Stretch("backward", "layers.0", messages=[bucket(3)]),
        Stretch(GIVEN, messages=[bucket(5)]),
    ]
    found = list_works(stretches, Repeats({("backward", "layers.3"): 3}))
    assert [part.message[2] for work in found[1:] for part in work.parts if part.message] == [2, 3, 5]


def test_a_barrier_is_no_work() -> None:
    assert (
        list_works([Stretch("forward", messages=[Message("all", "barrier", 0, 4, "task.py:4 forward")])], Repeats({}))
        == ()
    )


def test_a_block_is_gathered_before_it_computes_and_ahead_in_the_backward() -> None:
    told = rehearsed(Tokens(), "fsdp", 2, on_cuda=True)
    ways = [(work.phase, work.block, [part.unit for part in work.parts if part.unit]) for work in told.works]
    kinds = [kinds for *_, kinds in said(told.works)]
    assert list(zip(ways, kinds, strict=True)) == [
        (("forward", "", ["the rest"]), "gw"),
        (("forward", "layers.0", ["layers.0"]), "gwc"),
        (("forward", "layers.1", ["layers.1"]), "gwc"),
        (("forward", "layers.2", ["layers.2", "layers.2"]), "gwcg"),
        # It waits for layers.2, and asks for layers.1, before layers.2 computes.
        (("backward", "", ["layers.1"]), "cwg"),
        (("backward", "layers.2", ["layers.0"]), "cmwg"),
        (("backward", "layers.1", []), "cmw"),
        (("backward", "layers.0", []), "cmm"),
        (("update", "", []), "m"),
    ]


@pytest.mark.full
@pytest.mark.parametrize("layout", ["fsdp", "ddp", "fsdp,sharding=grad_op", "tp=2"])
def test_the_work_is_all_that_was_counted(layout: str) -> None:
    told = rehearsed(Tokens(layers=8), layout, 2, "train.micro_steps=5", on_cuda=True)
    flops = sum(part.flops * work.times for work in told.works for part in work.parts)
    assert flops == pytest.approx(told.flops)
    sent = sum(part.message[2] * work.times for work in told.works for part in work.parts if part.message)
    assert sent == sum(one.bytes for one in told.collectives)
