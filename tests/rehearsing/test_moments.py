"""The step unit by unit: what FSDP gathers, computes, drops and reduces, with the memory at each."""

from itertools import groupby

import pytest

from allranks.parallel.step_record import BUCKET, Deed
from allranks.rehearsal import RankRehearsal
from allranks.rehearsing.ledger import Stored, Stretch
from allranks.rehearsing.moments import list_moments
from tests.rehearsing.tasks import Tokens, rehearsed
from tests.rehearsing.test_replay import REPEATS, step


def test_moments_follow_the_memory() -> None:
    found = list_moments([(Stored(100), 100)], step(), REPEATS)
    assert [(m.what, m.unit, m.times) for m in found] == [
        ("begin", "the step", 1),
        ("compute", "layers.0", 1),
        ("compute", "layers.1", 3),
    ]
    assert [(m.live_bytes, m.highest_bytes) for m in found] == [(100, 100), (105, 105), (100, 119)]


def test_moments_have_their_memory_by_category() -> None:
    weights, kept, gradient = Stored(100, category="weights"), Stored(5), Stored(2, category="gradients")
    on_host = Stored(50, category="weights", memory="pinned")
    deeds = [(0, Deed("backward", "compute", "layers.0")), (1, Deed("backward", "reduce-scatter", "layers.0"))]
    stretches = [
        Stretch("forward", changes=[(kept, 5)], deeds=[(0, Deed("forward", "compute", "layers.0"))]),
        Stretch("backward", changes=[(gradient, 2), (kept, -5)], deeds=deeds),
    ]
    found = list_moments([(weights, 100), (on_host, 50)], stretches, REPEATS)
    assert [m.live_by_category for m in found] == [
        {"weights": 100},
        {"weights": 100, "activations": 5},
        {"weights": 100, "gradients": 2, "activations": 5},
        {"weights": 100, "gradients": 2},
    ]


def test_what_a_copy_does_before_its_first_deed_is_of_the_copy_before() -> None:
    """And not of what came before them all."""
    deeds = [(1, Deed("forward", "compute", "layers.1"))]
    stretches = [
        Stretch("forward", "layers.0", changes=[(Stored(5), 5)], deeds=[(0, Deed("forward", "compute", "layers.0"))]),
        Stretch("forward", "layers.1", changes=[(Stored(1), 1), (Stored(10), 10)], deeds=deeds),
    ]
    found = list_moments([], stretches, REPEATS)
    assert [(m.unit, m.times, m.live_bytes, m.highest_bytes) for m in found[1:]] == [
        ("layers.0", 1, 6, 6),
        ("layers.1", 3, 38, 38),
    ]


def test_a_bucket_whose_block_has_no_backward_stays_where_it_was_seen() -> None:
    deeds = [(0, Deed("backward", "compute", "layers.1")), (0, Deed("backward", "all-reduce", f"{BUCKET}1"))]
    stretches = [Stretch("backward", "layers.1", deeds=deeds, changes=[])]
    found = list_moments([], stretches, REPEATS, {f"{BUCKET}1": "heads.0"})
    assert [m.unit for m in found[1:]] == ["layers.1", f"{BUCKET}1"]


def test_categories_of_a_step_add_up() -> None:
    told = rehearsed(Tokens(), "fsdp", 2, on_cuda=True)
    assert all(sum(m.live_by_category.values()) == m.live_bytes for m in told.moments)
    resting, *_, last = [m.live_by_category for m in told.moments]
    assert {"weights", "optimizer"} <= resting.keys() and "activations" not in resting
    assert last["optimizer"] == resting["optimizer"]
    assert max(m.live_by_category.get("gathered", 0) for m in told.moments) > 0


