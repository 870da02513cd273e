"""Single operations of a sample: bytes and FLOPs by hand."""

import importlib

import pytest

from allranks.rehearsing.named import Named
from allranks.shape_operations import OWN, Program, SampleOperations
from allranks.stepping.profile import trace_task

FUSED = Program(fused=True)
MADE = SampleOperations(seq=10, hidden=4, width=2, bias=True, gated=False, dropout=True, program=FUSED)
GATED = SampleOperations(seq=10, hidden=4, width=2, bias=False, gated=True, dropout=False, program=Program())


@pytest.fixture(scope="module", autouse=True)
def dynamo() -> None:
    """Fake tensors import this, which sets an environment variable: before any test looks."""
    importlib.import_module("torch._inductor.runtime.cache_dir_utils")
    importlib.import_module("torch._dynamo")


def test_a_linear_layer() -> None:
    made = MADE.matmul("up", 16, 4, "column", saved=80.0)
    assert (made.flops, made.shape) == (2.0 * 10 * 16 * 4, (10, 16, 4))
    assert (made.parameters, made.parameter_bytes) == (16 * 4 + 16, 4.0 * (16 * 4 + 16))
    assert (made.moved_bytes, made.saved_bytes, made.output_bytes) == (2.0 * 10 * 20, 80.0, 2.0 * 10 * 16)


def test_a_norm_with_and_without_a_bias() -> None:
    assert (MADE.norm("n").parameters, GATED.norm("n").parameters) == (8, 4)
    assert MADE.norm("n").saved_bytes == 2.0 * 10 * 4


def test_dropout_keeps_a_mask_of_one_byte() -> None:
    assert (MADE.residual("r").saved_bytes, GATED.residual("r").saved_bytes) == (40.0, 0.0)
    assert MADE.residual("r").moved_bytes == 3 * 80.0 + 40.0


def test_what_stands_between_the_matrices() -> None:
    assert MADE.activation("mlp", 100.0, "column").saved_bytes == 200.0  # gelu: input and output
    assert GATED.activation("mlp", 100.0, "column").saved_bytes == 400.0  # gate, up, silu(gate), product


def test_attention_counts_both_products_over_all_positions() -> None:
    made = MADE.scores(heads=2, kv_heads=1, read=8, output=4, dims=(2, 2), causal=True)
    assert made.flops == 2 * (2.0 * 10 * 10 * 2 * 2)
    assert made.saved_bytes == 2.0 * 10 * (8 + 4) + 4.0 * 10 * 2  # read, written, and a sum for each row and head
    assert made.shape == (10, 10, 2, 1, 2)


def test_an_expert_is_used_by_its_share_of_the_positions() -> None:
    made = GATED.expert("experts.up", 8, 4, 0.0, experts=4, top_k=2)
    assert made.shape == (20, 8, 4)
    assert (made.parameters, made.active, made.chosen) == (4 * 8 * 4, 0.5, 2)


def test_a_gated_feed_forward_has_three_matrices() -> None:
    assert sum(o.parameters for o in GATED.feed_forward("mlp", 16)) == 3 * 4 * 16
    assert sum(o.parameters for o in MADE.feed_forward("mlp", 16)) == 2 * 4 * 16 + 16 + 4


def test_rotary_reads_and_writes_once_where_it_is_fused() -> None:
    assert (MADE.rotary(6).moved_bytes, GATED.rotary(6).moved_bytes) == (2 * 120.0, 5 * 120.0)


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
@pytest.mark.parametrize(("name", "of_norms"), [("llama3-8b", 1), ("gpt2", 2)])
def test_our_program_keeps_what_a_trace_of_it_says(name: str, of_norms: int, precision: str) -> None:
    """But one number a row of each norm (of a LayerNorm two), and the angles of rotary positions, which are the same
    for all samples.
    """
    task = Named(name=name, layers=2, seq=256)
    traced, table = trace_task(task, precision, "cuda"), task.shape().profile(None, precision, OWN)
    kept = [block.saved_bytes for block in traced.blocks if block.repeated]
    assert kept == [block.saved_bytes + of_norms * 2 * 4 * 256 for block in table.blocks if block.repeated]
    plain = task.shape().profile(None, precision)
    assert kept[0] > plain.blocks[1].saved_bytes
