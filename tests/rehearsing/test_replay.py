"""Stretches that stand for several are repeated on paper: memory in depth, messages and FLOPs in number, too."""

from allranks.parallel.step_record import Deed
from allranks.rehearsed_messages import Message, Transfer
from allranks.rehearsing.ledger import Stored, Stretch
from allranks.rehearsing.moments import list_moments
from allranks.rehearsing.replay import (
    GIVEN,
    ON_DEVICE,
    ON_HOST,
    Repeats,
    Window,
    add_flops,
    add_messages,
    add_transfers,
    changes_on_paper,
    describe,
    find_peak,
)

GATHER = Message("dp_shard", "all-gather", 10, 4, "task.py:3 forward")
BUCKET = Message("dp_replicate", "all-reduce", 7, 4, "replica_twin.py:9 _launch", once=True)


def step() -> list[Stretch]:
    """Block 0 keeps 5 bytes, block 1 stands for three and keeps 4 each; the gradient of a block is 2."""
    kept = [Stored(5, "layers.0"), Stored(4, "layers.1")]
    gradient = Stored(2, "layers.1", "gradients")
    return [
        Stretch("forward", "layers.0", 0, [(kept[0], 5)], [GATHER], 1.0, [(0, Deed("forward", "compute", "layers.0"))]),
        Stretch("forward", "layers.1", 0, [(kept[1], 4)], [GATHER], 2.0, [(0, Deed("forward", "compute", "layers.1"))]),
        Stretch("backward", "layers.1", 0, [(gradient, 2), (kept[1], -4)], [BUCKET], 4.0),
        Stretch("backward", "layers.0", 0, [(kept[0], -5)]),
        Stretch(GIVEN, changes=[(Stored(4, "layers.2", "gradients"), 4)]),
        Stretch("update", changes=[(gradient, -6)]),
    ]


REPEATS = Repeats({("forward", "layers.1"): 3, ("backward", "layers.1"): 3})


def test_memory_repeats_in_depth() -> None:
    resting = [(Stored(100, "layers.1", "weights"), 100)]
    alone, deep = find_peak(resting, step(), Repeats({})), find_peak(resting, step(), REPEATS)
    assert (alone.num_bytes, alone.at) == (111, "backward of layers.1")
    assert (deep.num_bytes, deep.at) == (119, "backward of layers.1")
    assert deep.by_category == {"weights": 100, "gradients": 2, "activations": 17}
    assert [(h.module, h.category, h.bytes) for h in deep.holdings] == [
        ("layers.*", "weights", 100),
        ("layers.*", "activations", 17),
        ("layers.*", "gradients", 2),
    ]
    assert deep.levels[-1] == (100, 106)


def test_device_and_host_have_peaks_of_their_own() -> None:
    on_host, passing = Stored(50, "layers.0", "weights", memory="pinned"), Stored(7, memory="pageable")
    stretches = [
        Stretch("forward", "layers.1", 0, [(Stored(5), 5), (passing, 7)], transfers=[("activations", "host", 7)]),
        Stretch(
            "update", changes=[(passing, -21)], transfers=[("parameters", "device", 2), ("parameters", "device", 1)]
        ),
    ]
    here, there = (find_peak([(on_host, 50)], stretches, REPEATS, where) for where in (ON_DEVICE, ON_HOST))
    assert (here.num_bytes, here.resting, here.by_category) == (15, 0, {"activations": 15})
    assert (there.num_bytes, there.resting, there.by_category) == (71, 50, {"weights": 50, "other": 21})
    assert add_transfers(stretches, REPEATS) == (
        Transfer("activations", "host", 21, 3),
        Transfer("parameters", "device", 3, 2),
    )


def test_messages_and_flops_repeat_in_number() -> None:
    found = {one.op: (one.count, one.bytes) for one in add_messages(step(), REPEATS)}
    assert found == {"all-gather": (4, 40), "all-reduce": (1, 7)}
    assert add_flops(step(), REPEATS) == 1.0 + 3 * (2.0 + 4.0)
    often = Repeats({}, [Window(0, 4, 5)])
    assert add_flops(step(), often) == 5 * 7.0
    assert {one.count for one in add_messages(step(), often)} == {10, 1}