def test_the_modes_of_fsdp() -> None:
    full, kept = (
        [(m.phase, m.what) for m in rehearsed(Tokens(), layout, 2, on_cuda=True).moments if m.unit == "layers.1"]
        for layout in ("fsdp", "fsdp,sharding=grad_op")
    )
    assert full == [
        *(("forward", "gather"), ("forward", "compute"), ("forward", "drop")),
        *(("backward", "gather"), ("backward", "compute"), ("backward", "drop"), ("backward", "reduce-scatter")),
    ]
    assert kept == [
        *(("forward", "gather"), ("forward", "compute")),
        *(("backward", "compute"), ("backward", "drop"), ("backward", "reduce-scatter")),
    ]


HSDP = [
    *(("forward", "gather"), ("forward", "compute"), ("forward", "drop")),
    *(("backward", "gather"), ("backward", "compute"), ("backward", "drop")),
    *(("backward", "reduce-scatter"), ("backward", "all-reduce")),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("layout", "world", "unit", "deeds"),
    [
        ("dp_replicate=2,dp_shard=2", 4, "layers.1", HSDP),
        (
            "fsdp,sharding=none",
            2,
            "layers.1",
            [("forward", "compute"), ("backward", "compute"), ("backward", "drop"), ("backward", "all-reduce")],
        ),
        ("fsdp,sharding=optimizer", 2, "layers.1", [("forward", "compute"), ("backward", "compute")]),
        ("fsdp,sharding=optimizer", 2, "bucket 1", [("backward", "all-reduce")]),
        ("fsdp,sharding=optimizer", 2, "over dp_shard", [("update", "all-gather")]),
    ],
)
def test_the_other_ways_to_share(layout: str, world: int, unit: str, deeds: list[tuple[str, str]]) -> None:
    """Parameters that nobody shares are gathered and scattered by nobody; the optimizer's shares meet at its end."""
    moments = rehearsed(Tokens(), layout, world, on_cuda=True).moments
    assert [(m.phase, m.what) for m in moments if m.unit == unit] == deeds


AROUND, BLOCKS = "the rest", ("layers.0", "layers.1", "layers.2")
# Bytes in Tokens: of its table of tokens (or its head), of its last norm, of a block's feed-forward and of its others.
TABLE, NORM, FEED, OTHERS = 4 * 256 * 64, 4 * 64, 4 * 3 * 64 * 256, 4 * (4 * 64 * 64 + 2 * 64)


def rows(told: RankRehearsal, phase: str) -> list[tuple[str, str, int]]:
    return [(m.what, m.unit, m.num_bytes) for m in told.moments if m.phase == phase]


def test_buckets_of_ddp_go_between_the_backwards_of_the_blocks() -> None:
    """Each where its last gradient is there, with its bytes (of two ranks each receives as much as there is)."""
    ddp = rehearsed(Tokens(), "ddp", 2, "layout.ddp_bucket_mb=0.2")
    blocks = [("compute", block, 0) for block in BLOCKS]
    assert rows(ddp, "forward") == [("compute", AROUND, 0), *blocks, ("compute", AROUND, 0)]
    assert rows(ddp, "backward") == [
        ("compute", AROUND, 0),
        ("compute", "layers.2", 0),
        ("all-reduce", "bucket 1", TABLE + NORM + FEED),
        ("compute", "layers.1", 0),
        ("all-reduce", "bucket 2", OTHERS + FEED),
        ("compute", "layers.0", 0),
        ("all-reduce", "bucket 3", OTHERS + FEED),
        ("compute", AROUND, 0),
        ("all-reduce", "bucket 4", OTHERS + TABLE),
    ]
    assert rows(ddp, "update") == []


