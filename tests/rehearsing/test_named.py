"""A model by name: the module is made from the table that its profile is made from."""

import json
from pathlib import Path

import pytest
import torch

from allranks.errors import ConfigError
from allranks.named_models import NAMED
from allranks.rehearsing.named import Named

REHEARSED = (
    "gpt2",
    "gpt2-xl",
    "gpt3-175b",
    "llama2-7b",
    "llama2-70b",
    "llama3-8b",
    "llama3-70b",
    "llama3-405b",
    "100b",
    "mixtral-8x7b",
)


@pytest.mark.parametrize("name", NAMED)
def test_module_and_profile_have_the_same_parameters(name: str) -> None:
    task = Named(name=name)
    if name not in REHEARSED:
        with pytest.raises(ConfigError, match="can be planned and not rehearsed"):
            task.model()
        return
    with torch.device("meta"):
        model = Named(name=name, layers=2).model()
    assert sum(p.numel() for p in model.parameters()) == Named(name=name, layers=2).shape().profile().parameters


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("llama", {"num_key_value_heads": 2}),
        ("llama", {"head_dim": 16, "tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 24, "num_key_value_heads": 2}),
        ("mixtral", {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}),
        ("qwen3_moe", {
            "head_dim": 24, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
        }),
        ("gpt2", {}),
    ],
)  # fmt: skip
def test_a_config_file_is_the_module_that_its_profile_has(kind: str, sizes: dict[str, int], tmp_path: Path) -> None:
    known = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    config = {"model_type": kind, **known, "vocab_size": 100, "max_position_embeddings": 32, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    task = Named(name=str(tmp_path / "config.json"))
    model = task.model()
    assert sum(p.numel() for p in model.parameters()) == task.shape().profile().parameters
    assert model(torch.zeros(1, 32, dtype=torch.int64)).shape == (1, 32, 100)


def test_sizes_alone_are_a_model() -> None:
    task = Named(name="", layers=2, hidden=64, heads=4, vocab=100, seq=16)
    assert sum(p.numel() for p in task.model().parameters()) == task.shape().profile().parameters
    with pytest.raises(ConfigError, match="needs heads too"):
        Named(name="", layers=2, hidden=64).model()


@pytest.mark.parametrize(
    ("changes", "move"),
    [({"kv_heads": 2}, "give a Task"), ({"experts": 4, "top_k": 2}, "give your sizes to mixtral-8x7b, or a Task")],
    ids=["shared keys", "experts of two matrices"],
)
def test_what_no_module_has_is_refused(changes: dict[str, int], move: str) -> None:
    with pytest.raises(ConfigError, match=rf"shape can be planned and not rehearsed: .* {move}"):
        Named(name="", layers=2, hidden=64, heads=4, **changes).model()


def test_rotary_heads_of_an_odd_width_are_refused_before_a_module_is(tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config |= {"intermediate_size": 96, "vocab_size": 100, "head_dim": 15}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="heads of an even width"):
        Named(name=str(tmp_path / "config.json")).model()


def test_settings_change_the_shape() -> None:
    task = Named(name="llama3-8b", seq=64, layers=3)
    sample = task.dataset("train")[5]
    assert sample["tokens"].shape == sample["y"].shape == (64,)
    assert task.shape().layers == 3
    assert task.dataset("validation") is None


def test_zero_is_the_models_own() -> None:
    own = Named(name="llama3-8b")
    zeros = Named(name="llama3-8b", seq=0, chunk=0, layers=0, heads=0)
    assert zeros.shape() == own.shape() and zeros.shape().seq == len(zeros.dataset("train")[0]["tokens"]) == 8192
    assert set(zeros.inputs(zeros.dataset("train")[0])) == {"tokens"}, "no chunks"


@pytest.mark.parametrize(("changes", "message"), [({"seq": -5}, "seq=-5, but"), ({"chunk": -5}, "chunk=-5, but")])
def test_less_than_zero_is_refused(changes: dict[str, int], message: str) -> None:
    with torch.device("meta"), pytest.raises(ConfigError, match=message):
        Named(name="llama3-8b", **changes).model()


def test_the_loss_may_come_in_chunks() -> None:
    whole, chunked = Named(name="llama3-8b", seq=8), Named(name="llama3-8b", seq=8, chunk=4)
    batch = {"tokens": torch.zeros(1, 8, dtype=torch.int64), "y": torch.zeros(1, 8, dtype=torch.int64)}
    assert set(whole.inputs(batch)) == {"tokens"}
    assert set(chunked.inputs(batch)) == {"tokens", "targets"}
    assert whole.loss(torch.zeros(1, 8, 16), batch).item() == pytest.approx(8 * torch.log(torch.tensor(16.0)).item())
    assert chunked.loss(torch.ones(1, 8), batch).item() == 8


@pytest.mark.parametrize("name", ["gpt2", "llama3-8b", "mixtral-8x7b"])
def test_every_kind_of_module_has_its_loss_in_chunks(name: str) -> None:
    """Which `dryrun --remedies` proposes for any name."""
    sizes = {"layers": 1, "hidden": 16, "heads": 2, "kv_heads": 2, "ffn": 16, "vocab": 16, "seq": 8}
    task, whole = Named(name=name, chunk=4, **sizes), Named(name=name, **sizes)
    batch = {"tokens": torch.zeros(1, 8, dtype=torch.int64), "y": torch.zeros(1, 8, dtype=torch.int64)}
    chunked, plain = task.model(), whole.model()
    plain.load_state_dict(chunked.state_dict())
    losses, logits = chunked(**task.inputs(batch)), plain(**whole.inputs(batch))
    assert losses.shape == (1, 8)
    assert task.loss(losses, batch).item() == pytest.approx(whole.loss(logits, batch).item(), rel=1e-5)
