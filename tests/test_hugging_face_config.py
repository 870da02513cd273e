"""Hugging Face's configs: public ones against the counts that were published, and what is refused."""

from typing import Any

import pytest

from allranks.errors import ConfigError
from allranks.hugging_face_config import BUILT, from_hugging_face
from allranks.named_models import find_model


def _config(kind: str, layers: int, hidden: int, heads: int, vocab: int, **other: Any) -> dict[str, Any]:
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "vocab_size": vocab}
    return {"model_type": kind, **sizes, **other}


def _moe(experts: int, top_k: int, width: int) -> dict[str, int]:
    return {"num_experts": experts, "num_experts_per_tok": top_k, "moe_intermediate_size": width}


_PUBLISHED: dict[str, tuple[float, dict[str, Any]]] = {  # billions of parameters; what config.json has of the sizes
    "starcoderbase": (15.52, {
        "model_type": "gpt_bigcode", "n_layer": 40, "n_embd": 6144, "n_head": 48, "n_inner": 24576, "n_positions": 8192,
        "vocab_size": 49152, "multi_query": True, "activation_function": "gelu_pytorch_tanh",
    }),
    "falcon-7b": (6.92, _config(
        "falcon", 32, 4544, 71, 65024, multi_query=True, new_decoder_architecture=False, num_kv_heads=71, bias=False,
        alibi=False, parallel_attn=True,
    )),
    "falcon-40b": (41.3, _config(
        "falcon", 60, 8192, 128, 65024, new_decoder_architecture=True, num_kv_heads=8, bias=False, alibi=False,
    )),
    "falcon-rw-1b": (1.31, _config(
        "falcon", 24, 2048, 32, 50304, multi_query=False, new_decoder_architecture=False, bias=True, alibi=True,
    )),
    "gemma-7b": (8.54, _config(
        "gemma", 28, 3072, 16, 256000, num_key_value_heads=16, head_dim=256, intermediate_size=24576,
        hidden_act="gelu",
    )),
    "gemma-2-9b": (9.24, _config(
        "gemma2", 42, 3584, 16, 256000, num_key_value_heads=8, head_dim=256, intermediate_size=14336,
    )),
    "minitron-4b": (4.19, _config(
        "nemotron", 32, 3072, 24, 256000, num_key_value_heads=8, head_dim=128, intermediate_size=9216,
        hidden_act="relu2", tie_word_embeddings=False,
    )),
    "qwen1.5-moe-a2.7b": (14.3, _config(
        "qwen2_moe", 24, 2048, 16, 151936, num_key_value_heads=16, intermediate_size=5632, **_moe(60, 4, 1408),
        shared_expert_intermediate_size=5632, decoder_sparse_step=1, tie_word_embeddings=False,
    )),
    "qwen3-30b-a3b": (30.5, _config(
        "qwen3_moe", 48, 2048, 32, 151936, num_key_value_heads=4, head_dim=128, intermediate_size=6144,
        **_moe(128, 8, 768), decoder_sparse_step=1, mlp_only_layers=[], tie_word_embeddings=False,
    )),
    "qwen2.5-0.5b": (0.494, _config(
        "qwen2", 24, 896, 14, 151936, num_key_value_heads=2, intermediate_size=4864, tie_word_embeddings=True,
    )),
    "llama-3.2-1b": (1.236, _config(
        "llama", 16, 2048, 32, 128256, num_key_value_heads=8, head_dim=64, intermediate_size=8192,
        tie_word_embeddings=True,
    )),
    "llama-7b": (6.74, _config("llama", 32, 4096, 32, 32000, intermediate_size=11008)),
    "mistral-7b": (7.24, _config("mistral", 32, 4096, 32, 32000, num_key_value_heads=8, intermediate_size=14336)),
    "mixtral-8x7b": (46.7, _config(
        "mixtral", 32, 4096, 32, 32000, num_key_value_heads=8, intermediate_size=14336, num_local_experts=8,
        num_experts_per_tok=2,
    )),
    "gpt-oss-20b": (20.9, _config(
        "gpt_oss", 24, 2880, 64, 201088, num_key_value_heads=8, head_dim=64, intermediate_size=2880,
        num_local_experts=32, num_experts_per_tok=4, layer_types=["sliding_attention", "full_attention"] * 12,
    )),
    "olmoe-1b-7b": (6.92, _config(
        "olmoe", 16, 2048, 16, 50304, num_key_value_heads=16, intermediate_size=1024, num_experts=64,
        num_experts_per_tok=8,
    )),
    "deepseek-v2-lite": (15.7, _config(
        "deepseek_v2", 27, 2048, 16, 102400, num_key_value_heads=16, intermediate_size=10944, n_routed_experts=64,
        num_experts_per_tok=6, moe_intermediate_size=1408, n_shared_experts=2, first_k_dense_replace=1,
        moe_layer_freq=1, q_lora_rank=None, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128,
        v_head_dim=128,
    )),
    "pythia-6.9b": (6.86, _config("gpt_neox", 32, 4096, 32, 50432, intermediate_size=16384)),
    "gpt-j-6b": (6.05, {"model_type": "gptj", "n_layer": 28, "n_embd": 4096, "n_head": 16, "vocab_size": 50400}),
    "phi-2": (2.78, _config("phi", 32, 2560, 32, 51200, intermediate_size=10240, tie_word_embeddings=False)),
    "phi-3-mini": (3.82, _config("phi3", 32, 3072, 32, 32064, num_key_value_heads=32, intermediate_size=8192)),
    "starcoder2-3b": (3.03, _config(
        "starcoder2", 30, 3072, 24, 49152, num_key_value_heads=2, intermediate_size=12288, use_bias=True,
    )),
    "opt-1.3b": (1.316, _config("opt", 24, 2048, 32, 50272, ffn_dim=8192, word_embed_proj_dim=2048)),
    "bloom-7b1": (7.07, {
        "model_type": "bloom", "n_layer": 30, "hidden_size": 4096, "num_attention_heads": 32, "vocab_size": 250880,
    }),
    "mpt-7b": (6.65, {
        "model_type": "mpt", "n_layers": 32, "d_model": 4096, "n_heads": 32, "vocab_size": 50432, "expansion_ratio": 4,
        "max_seq_len": 2048, "no_bias": True,
    }),
    "gpt-neo-2.7b": (2.65, {
        "model_type": "gpt_neo", "num_layers": 32, "hidden_size": 2560, "num_heads": 20, "vocab_size": 50257,
        "intermediate_size": None, "max_position_embeddings": 2048,
    }),
    "command-r": (35.0, _config("cohere", 40, 8192, 64, 256000, num_key_value_heads=64, intermediate_size=22528)),
    "smollm3-3b": (3.08, _config(
        "smollm3", 36, 2048, 16, 128256, num_key_value_heads=4, intermediate_size=11008,
    )),
    "bert-base-uncased": (0.110, _config(
        "bert", 12, 768, 12, 30522, intermediate_size=3072, max_position_embeddings=512, hidden_act="gelu",
    )),
    "roberta-large": (0.355, _config(
        "roberta", 24, 1024, 16, 50265, intermediate_size=4096, max_position_embeddings=514,
    )),
}  # fmt: skip