def test_memory_repeats_with_a_window() -> None:
    """Forwards before backwards: each keeps 5 bytes until its own backward, which takes 2 more."""
    kept, passing = [Stored(5, f"layers.{n}") for n in range(3)], Stored(2)
    forwards = [Stretch("forward", "", n, [(kept[n], 5)]) for n in range(3)]
    backwards = [Stretch("backward", "", n, [(passing, 2), (passing, -2), (kept[n], -5)]) for n in range(3)]
    few = find_peak([], [*forwards, *backwards], Repeats({}))
    many = find_peak([], [*forwards, *backwards], Repeats({}, [Window(1, 2, 8), Window(4, 5, 8)]))
    assert (few.num_bytes, few.at) == (17, "backward of the model")
    assert (many.num_bytes, many.at, many.by_category) == (52, "backward of the model", {"activations": 52})
    assert many.levels[-1][0] == 0
    drawn = list_moments([], [*forwards, *backwards], Repeats({}, [Window(1, 2, 8), Window(4, 5, 8)]))
    assert drawn[-1].live_bytes == 0


def test_what_leaves_nothing_repeats_without_a_trace() -> None:
    passing = Stored(3)
    steady = [Stretch("forward", "", 0, [(passing, 3)]), Stretch("backward", "", 0, [(passing, -3)])]
    assert find_peak([], steady, Repeats({}, [Window(0, 2, 1000)])).num_bytes == 3


def test_what_a_stretch_is_called() -> None:
    assert [describe(stretch, Stored(1)) for stretch in step()][3:] == ["backward of layers.0", GIVEN, "update"]


def test_what_is_made_behind_the_last_block_says_itself_whose_it_is() -> None:
    last, update = Stretch("forward", "layers.1"), Stretch("update")
    of_loss = Stored(1, "loss", "logits"), Stored(1, "loss", "logits", in_backward=True)
    assert [describe(last, made) for made in of_loss] == ["forward of the loss", "backward of the loss"]
    assert describe(last, Stored(1, "head")) == "forward of head"
    assert describe(last, Stored(1, "layers.1.mlp")) == "forward of layers.1"
    assert describe(last, Stored(1, "layers.0", "gathered")) == "forward of layers.1", "for another block, in this one"
    assert describe(Stretch("backward"), Stored(1, "head", in_backward=True)) == "backward of the model"
    assert describe(update, of_loss[0]) == "update"


def test_a_storage_that_several_modules_share_is_each_ones_in_part() -> None:
    shared = Stored(12, "layers.0.down", "gradients", shares={"layers.0.up": 2, "layers.0.down": 1})
    changes = [Stretch("forward", changes=[(Stored(1), 1)]), Stretch("update", changes=[(shared, -12)])]
    found = find_peak([(shared, 12)], changes, Repeats({}))
    assert found.by_category == {"gradients": 12, "activations": 1} and found.levels[-1] == (1, 13)
    assert {h.module: h.bytes for h in found.holdings} == {"layers.*.up": 8, "layers.*.down": 4, "": 1}


def test_what_a_repeated_forward_made_goes_as_often_where_it_goes_at_once() -> None:
    """Autocast's copies: block 1 stands for three, and its cache is emptied at the forward's end."""
    copies, handed = [Stored(6, f"layers.{n}") for n in range(3)], Stored(5, "layers.1")
    forward = [
        Stretch("forward", "layers.0", 0, [(copies[0], 6)]),
        Stretch("forward", "layers.1", 0, [(copies[1], 6), (handed, 5)]),
        Stretch("forward", "layers.2", 0, [(copies[2], 6), (handed, -5)]),
        Stretch("forward", "layers.3", 0, [(copy, -6) for copy in copies]),
        Stretch("backward", "layers.3", 0),
    ]
    repeats = Repeats({("forward", "layers.1"): 3})
    peak = find_peak([], forward, repeats)
    # What is handed to the next block goes once: the block that stands for three would have dropped the one before's.
    assert [end for end, _ in peak.levels] == [6, 6 + 33, 6 + 33 + 1, 6 + 33 + 1 - 30, 10]
    assert changes_on_paper(forward, repeats)[3] == [(copies[0], -6), (copies[1], -18), (copies[2], -6)]


def test_a_barrier_brings_nothing() -> None:
    waiting = Stretch("forward", messages=[Message("all", "barrier", 0, 4, "task.py:4 forward")])
    assert add_messages([waiting], Repeats({})) == ()
