"""The step unit by unit: what FSDP gathers, computes, drops and reduces, with the memory at each."""

from itertools import groupby

import pytest

from allranks.parallel.step_record import Deed
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
        ("fsdp,sharding=optimizer", 2, "the model", [("forward", "compute"), ("backward", "compute")]),
        ("fsdp,sharding=optimizer", 2, "bucket 1", [("backward", "all-reduce")]),
        ("fsdp,sharding=optimizer", 2, "over dp_shard", [("update", "all-gather")]),
    ],
)
def test_the_other_ways_to_share(layout: str, world: int, unit: str, deeds: list[tuple[str, str]]) -> None:
    """Parameters that nobody shares are gathered and scattered by nobody; the optimizer's shares meet at its end."""
    moments = rehearsed(Tokens(), layout, world, on_cuda=True).moments
    assert [(m.phase, m.what) for m in moments if m.unit == unit] == deeds


def test_buckets_of_ddp_and_moves_of_tp() -> None:
    """In their order, with their bytes: of DDP every gradient once (of two ranks each receives as much)."""
    ddp = rehearsed(Tokens(), "ddp", 2)
    begin, *deeds = ddp.moments
    size = sum(parameter.numel() for parameter in Tokens().model().parameters())
    assert (begin.what, [(m.phase, m.what, m.unit, m.num_bytes) for m in deeds]) == (
        "begin",
        [
            ("forward", "compute", "the model", 0),
            ("backward", "compute", "the model", 0),
            ("backward", "all-reduce", "bucket 1", 4 * size),
        ],
    )
    assert begin.live_bytes < deeds[0].live_bytes > deeds[-1].live_bytes, "activations come, and go"
    tp = rehearsed(Tokens(), "tp=2", 2, on_cuda=True)
    assert max(m.highest_bytes for m in tp.moments) == tp.peak_bytes
    forward = [(m.what, m.unit, m.num_bytes) for m in tp.moments if m.phase == "forward"]
    stream = 8 * 32 * 64 * 4 // 2  # samples, positions, width, bytes: the other rank's half
    scattered, gathered = ("reduce-scatter", "over tp", stream), ("all-gather", "over tp", stream)
    assert forward[:-1] == [("compute", "the model", 0), scattered, *[gathered, scattered] * 6], "two for each block"
    assert forward[-1][:2] == ("all-gather", "over tp")


@pytest.mark.full
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
