"""Which layouts are made, and why others are not."""

import importlib.util
from unittest.mock import patch

import pytest

from allranks import layout_refusals
from allranks.config import LayoutConfig
from allranks.errors import ConfigError, LayoutError
from allranks.layout import Layout, num_processes, parse_layout
from allranks.layout_refusals import refuse_float8, refuse_unsupported

NOTHING_SHARDED = (
    "offload=parameters keeps the shards of parameters in the host's memory, and this layout shards none (dp_shard "
    "above 1, with sharding=full or grad_op): use fsdp, or offload=activations"
)
NOBODY_TO_SHARE = (
    "offload=parameters keeps the shards of parameters in the host's memory, and one process has nobody to share them "
    "with: use recompute=full, offload=activations (on a GPU) or a smaller micro-batch, or start more processes on "
    "more devices"
)


def resolve(text: str, world_size: int) -> Layout:
    return Layout.resolve(parse_layout(text), world_size)


@pytest.mark.parametrize(
    "text",
    [
        "single",
        "ddp",
        "fsdp",
        "fsdp,sharding=grad_op",
        "ddp,sharding=none",
        "dp_replicate=2,dp_shard=2",
        "ddp,recompute=full",
        "fsdp,recompute=selective,offload=activations",
        "fsdp,offload=parameters",
        "dp_replicate=2,dp_shard=2,sharding=grad_op,offload=all",
        "cp=2,dp_shard=2,tp=2",
        "single,recompute=budget,compile=block",
        "pp=2,dp_shard=2,recompute=full",
        "pp=4,schedule=zbv",
        "dp_shard=2,dp_replicate=2,ep=4",
        "dp_replicate=2,tp=2,ep=2",
        "dp_shard=4,ep=2,sharding=optimizer",
        "dp_replicate=2,ep=2,compile=block",
        "tp=2,cp=2,pp=2,compile=block",
        "pp=2,schedule=interleaved,compile=block",
        "pp=2,recompute=selective,compile=block",
        "tp=2,recompute=full,compile=block",
    ],
)
def test_what_this_version_makes(text: str) -> None:
    refuse_unsupported(resolve(text, num_processes(parse_layout(text), 4)))


@pytest.mark.parametrize(
    ("text", "world_size", "message"),
    [
        (
            "placement,dp_shard=2",
            2,
            "dp_shard=2 with placement: each of its processes is one device, and placement takes several; leave one of "
            "them, or use placement,dp_replicate=N (DDP around it)",
        ),
        (
            "placement,offload=activations",
            1,
            "offload=activations with placement: it moves what one device keeps, and placement takes several; leave "
            "one of them, or use placement,dp_replicate=N (DDP around it)",
        ),
        (
            "ddp,offload=all",
            2,
            "offload=all keeps the shards of parameters in the host's memory, and this layout shards none (dp_shard "
            "above 1, with sharding=full or grad_op): use fsdp, or offload=activations",
        ),
        ("fsdp,offload=parameters", 1, NOBODY_TO_SHARE),
        ("single,offload=parameters", 1, NOBODY_TO_SHARE),
        ("fsdp,sharding=optimizer,offload=parameters", 2, NOTHING_SHARDED),
        ("ddp,sharding=none,offload=parameters", 2, NOTHING_SHARDED),
        (
            "pp=2,tp=2,schedule=zbv,recompute=full",
            4,
            "schedule=zbv runs the halves of a backward apart, which tp=2 and recompute=full cannot follow: use "
            "schedule=1f1b or interleaved",
        ),
        (
            "tp=2,cp=2,compile=block,recompute=selective",
            4,
            "recompute=selective with compile=block takes a block in one piece, and under tp=2 and cp=2 ranks exchange "
            "inside of one: use recompute=full, or leave compile out",
        ),
        (
            "dp_replicate=2,ep=2,compile=block,recompute=selective",
            2,
            "recompute=selective with compile=block takes a block in one piece, and under ep=2 ranks exchange inside "
            "of one: use recompute=full, or leave compile out",
        ),
        (
            "pp=2,schedule=interleaved_zb,compile=block",
            2,
            "schedule=interleaved_zb runs the halves of a backward apart, which compile=block cannot follow: use "
            "schedule=1f1b or interleaved",
        ),
        ("ddp,recompute=budget", 2, "recompute=budget leaves the choice to torch.compile: add compile=block"),
    ],
)
def test_what_is_not_made_is_refused(text: str, world_size: int, message: str) -> None:
    with pytest.raises(LayoutError) as caught:
        refuse_unsupported(resolve(text, world_size))
    assert str(caught.value) == message


def test_a_pipeline_gathers_nothing_ahead() -> None:
    given = LayoutConfig.model_validate({"dp_shard": 2, "prefetch": 2})
    refuse_unsupported(Layout.resolve(given, 2))
    with pytest.raises(
        LayoutError, match=r"^layout\.prefetch=2 gathers in the order of the model, and under pp=2 micro"
    ):
        refuse_unsupported(Layout.resolve(given.model_copy(update={"pp": 2}), 4))


def test_parameters_in_the_hosts_memory_do_not_go_with_local_sgd() -> None:
    given = LayoutConfig.model_validate({"dp_replicate": 2, "dp_shard": 2, "local_sgd": 5, "offload": "parameters"})
    with pytest.raises(
        LayoutError, match=r"^offload=parameters with layout\.local_sgd is not made \(the copies exchange"
    ):
        refuse_unsupported(Layout.resolve(given, 4))


@pytest.mark.parametrize(
    ("text", "world_size", "what"),
    [
        ("tp=2,pp=2", 4, "tp=2 and pp=2 is not made (each part of a layer would scale by its own largest value)"),
        ("dp_replicate=2,ep=2", 2, "ep=2 is not made or tested"),
        ("cp=2", 2, "cp=2 is not made or tested"),
        ("pp=2,cp=2", 4, "cp=2 and pp=2 is not made or tested"),
        ("placement", 1, "placement is not made or tested"),
        ("data_parallel", 1, "data_parallel is not made or tested"),
    ],
)
def test_float8_goes_with_whole_layers(text: str, world_size: int, what: str) -> None:
    with pytest.raises(LayoutError) as caught:
        refuse_float8(resolve(text, world_size))
    assert str(caught.value) == (
        f"train.precision=float8 with {what}: use ddp, fsdp or hsdp, or train.precision=bfloat16"
    )


@pytest.mark.parametrize("text", ["ddp", "fsdp", "single"])
def test_float8_needs_its_extra(text: str) -> None:
    layout = resolve(text, 1 if text == "single" else 2)
    with patch.object(layout_refusals, "find_spec", lambda name: None), pytest.raises(ConfigError) as caught:
        refuse_float8(layout)
    assert str(caught.value) == (
        "train.precision=float8 needs torchao, which is not installed: pip install 'torchao>=0.18', or take "
        "train.precision=bfloat16"
    )
    with patch.object(layout_refusals, "find_spec", lambda name: importlib.util.find_spec("json")):
        refuse_float8(layout)
