"""Parameters, FLOPs and saved activations of a shape against the papers' formulas."""

from dataclasses import replace

import pytest

from allranks.errors import ConfigError
from allranks.model_profile import Operation
from allranks.model_shape import ModelShape
from allranks.shape_operations import Program

GPT = ModelShape("gpt", 4, 512, 8, 2048, 1024, seq=128, dropout=True)
LLAMA = ModelShape(
    "llama", 4, 512, 8, 1536, 1024, kv_heads=2, seq=128, gated=True, positions="rotary", tied=False, bias=False
)


def test_parameters_of_a_gpt() -> None:
    hidden, layers = 512, 4
    # Each layer: 12 h^2 weights and 13 h biases and norms (2104.04473, equation 2), positions, words, a last norm.
    assert GPT.parameters == layers * (12 * hidden**2 + 13 * hidden) + (1024 + 128) * hidden + 2 * hidden


def test_parameters_of_a_llama() -> None:
    attention = 512 * 512 + 2 * 512 * 128 + 512 * 512
    assert LLAMA.parameters == 4 * (attention + 3 * 512 * 1536 + 2 * 512) + 2 * 1024 * 512 + 512


def test_an_untied_output_layer_has_parameters_of_its_own() -> None:
    assert replace(GPT, tied=False).parameters - GPT.parameters == 1024 * 512


def test_flops_of_a_gpt() -> None:
    seq, hidden, layers, vocab = 128, 512, 4, 1024
    # 2104.04473, appendix: 24 B s l h^2 (1 + s / 6h) + 2 B s h V for the forward.
    products = 24 * seq * layers * hidden**2 * (1 + seq / (6 * hidden)) + 2 * seq * hidden * vocab
    loss_and_norms = sum(o.flops * b.count for b in GPT.profile().blocks for o in b.operations if not o.shape)
    assert GPT.profile().flops == pytest.approx(products + loss_and_norms)


def test_saved_activations_of_a_layer() -> None:
    layer = GPT.profile(program=Program(fused=True)).blocks[1]
    seq, hidden, heads = 128, 512, 8
    # 2205.05198, section 4.1: 34 s b h without the scores, of which the kept softmax statistics take 4 s a here.
    assert layer.saved_bytes == 34 * seq * hidden + 4 * seq * heads


def test_experts_are_counted_whole_and_used_in_part() -> None:
    sparse = replace(LLAMA, experts=8, top_k=2, expert_ffn=256, shared_ffn=512, dense_layers=1)
    embedding, dense, experts, head = sparse.profile().blocks
    assert (dense.count, experts.count) == (1, 3)
    up = next(o for o in experts.operations if o.name == "experts.up")
    assert up.parameters == 8 * 2 * 512 * 256
    assert up.flops == 2.0 * (128 * 2) * 512 * 512
    assert up.chosen == 2
    assert sum(o.parameters for o in experts.operations if o.name.startswith("shared")) == 3 * 512 * 512
    assert embedding.parameters == head.parameters - 512


def test_one_layer_in_so_many_may_have_experts() -> None:
    sparse = replace(LLAMA, experts=8, top_k=2, expert_ffn=256, every=2)
    assert [(block.name, block.count) for block in sparse.profile().blocks[1:3]] == [("layers.*", 2), ("experts.*", 2)]


def test_latent_attention_has_the_low_ranks_of_its_paper() -> None:
    latent = ModelShape(
        "latent", 1, 1024, 8, 2048, 256, query_rank=128, kv_rank=64, query_dim=96, rope_dim=32, value_dim=64,
        gated=True, positions="rotary", tied=False, bias=False, seq=64, kv_heads=0, head_dim=128,
    )  # fmt: skip
    sizes = {o.name: o.parameters for o in latent.profile().blocks[1].operations if o.name.startswith("attention")}
    assert sizes["attention.query_down"] == 1024 * 128
    assert sizes["attention.query_up"] == 128 * 8 * 96
    assert sizes["attention.kv_down"] == 1024 * (64 + 32)
    assert sizes["attention.kv_up"] == 64 * 8 * (96 - 32 + 64)
    assert sizes["attention.out"] == 8 * 64 * 1024


def test_a_longer_sequence_costs_attention_twice_its_share() -> None:
    short, long = (
        sum(o.flops for o in GPT.profile(seq).blocks[1].operations if o.kind == "attention") for seq in (128, 256)
    )
    assert long == 4 * short


def _scores(shape: ModelShape, seq: int) -> Operation:
    return next(o for o in shape.profile(seq).blocks[1].operations if o.kind == "attention")


def test_in_windows_a_query_has_the_keys_of_the_mean_layer() -> None:
    """Three layers of four see 16 of 128 positions; what is kept, read and sent is that of full attention."""
    full, some = _scores(LLAMA, 128), _scores(replace(LLAMA, windows=(16, 16, 16, 0)), 128)
    assert some.flops == full.flops * (3 * 16 + 128) / 4 / 128
    assert some.windowed == 0.75
    assert some.flops * some.computed == pytest.approx(full.flops * (3 * 16 / 128 * (1 - 16 / 256) + 0.5) / 4)
    assert replace(some, flops=full.flops, in_windows=0.0, windowed=0.0) == full


def test_a_window_of_the_whole_sample_is_full_attention() -> None:
    shape = replace(LLAMA, windows=(16,))
    assert _scores(shape, 16) == _scores(LLAMA, 16)
    assert not shape.profile(16).has_windows and shape.profile(17).has_windows
    assert not LLAMA.profile().has_windows


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 0}, "layers=0"),
        ({"layers": 10**15}, "layers is larger than 100,000"),
        ({"vocab": 10**400}, "vocab is larger than 1,000,000,000"),
        ({"experts": 10**400, "top_k": 10**400}, "is larger than 1,000,000,000"),
        ({"heads": 7}, r"hidden\(512\) / heads\(7\)"),
        ({"kv_heads": 3}, r"kv_heads\(3\) does not divide heads\(8\)"),
        ({"kv_heads": -8}, "kv_heads=-8, but it has to be at least 0"),
        ({"experts": -3, "top_k": 1}, "experts=-3, but it has to be at least 0"),
        ({"experts": 4, "top_k": 5}, "top_k=5 of experts=4"),
        ({"top_k": 2}, "top_k=2, but it has no experts to choose from: give experts"),
    ],
)
def test_impossible_sizes_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(LLAMA, **changes)  # type: ignore[arg-type]


def test_a_sample_without_positions_is_refused() -> None:
    with pytest.raises(ConfigError, match="seq=-1"):
        LLAMA.profile(-1)
