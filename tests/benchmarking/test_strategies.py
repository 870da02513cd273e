"""Which cases are planned, and what a row says of what was measured."""

import pytest

from allranks.benchmarking.strategies import (
    Case,
    Measured,
    check_twin,
    plan_cases,
    read_layouts,
    read_numbers,
    summarise,
)
from allranks.errors import ConfigError, LayoutError
from allranks.layout import Layout


def _planned(strategies: list[str] | None, nproc: list[int] | None) -> list[tuple[str, int]]:
    return [(case.strategy, case.layout.world_size) for case in plan_cases(strategies, nproc)]


def test_without_a_compiler_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert not [strategy for strategy, _ in _planned(None, None) if "compile" in strategy]
    assert _planned(["ddp,compile=block"], [2]) == [("ddp,compile=block", 2)]


def test_by_default_everything_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "true")
    planned = _planned(None, None)
    assert planned[0] == ("single", 1)
    assert len(planned) == 1 + 23 + 19
    assert [world for _, world in planned] == sorted(world for _, world in planned)
    assert ("tp=2,dp_shard=2", 4) in planned and ("tp=2,dp_shard=2", 2) not in planned
    assert {world for _, world in _planned(None, [2])} == {1, 2}


def test_what_is_asked_for_has_to_fit() -> None:
    assert _planned(["fsdp", "tp=2,dp_shard=2"], [2, 4]) == [("fsdp", 2), ("fsdp", 4), ("tp=2,dp_shard=2", 4)]
    assert _planned(["tp=3"], None) == [("tp=3", 3)]
    with pytest.raises(LayoutError, match="but the world has 2 processes"):
        plan_cases(["tp=2,dp_shard=2"], [2])
    with pytest.raises(ConfigError, match="fdsp"):
        plan_cases(["fdsp"], None)


def test_only_what_has_a_twin() -> None:
    refused = Layout(offload="activations"), Layout(tp=2, dp_replicate=2), Layout(dp_shard=2, local_sgd=2)
    several = Layout(dp_replicate=2, ddp_hook="powersgd")
    others = Layout(dp_shard=2, ep=2, tp=2), Layout(pp=2, tp=2), Layout(pp=8, schedule="zbv"), Layout(cp=2, tp=2)
    inside = [Layout(pp=2, recompute="full"), Layout(pp=2, compile="block"), Layout(cp=2, compile="block")]
    inside += [Layout(pp=2, dp_replicate=2, dp_shard=2), Layout(pp=2, dp_replicate=2, compile="block")]
    inside += [Layout(pp=2, dp_shard=2, sharding="optimizer"), Layout(pp=2, dp_replicate=2, ddp_hook="float16")]
    inside += [Layout(cp=2, dp_replicate=2, dp_shard=2), Layout(cp=2, dp_shard=2, sharding="optimizer")]
    inside += [Layout(cp=2, dp_replicate=2, ep=2), Layout(cp=2, dp_shard=2, recompute="full")]
    inside += [Layout(pp=2, dp_replicate=2, ep=2), Layout(pp=2, dp_replicate=2, sharding="none")]
    inside += [Layout(dp_replicate=2, dp_shard=2, ep=2), Layout(dp_shard=2, ep=2, sharding="optimizer")]
    inside += [Layout(dp_shard=2, ep=2, recompute="full")]
    inside += [Layout(dp_replicate=2, ep=2, sharding="none"), Layout(dp_replicate=2, ep=2, compile="block")]
    for layout in (*refused, *others, *inside, several):
        with pytest.raises(LayoutError, match=r"twin|DDP|micro-steps of this command"):
            check_twin(layout)
    check_twin(Layout(tp=2, dp_replicate=2, sharding="none", recompute="full"))
    for schedule in ("gpipe", "interleaved", "looped_bfs", "interleaved_zb", "zbv", "dualpipev"):
        check_twin(Layout(pp=2, schedule=schedule))
    check_twin(Layout(pp=2, dp_replicate=2, schedule="zbv"))
    check_twin(Layout(pp=2, dp_shard=2, sharding="grad_op"))
    check_twin(Layout(cp=2, context="ring"))
    check_twin(Layout(cp=2, dp_replicate=2, context="ring"))
    check_twin(Layout(cp=2, dp_shard=2, sharding="grad_op"))
    check_twin(Layout(dp_replicate=2, local_sgd=2, outer_lr=0.5))
    check_twin(Layout(dp_replicate=2, ddp_hook="powersgd", ddp_bucket_mb=64))
    for layout in (
        Layout(dp_replicate=4, ep=2),
        Layout(dp_shard=4, ep=2),
        Layout(dp_shard=4, ep=4, sharding="grad_op"),
    ):
        check_twin(layout)
    for layout in (Layout(recompute="selective"), Layout(cp=2), Layout(pp=4), Layout(dp_replicate=2, compile="block")):
        check_twin(layout)


def test_lists_are_read() -> None:
    assert read_numbers("2,4") == (2, 4)
    assert read_layouts("ddp; fsdp,sharding=grad_op;") == ("ddp", "fsdp,sharding=grad_op")
    for wrong in ("", "2,x", "-1"):
        with pytest.raises(ConfigError, match="--nproc"):
            read_numbers(wrong)
    with pytest.raises(ConfigError, match="no axis or mode"):
        read_layouts("ddp;shards=2")
    assert read_layouts("ddp layout.ddp_hook=bfloat16;fsdp") == ("ddp layout.ddp_hook=bfloat16", "fsdp")
    with pytest.raises(ConfigError, match=r"'train.steps=2' behind the layout ddp: expected keys of the layout"):
        read_layouts("ddp train.steps=2")
    with pytest.raises(ConfigError, match=r"layout.ddp_hook=int8"):
        read_layouts("ddp layout.ddp_hook=int8")


def test_keys_behind_a_layout_make_another_case() -> None:
    keys = ["ddp layout.ddp_hook=bfloat16", "ddp layout.local_sgd=2", "cp=* layout.context=ring"]
    cases = plan_cases(["ddp", *keys], [2])
    assert [(c.layout.ddp_hook, c.layout.local_sgd, c.layout.context) for c in cases] == [
        ("none", None, "ulysses"), ("bfloat16", None, "ulysses"), ("none", 2, "ulysses"), ("none", None, "ring"),
    ]  # fmt: skip


def test_a_row_is_medians_ratios_and_what_misses() -> None:
    ddp = Case("ddp", Layout(dp_replicate=2)), Measured([(0.1, 0.1)] * 4, (100, 102), (5.0, 5.0))
    beside = [(0.2, 0.2), (0.1, 0.15), (0.1, 0.13)]
    turns = [(0.1, 0.12), (0.2, 0.26), (0.1, 0.13)]
    fsdp = Case("fsdp", Layout(dp_shard=2)), Measured(turns, (100, 103), (5.0, 5.0), beside)
    first, second = summarise([ddp, fsdp])
    assert (first.ours_ms, first.ratio, first.memory_ratio, first.of_ddp, first.misses) == (100.0, 1.0, 1.02, None, ())
    assert (second.raw_ms, second.ours_ms, second.ratio, second.of_ddp) == (100.0, 130.0, 1.3, 1.3)
    assert second.misses == ("time", "memory", "of_ddp")


def test_losses_that_differ_are_not_timed() -> None:
    untimed = Case("ddp", Layout(dp_replicate=2)), Measured([], (0, 0), (5.0, 5.01))
    (row,) = summarise([untimed])
    assert (row.ratio, row.memory_ratio, row.misses) == (None, None, ("loss",))
    assert row.loss_difference == pytest.approx(0.002)
