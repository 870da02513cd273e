"""The named models against the sizes that their papers print."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from allranks.errors import ConfigError
from allranks.hugging_face_config import from_hugging_face
from allranks.named_models import NAMED, change, find_model, find_shape, shape_of


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


def test_a_shape_by_name_by_file_and_by_sizes(tmp_path: Path) -> None:
    assert find_shape("gpt2", layers=3) == find_model("gpt2", layers=3)
    assert find_shape("", layers=2, hidden=64, heads=4) == shape_of(layers=2, hidden=64, heads=4)
    path = tmp_path / "tiny.json"
    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 100}
    path.write_text(json.dumps({"model_type": "gpt2", **sizes}))
    assert find_shape(str(path)) == from_hugging_face({"model_type": "gpt2", **sizes}, "tiny")
    assert find_shape(str(path), layers=5).layers == 5


def test_names_are_found_in_any_case_and_changed() -> None:
    assert find_model("Llama3-8B", layers=4).layers == 4
    assert change(find_model("gpt2"), seq=2048).parameters - find_model("gpt2").parameters == 1024 * 768


def test_a_wrong_size_brings_the_nearest() -> None:
    with pytest.raises(ConfigError, match="no 'layer'; nearest: layers"):
        find_model("gpt2", layer=3)


def test_a_size_that_a_model_has_not_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_heads=8, but latent attention has one vector of 512 for all heads"):
        find_model("deepseek-v3", kv_heads=8)
    every = replace(find_model("mixtral-8x7b"), expert_ffn=1024)
    with pytest.raises(ConfigError, match=r"ffn=2048 changes nothing, because each of its layers has experts, .* 1024"):
        change(every, ffn=2048)
    for shape in (replace(every, dense_layers=1), replace(every, every=2), find_model("mixtral-8x7b")):
        assert change(shape, ffn=2048).parameters < shape.parameters
    with pytest.raises(ConfigError, match="llama3-8b: top_k=4, but it has no experts"):
        find_model("llama3-8b", top_k=4)


def test_a_shape_from_keywords() -> None:
    shape = shape_of(layers=2, hidden=64, heads=4, ffn=None)
    assert (shape.ffn, shape.vocab) == (256, 50257)
    with pytest.raises(ConfigError, match="needs heads too"):
        shape_of(layers=2, hidden=64)
