"""Where a layout has nothing that a hook could change, it is refused in a line."""

import pytest

from allranks.config import resolve_config
from allranks.errors import LayoutError
from allranks.layout import Layout
from allranks.slow_links import check_slow_links


def refusal(layout: str, world_size: int, *overrides: str) -> str:
    config = resolve_config(task_defaults={}, toml=None, overrides=overrides, layout=layout)
    try:
        check_slow_links(config, Layout.resolve(config.layout, world_size))
    except LayoutError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("layout", "world_size"),
    [("ddp", 2), ("tp=2,dp_replicate=2", 4), ("cp=2", 2), ("dp_shard=2,sharding=optimizer", 2)],
)
def test_where_ddp_is_it_may_be(layout: str, world_size: int) -> None:
    for hook in ("none", "bfloat16", "float16"):
        assert refusal(layout, world_size, f"layout.ddp_hook={hook}") == ""


@pytest.mark.parametrize(
    ("layout", "world_size"), [("single", 1), ("fsdp", 2), ("dp_replicate=2,dp_shard=2", 4), ("tp=2", 2)]
)
def test_where_there_is_no_ddp_it_is_refused(layout: str, world_size: int) -> None:
    said = refusal(layout, world_size, "layout.ddp_hook=bfloat16")
    assert said.startswith("layout.ddp_hook=bfloat16 changes what DDP sends, and ") and " has no DDP: leave it" in said
    assert refusal(layout, world_size) == ""


@pytest.mark.parametrize(
    ("layout", "world_size", "overrides", "message"),
    [
        ("fsdp", 2, (), "local_sgd=4 puts the copies of dp_replicate together, and dp_shard=2 has one: leave it out"),
        ("single", 1, (), "local_sgd=4 puts the copies of dp_replicate together, and single has one: leave it out"),
        ("ddp,sharding=none", 2, (), "local_sgd=4 leaves copies by themselves, and sharding=none keeps them together"),
        (
            "dp_replicate=2,ep=2",
            2,
            (),
            "local_sgd=4 lets each copy train by itself, and ep=2 cuts its experts over more ranks than the dp_shard=1 "
            "of a copy: ep can be 1",
        ),
        ("dp_replicate=2,dp_shard=4,ep=8", 8, (), "dp_shard=4 of a copy: ep can be 1, 2, 4"),
        ("ddp", 2, ("guard.spike=skip",), "and guard.spike=skip judges one a step: use guard.spike=log"),
        (
            "ddp",
            2,
            ("layout.ddp_hook=bfloat16",),
            "local_sgd=4 leaves DDP nothing to send between copies, which is what layout.ddp_hook=bfloat16 changes, "
            "and inside of a copy a hook is not made: leave one of them",
        ),
        (
            "ddp",
            2,
            ("train.steps=10",),
            "train.steps=10: the run ends where the copies are one, every 4 steps: 8 or 12",
        ),
        ("ddp", 2, ("evaluate.every=3",), "evaluate.every=3: a model is evaluated where the copies are one, every 4"),
    ],
)
def test_copies_that_cannot_be_by_themselves(
    layout: str, world_size: int, overrides: tuple[str, ...], message: str
) -> None:
    assert message in refusal(layout, world_size, "layout.local_sgd=4", *overrides)


def test_copies_by_themselves() -> None:
    inside = ("dp_shard", "tp", "cp", "pp")
    layouts = [("ddp", 2), ("dp_replicate=2,dp_shard=2,ep=2", 4), *((f"dp_replicate=2,{one}=2", 4) for one in inside)]
    for layout, size in layouts:
        assert refusal(layout, size, "layout.local_sgd=4", "train.steps=8", "evaluate.every=0") == ""
        assert refusal(layout, size, "layout.local_sgd=4", "train.epochs=3", "evaluate.every=4") == ""


def test_what_goes_past_ddp_is_refused() -> None:
    start = "layout.ddp_hook=float16 changes what DDP sends, and with "
    hook = "layout.ddp_hook=float16"
    assert refusal("pp=2,dp_replicate=2", 4, hook).startswith(f"{start}pp=2 gradients are averaged after")
    assert refusal("dp_replicate=2,ep=2", 2, hook) == f"{start}ep=2 experts' are averaged without it"


def test_powersgd_wants_whole_matrices_of_one_scale() -> None:
    hook = "layout.ddp_hook=powersgd"
    assert refusal("ddp", 2, hook) == "" == refusal("cp=2", 2, hook)
    assert refusal("tp=2,dp_replicate=2", 4, hook).endswith("tp=2 cuts them: use layout.ddp_hook=bfloat16")
