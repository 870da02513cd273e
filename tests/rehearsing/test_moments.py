"""The step unit by unit: what FSDP gathers, computes, drops and reduces, with the memory at each."""

from itertools import groupby

import pytest

from allranks.rehearsing.ledger import Stored
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


def test_buckets_of_ddp_and_moves_of_tp() -> None:
    ddp = {(m.what, m.unit) for m in rehearsed(Tokens(), "ddp", 2).moments}
    assert ("all-reduce", "bucket 1") in ddp
    tp = rehearsed(Tokens(), "tp=2", 2, on_cuda=True)
    assert any(m.what == "all-gather" and m.unit == "over tp" and m.num_bytes > 0 for m in tp.moments)
    assert max(m.highest_bytes for m in tp.moments) == tp.peak_bytes


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
