"""The named models against the sizes that their papers print, and Hugging Face's configs."""

import pytest

from allranks.errors import ConfigError
from allranks.named_models import NAMED, change, find_model, from_hugging_face, shape_of


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt2", 0.1244),
        ("gpt2-xl", 1.558),
        ("gpt3-175b", 174.6),
        ("llama2-7b", 6.74),
        ("llama2-70b", 68.98),
        ("llama3-8b", 8.03),
        ("llama3-70b", 70.55),
        ("llama3-405b", 405.85),
        ("100b", 101.6),
        ("mixtral-8x7b", 46.7),
        ("deepseek-v3", 671.0),
    ],
)
def test_the_parameters_that_the_papers_print(name: str, billions: float) -> None:
    assert find_model(name).parameters / 1e9 == pytest.approx(billions, rel=2e-3)


def test_every_named_model_has_a_source() -> None:
    assert [name for name, shape in NAMED.items() if not shape.source] == []


def test_a_wrong_name_brings_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'llama3-9b' is no model .* llama3-8b"):
        find_model("llama3-9b")


def test_names_are_found_in_any_case_and_changed() -> None:
    assert find_model("Llama3-8B", layers=4).layers == 4
    assert change(find_model("gpt2"), seq=2048).parameters - find_model("gpt2").parameters == 1024 * 768


def test_a_wrong_size_brings_the_nearest() -> None:
    with pytest.raises(ConfigError, match="no 'layer'; nearest: layers"):
        find_model("gpt2", layer=3)


def test_a_shape_from_keywords() -> None:
    shape = shape_of(layers=2, hidden=64, heads=4, ffn=None)
    assert (shape.ffn, shape.vocab) == (256, 50257)
    with pytest.raises(ConfigError, match="needs heads too"):
        shape_of(layers=2, hidden=64)


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
        from_hugging_face({"n_layer": 1, "n_embd": 8, "n_head": 1})