def test_memory_goes_up_block_by_block_and_down_again() -> None:
    """By as much for each of equal blocks, all of it activations; gradients lie in the buckets all the time."""
    ddp = rehearsed(Tokens(), "ddp", 2)
    begin, *moments = ddp.moments
    forward = {m.unit: m for m in moments if m.phase == "forward" and m.unit != AROUND}
    first, second, third = (forward[block] for block in BLOCKS)
    assert third.live_bytes - second.live_bytes == second.live_bytes - first.live_bytes > 0
    assert all(m.live_by_category["gradients"] == begin.live_by_category["gradients"] for m in moments)
    kept = [m.live_by_category["activations"] for m in (first, second, third)]
    assert kept[2] - kept[1] == third.live_bytes - second.live_bytes
    backward = [m for m in moments if m.phase == "backward" and m.unit in BLOCKS]
    assert [m.unit for m in backward] == [*reversed(BLOCKS)]
    assert backward[0].live_bytes - backward[1].live_bytes == second.live_bytes - first.live_bytes
    assert max(m.highest_bytes for m in ddp.moments) == ddp.peak_bytes
    assert "activations" not in moments[-1].live_by_category


def test_the_moves_of_tp_have_the_block_that_asks_for_them() -> None:
    tp = rehearsed(Tokens(), "tp=2", 2, on_cuda=True)
    assert max(m.highest_bytes for m in tp.moments) == tp.peak_bytes
    stream = 8 * 32 * 64 * 4 // 2  # samples, positions, width, bytes: the other rank's half
    gathered, scattered = ("all-gather", stream), ("reduce-scatter", stream)

    def block(name: str, *moves: tuple[str, int]) -> list[tuple[str, str, int]]:
        return [("compute", name, 0), *((what, f"{name} over tp", size) for what, size in moves)]

    first, *others = (block(name, *[gathered, scattered] * 2) for name in BLOCKS)
    forward = rows(tp, "forward")
    begin = [("compute", AROUND, 0), ("reduce-scatter", "over tp", stream)]
    assert forward[:-1] == [*begin, *first, *others[0], *others[1], ("compute", AROUND, 0)]
    assert forward[-1][:2] == ("all-gather", "over tp")
    norm = ("all-reduce", NORM)  # the gradient of each norm, whose positions are cut
    backward = [block(name, *[gathered, scattered, norm] * 2) for name in reversed(BLOCKS)]
    inner = [row for rows_of_block in backward for row in rows_of_block]
    around = [("compute", AROUND, 0), ("reduce-scatter", "over tp", stream), ("all-reduce", "over tp", NORM)]
    assert rows(tp, "backward") == [*around, *inner, ("compute", AROUND, 0), ("all-gather", "over tp", stream)]
    assert [unit for _, unit, _ in rows(tp, "update")] == ["over tp"], "no block is behind the norm of all gradients"


@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", ["ddp", "fsdp", "tp=2"])
def test_what_is_computed_again_stands_before_its_backward(layout: str) -> None:
    told = rehearsed(Tokens(), f"{layout},recompute=full", 2)
    again = [(m.phase, m.what, m.unit) for m in told.moments if "compute" in m.what and m.unit in BLOCKS]
    # Under tp a block's gradient is gathered first, for which nothing is needed that was computed before.
    rows = ("compute", "recompute", "compute") if layout == "tp=2" else ("recompute", "compute")
    backward = [("backward", what, block) for block in reversed(BLOCKS) for what in rows]
    assert [one for one in again if one[0] == "backward"] == backward
    assert [one for one in again if one[0] == "forward"] == [("forward", "compute", block) for block in BLOCKS]


