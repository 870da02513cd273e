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


EACH_BLOCK = ["layers.0", "layers.1", "layers.2"]
AROUND = "the rest"


def rows(told: RankRehearsal, phase: str) -> list[tuple[str, str, int]]:
    return [(m.what, m.unit, m.num_bytes) for m in told.moments if m.phase == phase]


def sizes_of(model: nn.Module) -> dict[str, int]:
    """Bytes of each block's parameters, and of those around the blocks that come before and behind them."""
    found = Counter[str]()
    for name, parameter in model.named_parameters():
        block = next((block for block in EACH_BLOCK if name.startswith(f"{block}.")), "")
        found[block or ("before" if "embed" in name else "behind")] += parameter.nbytes
    return dict(found)


def test_buckets_of_ddp_go_between_the_backwards_of_the_blocks() -> None:
    """Each where its last gradient is there, with its bytes (of two ranks each receives as much as there is)."""
    ddp = rehearsed(Tokens(), "ddp", 2, "layout.ddp_bucket_mb=0.2")
    compute = [("compute", block, 0) for block in EACH_BLOCK]
    assert rows(ddp, "forward") == [("compute", AROUND, 0), *compute, ("compute", AROUND, 0)]
    sizes = sizes_of(Tokens().model())
    one, last = rows(ddp, "backward")[2][2], 4 * 256 * 64 + 512  # where the first bucket is full
    assert rows(ddp, "backward") == [
        ("compute", AROUND, 0),
        ("compute", "layers.2", 0),
        ("all-reduce", "bucket 1", one),
        ("compute", "layers.1", 0),
        ("all-reduce", "bucket 2", sizes["layers.1"]),
        ("compute", "layers.0", 0),
        ("all-reduce", "bucket 3", sizes["layers.0"]),
        ("compute", AROUND, 0),
        ("all-reduce", "bucket 4", sum(sizes.values()) - one - sizes["layers.1"] - sizes["layers.0"]),
    ]
    assert last


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