@pytest.mark.parametrize("name", _PUBLISHED)
def test_the_parameters_that_were_published(name: str) -> None:
    billions, config = _PUBLISHED[name]
    assert from_hugging_face(config).parameters / 1e9 == pytest.approx(billions, rel=0.02)


def test_the_keys_that_say_how_heads_share() -> None:
    starcoder = _PUBLISHED["starcoderbase"][1]
    assert from_hugging_face(starcoder).num_kv_heads == 1
    assert from_hugging_face({**starcoder, "multi_query": False}).num_kv_heads == 48
    assert [from_hugging_face(_PUBLISHED[name][1]).num_kv_heads for name in ("falcon-7b", "falcon-40b")] == [1, 8]


def test_an_encoder_sees_what_follows() -> None:
    bert = _PUBLISHED["bert-base-uncased"][1]
    assert not from_hugging_face(bert).causal
    assert from_hugging_face({**bert, "is_decoder": True}).causal
    assert from_hugging_face(_PUBLISHED["opt-1.3b"][1]).causal


def test_an_absent_tie_means_what_the_type_means_by_it() -> None:
    tied = {name: from_hugging_face(_PUBLISHED[name][1]).tied for name in ("gemma-7b", "mistral-7b", "opt-1.3b")}
    assert tied == {"gemma-7b": True, "mistral-7b": False, "opt-1.3b": True}
    assert not from_hugging_face({**_PUBLISHED["gemma-7b"][1], "tie_word_embeddings": False}).tied


