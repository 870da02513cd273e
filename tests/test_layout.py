"""What a layout string means in a world of a known size, and the equation where it means nothing."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.config_sections import PROCESS_AXES, LayoutConfig
from allranks.errors import LayoutError
from allranks.layout import Layout, num_processes, parse_layout, render_layout
from allranks.layout_refusals import refuse_unsupported


def resolve(text: str, world_size: int, num_nodes: int = 1) -> Layout:
    return Layout.resolve(parse_layout(text), world_size, num_nodes)


@pytest.mark.parametrize(
    ("text", "world_size", "num_nodes", "expected"),
    [
        ("auto", 3, 1, Layout(dp_replicate=3)),
        ("ddp", 2, 1, Layout(dp_replicate=2)),
        ("fsdp", 4, 1, Layout(dp_shard=4)),
        ("hsdp", 8, 2, Layout(dp_replicate=2, dp_shard=4)),
        ("hsdp", 8, 1, Layout(dp_shard=8)),
        ("single", 1, 1, Layout(kind="single")),
        ("fsdp", 1, 1, Layout(kind="single")),
        ("tp=2,dp_shard=*", 8, 1, Layout(dp_shard=4, tp=2)),
        ("pp=*,tp=2", 6, 1, Layout(pp=3, tp=2)),
        ("dp_shard=4,ep=2", 4, 1, Layout(dp_shard=4, ep=2)),
        ("fsdp,sharding=grad_op", 2, 1, Layout(dp_shard=2, sharding="grad_op")),
        ("dp_replicate=2,sharding=none", 2, 1, Layout(dp_replicate=2, sharding="none")),
        ("dp_replicate=2,dp_shard=2,sharding=none", 4, 1, Layout(dp_replicate=4, sharding="none")),
        ("fsdp,sharding=grad_op", 1, 1, Layout(sharding="grad_op", kind="single")),
        ("dp_shard=1,sharding=grad_op", 1, 1, Layout(sharding="grad_op", kind="single")),
        ("data_parallel", 1, 1, Layout(kind="data_parallel")),
        ("ddp,recompute=full,batchnorm=local", 2, 1, Layout(dp_replicate=2, recompute="full", batchnorm="local")),
    ],
)
def test_a_layout_in_a_world(text: str, world_size: int, num_nodes: int, expected: Layout) -> None:
    layout = resolve(text, world_size, num_nodes)
    assert layout == expected
    assert layout.world_size == world_size
    assert num_processes(parse_layout(text), world_size, num_nodes) == world_size


def test_the_modes_that_stand_in_toml_only_reach_the_layout() -> None:
    config = LayoutConfig(dp_replicate="*", static_graph=True, gather="bfloat16", ddp_bucket_mb=1.5)
    layout = Layout.resolve(config, 2)
    assert layout == Layout(dp_replicate=2, static_graph=True, gather="bfloat16", ddp_bucket_mb=1.5)
    assert str(layout) == "dp_replicate=2"
    assert str(resolve("fsdp,sharding=grad_op", 1)) == "single,sharding=grad_op"
    assert repr(layout) == "Layout(dp_replicate=2, static_graph=True, gather='bfloat16', ddp_bucket_mb=1.5)"


WRONG = [
    (
        "dp_replicate=2,dp_shard=3",
        4,
        "dp_replicate(2) * dp_shard(3) * tp(1) * cp(1) * pp(1) = 6, but the world has 4 processes; "
        "dp_replicate=2,dp_shard=2 fits",
    ),
    (
        "dp_shard=3",
        1,
        "dp_replicate(1) * dp_shard(3) * tp(1) * cp(1) * pp(1) = 3, but the world has 1 process; single fits",
    ),
    (
        "single",
        2,
        "dp_replicate(1) * dp_shard(1) * tp(1) * cp(1) * pp(1) = 1, but the world has 2 processes; dp_replicate=2 fits",
    ),
    (
        "tp=3,dp_shard=*",
        8,
        "dp_replicate(1) * dp_shard(*) * tp(3) * cp(1) * pp(1) = 3 * n, but the world has 8 processes; "
        "dp_shard=4,tp=2 fits",
    ),
    (
        "dp_replicate=2,tp=4,pp=4",
        24,
        "dp_replicate(2) * dp_shard(1) * tp(4) * cp(1) * pp(4) = 32, but the world has 24 processes; "
        "dp_replicate=2,tp=4,pp=3 fits",
    ),
    (
        "dp_shard=8,ep=8",
        12,
        "dp_replicate(1) * dp_shard(8) * tp(1) * cp(1) * pp(1) = 8, but the world has 12 processes; "
        "dp_shard=12,ep=4 fits",
    ),
    ("dp_shard=4,ep=3", 4, "ep(3) does not divide dp_replicate(1) * dp_shard(4) = 4; ep can be 1, 2, 4"),
    (
        "dp_replicate=2,sharding=grad_op",
        2,
        "sharding=grad_op shares over dp_shard, but dp_shard(1): there is nobody to share with; "
        "dp_shard=2,sharding=grad_op fits",
    ),
    (
        "tp=2,sharding=full",
        2,
        "sharding=full shares over dp_shard, but dp_shard(1): there is nobody to share with; a dp_shard above 1 fits",
    ),
    (
        "tp=3,pp=10000000000000",
        8,
        "dp_replicate(1) * dp_shard(1) * tp(3) * cp(1) * pp(10000000000000) = 30000000000000, but the world has 8 "
        "processes; tp=2,pp=4 fits",
    ),
    ("data_parallel", 2, "data_parallel is one process on several devices, but the world has 2 processes"),
]


@pytest.mark.parametrize(("text", "world_size", "message"), WRONG, ids=[text for text, _, _ in WRONG])
def test_what_does_not_fit_is_an_equation_with_a_proposal(text: str, world_size: int, message: str) -> None:
    with pytest.raises(LayoutError) as caught:
        resolve(text, world_size)
    assert str(caught.value) == message


@given(st.fixed_dictionaries({axis: st.integers(1, 9) for axis in PROCESS_AXES}), st.integers(1, 64), st.booleans())
def test_every_proposal_fits(degrees: dict[str, int], world_size: int, starred: bool) -> None:
    written = {**degrees, "ep": 2, **({"cp": "*"} if starred else {})}
    config = LayoutConfig.model_validate(written)
    try:
        assert Layout.resolve(config, world_size).world_size == world_size
    except LayoutError as error:
        if "ep(2) does not divide" in str(error):
            return
        proposal = str(error).rpartition("; ")[2].removesuffix(" fits")
        assert resolve(proposal, world_size).world_size == world_size


@pytest.mark.parametrize(
    ("text", "available", "num_nodes", "expected"),
    [
        ("auto", 2, 1, 2),
        ("single", 8, 1, 1),
        ("dp_shard=4,tp=2", 2, 1, 8),
        ("tp=3,dp_shard=*", 8, 1, 6),
        ("hsdp", 7, 2, 6),
        ("data_parallel", 8, 1, 1),
        ("placement", 8, 1, 1),
        ("placement,dp_replicate=2", 8, 1, 2),
        ("placement,ddp", 8, 1, 8),
    ],
)
def test_the_number_of_processes(text: str, available: int, num_nodes: int, expected: int) -> None:
    assert num_processes(parse_layout(text), available, num_nodes) == expected


def test_too_few_devices_for_what_stands_beside_the_star() -> None:
    with pytest.raises(LayoutError) as caught:
        num_processes(parse_layout("tp=3,dp_shard=*"), 2)
    assert str(caught.value) == (
        "dp_replicate(1) * dp_shard(*) * tp(3) * cp(1) * pp(1) = 3 * n, but only 2 processes can run here"
    )


@given(
    st.fixed_dictionaries({axis: st.integers(1, 4) for axis in PROCESS_AXES}),
    st.sampled_from([None, "grad_op", "none", "optimizer"]),
)
def test_the_string_of_a_layout_means_the_same_layout(degrees: dict[str, int], sharding: str | None) -> None:
    if degrees["dp_shard"] == 1 and sharding in ("grad_op", "optimizer"):
        sharding = None
    layout = Layout.resolve(LayoutConfig.model_validate({**degrees, "sharding": sharding}), math.prod(degrees.values()))
    assert resolve(str(layout), layout.world_size) == layout
    assert render_layout(parse_layout(str(layout))) == str(layout)


@pytest.mark.parametrize(
    ("text", "world_size", "replicated", "fully_sharded", "dp"),
    [
        ("single", 1, False, False, 1),
        ("ddp", 2, True, False, 2),
        ("fsdp", 2, False, True, 2),
        ("dp_replicate=2,dp_shard=2", 4, False, True, 4),
        ("dp_replicate=2,sharding=none", 2, False, True, 2),
        ("ddp,sharding=none", 1, False, False, 1),
        ("tp=2", 2, False, False, 1),
        ("cp=2", 2, True, False, 1),
        ("cp=2,dp_shard=2", 4, False, True, 2),
    ],
)
def test_who_keeps_the_copies_equal(text: str, world_size: int, replicated: bool, fully_sharded: bool, dp: int) -> None:
    layout = resolve(text, world_size)
    assert (layout.replicated, layout.fully_sharded, layout.dp) == (replicated, fully_sharded, dp)


@pytest.mark.parametrize(
    ("schedule", "num_stages", "ranks"),
    [
        ("1f1b", 2, [0, 1]),
        ("gpipe", 2, [0, 1]),
        ("interleaved", 4, [0, 1, 0, 1]),
        ("looped_bfs", 4, [0, 1, 0, 1]),
        ("interleaved_zb", 4, [0, 1, 0, 1]),
        ("zbv", 4, [0, 1, 1, 0]),
        ("dualpipev", 4, [0, 1, 1, 0]),
    ],
)
def test_where_stages_run(schedule: str, num_stages: int, ranks: list[int]) -> None:
    layout = resolve(f"pp=2,schedule={schedule}", 2)
    assert layout.num_stages == num_stages
    assert [layout.stage_rank(stage) for stage in range(num_stages)] == ranks


RULES = {"blocks.0": "cuda:0", "blocks.1": "cuda:1", "head": "cpu"}


@pytest.mark.parametrize(
    ("config", "available", "world_size", "text"),
    [
        ({"placement": RULES}, 8, 1, "placement"),
        ({"placement": RULES, "dp_replicate": "*"}, 8, 4, "placement,dp_replicate=4"),
        ({"placement": RULES, "dp_replicate": "*"}, 1, 1, "placement"),
        ({"placement": {"blocks": "cpu:1"}, "dp_replicate": "*"}, 2, 2, "placement,dp_replicate=2"),
        ({"placement": RULES, "kind": "placement"}, 8, 1, "placement"),
    ],
)
def test_rules_mean_several_devices_in_each_process(
    config: dict[str, object], available: int, world_size: int, text: str
) -> None:
    read = LayoutConfig.model_validate(config)
    assert num_processes(read, available) == world_size
    layout = Layout.resolve(read, world_size)
    refuse_unsupported(layout)
    assert (str(layout), dict(layout.placement)) == (text, config["placement"])
    assert layout.kind == "placement"
    assert Layout.resolve(parse_layout(text), world_size) == replace(layout, placement=())


def test_placement_alone_is_one_process() -> None:
    with pytest.raises(LayoutError, match="but the world has 2 processes; placement,dp_replicate=2 fits"):
        resolve("placement", 2)


def test_one_process_is_one_stage() -> None:
    layout = resolve("single,schedule=zbv", 1)
    assert (layout.num_stages, layout.stage_rank(0), layout.cuts_model) == (1, 0, False)


def test_which_numbers_of_micro_steps_a_schedule_takes() -> None:
    loop, rounds = resolve("pp=2", 2), resolve("pp=2,schedule=interleaved", 2)
    assert [m for m in range(1, 9) if loop.fits_schedule(m)] == [2, 3, 4, 5, 6, 7, 8]
    assert [m for m in range(1, 9) if rounds.fits_schedule(m)] == [4, 6, 8]
