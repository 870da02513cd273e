"""The step unit by unit: what FSDP gathers, computes, drops and reduces, with the memory at each."""

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
