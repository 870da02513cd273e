"""What recompute repeats: what a dry run of the engine counts, in operations; and rule by rule."""

import importlib
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from allranks.model_profile import Block, Operation
from allranks.named_models import find_shape
from allranks.planning.mechanisms import Mechanisms
from allranks.planning.repeats import Repeats, ending, repeats_of
from allranks.rehearsing.named import Named
from allranks.shape_operations import OWN
from tests.rehearsing.tasks import rehearsed

HOW = Mechanisms(recomputes_to_last_kept=True)
SIZES: dict[str, Any] = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 128, "seq": 64}
TASKS = {
    "gpt": Named(name="gpt2", ffn=256, **SIZES),
    "llama": Named(name="llama3-8b", ffn=224, kv_heads=2, **SIZES),
    "experts": Named(name="mixtral-8x7b", ffn=256, kv_heads=2, **SIZES),
}


@pytest.fixture(scope="module", autouse=True)
def dynamo() -> None:
    """Fake tensors import this, which sets an environment variable: before any test looks."""
    importlib.import_module("torch._inductor.runtime.cache_dir_utils")
    importlib.import_module("torch._dynamo")


@cache
def counted(name: str, recompute: str) -> float:
    """FLOPs of one rank's step, on one sample."""
    keys = ("train.global_batch=2", "train.precision=bfloat16")
    return float(rehearsed(TASKS[name], f"fsdp,recompute={recompute}", 2, *keys).flops)


def repeated(name: str, recompute: str) -> float:
    """FLOPs of one sample that a plan takes to be repeated; a dry run counts those of products and attention."""
    return sum(
        block.count * operation.flops * (repeats.full if recompute == "full" else repeats.selective)
        for block in TASKS[name].shape().profile(program=OWN).blocks
        if block.repeated
        for operation, repeats in zip(block.operations, repeats_of(block, HOW), strict=True)
        if operation.kind in ("matmul", "attention", "route")
    )


@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize("name", TASKS)
def test_as_many_operations_are_repeated_as_a_dry_run_counts(name: str, recompute: str) -> None:
    """Exactly; but a router's product, which selective keeps, counts with the rest of its time, which is repeated."""
    router = 0.01 if (name, recompute) == ("experts", "selective") else 0.0
    again = counted(name, recompute) - counted(name, "none")
    assert repeated(name, recompute) == pytest.approx(again, rel=router)


def shares(block: Block, how: Mechanisms = HOW) -> dict[str, Repeats]:
    return {o.name: r for o, r in zip(block.operations, repeats_of(block, how), strict=True)}


def test_products_are_numbered_one_by_one() -> None:
    """Of Llama query, value, gate and down are kept; of a GPT query, value and up."""
    llama = shares(find_shape("llama3-8b").profile().blocks[1])
    kept = (4096 + 1024) / (4096 + 2 * 1024)
    assert llama["attention.qkv"] == pytest.approx((1, 1 - kept, kept))
    names = "attention.out", "mlp.up", "mlp.down"
    assert [llama[name] for name in names] == [(1, 1, 0), (1, 0.5, 0.5), (0, 0, 1)]
    gpt = shares(find_shape("gpt2").profile().blocks[1])
    assert gpt["attention.qkv"].kept == pytest.approx(2 / 3)
    assert [gpt[name] for name in names] == [(1, 1, 0), (1, 0, 1), (0, 0, 0)]


def test_attention_is_kept_where_it_is_fused_and_all_between_products_is_repeated() -> None:
    block = find_shape("llama3-8b").profile().blocks[1]
    fused, plain = shares(block), shares(block, replace(HOW, fused_attention=False))
    assert [one["attention.scores"] for one in (fused, plain)] == [(1, 0, 1), (1, 1, 0)]
    assert [fused[name] for name in ("norm1", "mlp.activation", "residual2")] == [(1, 1, 0), (1, 1, 0), (0, 0, 0)]


def test_experts_are_all_repeated_and_a_routers_scores_kept() -> None:
    found = shares(find_shape("mixtral-8x7b").profile().blocks[1])
    assert [found[name] for name in ("experts.up", "experts.down", "residual2")] == [(1, 1, 0)] * 3
    assert found["router"] == (1, 1, 1)


def test_a_compiled_block_runs_to_its_end() -> None:
    block = find_shape("gpt2").profile().blocks[1]
    assert {one.full for one in repeats_of(block, Mechanisms())} == {1.0}
    assert shares(block, Mechanisms())["mlp.down"].selective == 0.0  # torch.compile cuts what nobody asks for


def test_convolutions_are_kept_and_not_numbered() -> None:
    product = Operation("product", "matmul", shape=(4, 8, 8), saved_bytes=1.0)
    convolution = Operation("convolution", "conv", shape=(4, 8, 8), saved_bytes=1.0)
    loss = Operation("loss", "loss", saved_bytes=1.0)
    found = repeats_of(Block("block", (product, convolution, product, convolution, loss)), HOW)
    assert [one.kept for one in found] == [1, 1, 0, 1, 0]


def test_a_block_ends_with_its_last_product_where_nothing_behind_it_is_kept() -> None:
    layer = find_shape("gpt2").profile().blocks[1]
    last = ending(layer)
    assert last is not None and last.name == "mlp.down"
    dropped = replace(layer.operations[-1], saved_bytes=1.0)
    assert ending(replace(layer, operations=(*layer.operations[:-1], dropped))) is None
    assert ending(find_shape("mixtral-8x7b").profile().blocks[1]) is None
    assert ending(Block("norm", (layer.operations[0],))) is None