def test_where_experts_are() -> None:
    qwen = _PUBLISHED["qwen3-30b-a3b"][1]
    shape = from_hugging_face({**qwen, "mlp_only_layers": [0, 1], "decoder_sparse_step": 2})
    assert (shape.dense_layers, shape.every) == (2, 2)
    assert from_hugging_face(_PUBLISHED["qwen1.5-moe-a2.7b"][1]).shared_ffn == 5632


@pytest.mark.parametrize("other", [{"top_k": 50}, {"top_k": 0}, {"top_k": None}, {"num_experts_per_tok": 0}])
def test_top_k_of_a_model_without_experts_is_none_of_theirs(other: dict[str, Any]) -> None:
    """It is a setting of generate(), and may be 0."""
    dense = _PUBLISHED["mistral-7b"][1]
    assert from_hugging_face({**dense, **other}) == from_hugging_face(dense)
    mixtral = _PUBLISHED["mixtral-8x7b"][1]
    assert from_hugging_face({**mixtral, "top_k": 50}) == from_hugging_face(mixtral)
    with pytest.raises(ConfigError, match="num_experts_per_tok = 0, but it has to be at least 1"):
        from_hugging_face({**mixtral, "num_experts_per_tok": 0})


def test_a_hugging_face_config_of_llama() -> None:
    config = {
        "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    }  # fmt: skip
    assert from_hugging_face(config).parameters == find_model("llama3-8b").parameters


def test_a_hugging_face_config_of_gpt2() -> None:
    config = {
        "model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_positions": 1024,
    }  # fmt: skip
    assert from_hugging_face(config).parameters == find_model("gpt2").parameters


def test_a_hugging_face_config_of_deepseek() -> None:
    config = {
        "model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128,
        "num_key_value_heads": 128, "intermediate_size": 18432, "vocab_size": 129280, "max_position_embeddings": 4096,
        "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1,
        "first_k_dense_replace": 3, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128, "v_head_dim": 128, "tie_word_embeddings": False,
    }  # fmt: skip
    assert from_hugging_face(config).parameters == find_model("deepseek-v3").parameters


def test_a_config_without_a_size_names_it() -> None:
    with pytest.raises(ConfigError, match="none of vocab_size"):
        from_hugging_face({"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 1})


@pytest.mark.parametrize("kind", ["jamba", "bart", "t5", "mamba", "distilbert", "gemma3", "RefinedWebModel", ""])
def test_a_type_that_is_not_known_is_refused_with_the_next_move(kind: str) -> None:
    with pytest.raises(ConfigError, match=rf"model_type '{kind}' is none .*give a Task .*--layers --hidden") as caught:
        from_hugging_face({**_PUBLISHED["llama-7b"][1], "model_type": kind})
    assert "\n" not in str(caught.value)


_LLAMA = _PUBLISHED["llama-7b"][1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": None}, "has no model_type, .*give a Task"),
        ({"model_type": ["llama"]}, r"model_type = \['llama'\] is no text"),
        ({"hidden_size": "4096"}, "hidden_size = '4096' is no whole number"),
        ({"hidden_size": 4096.0}, "hidden_size = 4096.0 is no whole number"),
        ({"hidden_size": [4096]}, r"hidden_size = \[4096\] is no whole number"),
        ({"hidden_size": list(range(99))}, r"hidden_size = \[0, 1, .*\.\.\. is no whole number"),
        ({"num_hidden_layers": True}, "num_hidden_layers = True is no whole number"),
        ({"num_hidden_layers": 10**15}, "layers is larger than 100,000"),
        ({"hidden_size": 10**400}, "hidden is larger than 1,000,000,000"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0, but it has to be at least 1"),
        ({"num_key_value_heads": -8}, "num_key_value_heads = -8, but it has to be at least 1"),
        ({"num_key_value_heads": {}}, r"num_key_value_heads = \{\} is no whole number"),
        ({"num_key_value_heads": 7}, r"kv_heads\(7\) does not divide heads\(32\)"),
        ({"intermediate_size": None}, "none of intermediate_size"),
        ({"tie_word_embeddings": "true"}, "tie_word_embeddings = 'true' is neither true nor false"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings = 1 is neither true nor false"),
        ({"num_experts": "8"}, "num_experts = '8' is no whole number"),
        ({"num_experts": 8}, "top_k=0 of experts=8"),
        ({"mlp_only_layers": [3]}, r"mlp_only_layers = \[3\]: only leading layers"),
        ({"mlp_only_layers": 3}, "mlp_only_layers = 3 is no list of layers"),
        ({"mlp_only_layers": ["a"]}, "is no list of layers"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "layer_types has 'linear_attention'"),
        ({"layer_types": "full_attention"}, "is no list of words"),
        ({"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        ({"word_embed_proj_dim": 512}, "word_embed_proj_dim = 512 is not hidden_size = 4096"),
        ({"model_type": "mistral"}, "a mistral does not say num_key_value_heads"),
        ({"model_type": "gemma", "num_key_value_heads": 16}, "none of head_dim"),
        ({"model_type": "falcon", "multi_query": "yes"}, "multi_query = 'yes' is neither true nor false"),
        ({"model_type": "mpt", "expansion_ratio": 2.5}, "expansion_ratio = 2.5 is no whole number"),
        ({"model_type": "starcoder2", "use_bias": 0, "num_key_value_heads": 8}, "use_bias = 0 is neither"),
    ],
)
def test_what_is_wrong_in_a_config_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        from_hugging_face({**_LLAMA, **changes})
    assert "\n" not in str(caught.value)


def test_windows_are_the_shapes() -> None:
    assert from_hugging_face(_PUBLISHED["gpt-oss-20b"][1]).windows == (128, 0) * 12
    assert from_hugging_face(_PUBLISHED["mistral-7b"][1]).windows == (4096,)
    assert from_hugging_face({**_PUBLISHED["mistral-7b"][1], "sliding_window": None}).windows == ()
    assert from_hugging_face(_PUBLISHED["qwen2.5-0.5b"][1]).windows == ()


def test_a_pattern_of_more_layers_than_there_can_be_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="layers is larger than 100,000"):
        from_hugging_face({**_PUBLISHED["gemma-2-9b"][1], "num_hidden_layers": 10**15})


def test_an_absent_number_of_key_heads_may_be_null_where_it_must_be_said() -> None:
    assert from_hugging_face({**_LLAMA, "model_type": "mistral", "num_key_value_heads": None}).num_kv_heads == 32


def test_a_bias_is_where_its_key_says_so() -> None:
    mpt, opt = _PUBLISHED["mpt-7b"][1], _PUBLISHED["opt-1.3b"][1]
    assert [from_hugging_face({**mpt, "no_bias": said}).bias for said in (True, False)] == [False, True]
    assert [from_hugging_face({**opt, "enable_bias": said}).bias for said in (True, False)] == [True, False]


def test_every_type_is_of_a_config_here() -> None:
    seen = {str(config["model_type"]) for _, config in _PUBLISHED.values()} | {"gpt2", "deepseek_v3"}
    alike = {"codegen": "gptj", "qwen3": "qwen3_moe", "olmo": "llama", "olmo2": "llama", "stablelm": "llama"}
    alike |= {"granite": "llama", "gemma3_text": "gemma2", "cohere2": "cohere"}
    assert {kind for kind in BUILT if kind not in seen} == set(alike)
    assert [kind for kind, other in alike.items() if BUILT[kind] != BUILT[other]] == []