def test_blocks_that_are_left_out_have_their_buckets_where_they_are_computed() -> None:
    """As where all are traced: those of one that stands for others together, and none is at the end for being late."""
    layers = 8
    short, full = (
        rehearsed(Tokens(layers=layers), "ddp", 2, "layout.ddp_bucket_mb=0.2", full=full) for full in (False, True)
    )
    found, (block, left_out) = rows(short, "backward"), (OTHERS + FEED, layers - 4)
    assert found == [
        ("compute", AROUND, 0),
        ("compute", "layers.7", 0),
        ("all-reduce", "bucket 1", TABLE + NORM + FEED),
        ("compute", "layers.6", 0),
        ("all-reduce", f"buckets 2 to {2 + left_out}", (1 + left_out) * block),
        ("compute", "layers.1", 0),
        ("all-reduce", "bucket 7", block),
        ("compute", "layers.0", 0),
        ("all-reduce", "bucket 8", block),
        ("compute", AROUND, 0),
        ("all-reduce", "bucket 9", OTHERS + TABLE),
    ]
    assert {m.unit: m.times for m in short.moments if m.times > 1} == {"layers.1": 5, "layers.6": 5}
    each = [row for row in rows(full, "backward") if row[0] == "all-reduce"]
    assert each == [
        ("all-reduce", "bucket 1", TABLE + NORM + FEED),
        *(("all-reduce", f"bucket {number}", block) for number in range(2, 9)),
        ("all-reduce", "bucket 9", OTHERS + TABLE),
    ]


@pytest.mark.full
def test_a_shards_stage_ends_with_the_backward_of_its_last_block() -> None:
    """Not with that of what is around the blocks, which begins at the same tensor."""
    told = rehearsed(Tokens(layers=4), "pp=2,dp_shard=2", 4, "train.micro_steps=4")
    backward = [moment for moment in told.moments if moment.phase == "backward"]
    for place, moment in enumerate(backward):
        if (moment.what, moment.unit) == ("drop", "layers.1"):
            before = backward[place - 1]
            assert (before.what, before.unit) == ("compute", "layers.1") and before.highest_bytes > before.live_bytes
    assert sum((moment.what, moment.unit) == ("drop", "layers.1") for moment in backward) == 4
    assert {moment.unit for moment in told.moments if moment.highest_bytes == told.peak_bytes} <= {"layers.1"}


@pytest.mark.parametrize(("rank", "block"), [(0, "layers.1"), (1, "layers.3")])
def test_between_stages_what_is_sent_counts_and_no_pass_is_an_update(rank: int, block: str) -> None:
    told = rehearsed(Tokens(layers=4), "pp=2", 2, "train.micro_steps=4", rank=rank)
    between = [moment for moment in told.moments if moment.what in ("send", "receive")]
    travelled = {(row.op, row.bytes) for row in told.collectives if row.op in ("send", "receive")}
    assert {moment.phase for moment in between} == {"forward", "backward"}
    for what in ("send", "receive"):
        assert (what, sum(moment.num_bytes for moment in between if moment.what == what)) in travelled
    assert told.at == ("backward of layers.1" if rank == 0 else "backward of the loss")
    backwards = {work.block for work in told.works if work.phase == "backward" and work.block}
    assert block in backwards, "the last block of a stage, too"


def test_every_micro_step_goes_forward_and_back() -> None:
    """DDP's update sends nothing, so that it is no moment."""
    for layout, end in (("fsdp", ["update"]), ("ddp", [])):
        moments = rehearsed(Tokens(), layout, 2, "train.global_batch=8", "train.micro_batch=2").moments
        phases = [phase for phase, _ in groupby(moment.phase for moment in moments)]
        assert phases == ["start", "forward", "backward", "forward", "backward", *end], layout


@pytest.mark.parametrize(("precision", "width"), [("float32", 4), ("bfloat16", 2)])
def test_what_is_dropped_is_what_was_gathered(precision: str, width: int) -> None:
    """In the type that it was gathered in. Of two ranks each receives a half."""
    moments = rehearsed(Tokens(), "fsdp", 2, f"train.precision={precision}", on_cuda=True).moments
    (gathered,) = {m.num_bytes for m in moments if (m.what, m.unit) == ("gather", "layers.1")}
    dropped = {m.num_bytes for m in moments if (m.what, m.unit) == ("drop", "layers.1")}
    assert dropped == {2 * gathered}
    block = Tokens().model().get_submodule("layers.1")
    assert dropped == {width * sum(parameter.numel() for parameter in block.parameters())}
