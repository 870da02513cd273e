"""The GPT of allranks.models: Hugging Face's GPT-2 with the same weights, and the same under every cut."""

from typing import Any

import pytest
import torch

from allranks.models.gpt import GPT
from allranks.models.transformer import INIT_STD
from allranks.rehearsing.named import Named
from tests.rehearsing.tasks import rehearsed

SIZES: dict[str, Any] = {"vocab_size": 17, "num_layers": 2, "hidden": 16, "num_heads": 2, "max_seq": 12}
TOKENS = torch.arange(24).view(2, 12) * 5 % 17


def small(tied: bool = True) -> GPT:
    torch.manual_seed(0)
    return GPT(**SIZES, tied=tied).double()


def test_logits_are_those_of_hugging_faces_gpt2() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=17, n_positions=12, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    theirs, ours = transformers.GPT2LMHeadModel(config).double().eval(), small()
    names: dict[str, Any] = {
        "transformer.wte": ours.embedding,
        "transformer.wpe": ours.position_embedding,
        "transformer.ln_f": ours.norm,
    }
    blocks: Any = ours.layers
    for number, block in enumerate(blocks):
        at = f"transformer.h.{number}"
        names |= {f"{at}.ln_1": block.attention_norm, f"{at}.ln_2": block.feed_forward_norm}
        names |= {f"{at}.attn.c_proj": block.attention.out, f"{at}.mlp.c_fc": block.feed_forward.up}
        names |= {f"{at}.mlp.c_proj": block.feed_forward.down}
    state = {}
    for name, module in names.items():
        for kind, value in module.named_parameters():
            torch.nn.init.normal_(value)
            state[f"{name}.{kind}"] = value.T if ".c_" in name and value.ndim == 2 else value  # they keep [in, out]
    for number, block in enumerate(blocks):
        parts = (block.attention.query, block.attention.key, block.attention.value)
        for part in parts:
            torch.nn.init.normal_(part.weight)
            torch.nn.init.normal_(part.bias)
        at = f"transformer.h.{number}.attn.c_attn"
        state |= {f"{at}.weight": torch.cat([part.weight.T for part in parts], 1)}
        state |= {f"{at}.bias": torch.cat([part.bias for part in parts])}
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected
    torch.testing.assert_close(ours(TOKENS), theirs(TOKENS).logits)


def test_positions_may_be_given() -> None:
    model = small()
    whole = model(TOKENS)
    torch.testing.assert_close(model(TOKENS, torch.arange(12)), whole)
    assert float((model(TOKENS[:, :6], torch.arange(6) + 5) - whole[:, :6]).detach().abs().max()) > 1e-6, "absolute"
    with pytest.raises(ValueError, match="a sequence of 13 tokens, but max_seq is 12"):
        model(torch.zeros(1, 13, dtype=torch.int64))


def test_initial_values_are_gpt2s() -> None:
    model = GPT(vocab_size=256, num_layers=8, hidden=128, num_heads=4, tied=False)
    for name, value in model.named_parameters():
        if value.ndim == 1:
            assert bool((value == (0.0 if name.endswith("bias") else 1.0)).all()), name
        else:
            wanted = INIT_STD / 4 if name.endswith(GPT.residual_ends) else INIT_STD
            assert float(value.detach().std()) == pytest.approx(wanted, rel=0.1), name


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="hidden\\(16\\) must be a multiple of num_heads\\(3\\)"):
        GPT(**SIZES | {"num_heads": 3})


@pytest.mark.sample(4)
@pytest.mark.parametrize(("layout", "world"), [("tp=2", 2), ("pp=2", 2), ("cp=2", 2), ("dp_shard=2,tp=2", 4)])
def test_a_gpt_by_name_is_rehearsed_under_every_cut(layout: str, world: int) -> None:
    found = rehearsed(Named(name="gpt2", layers=2, seq=64), layout, world, "train.global_batch=4")
    assert not found.findings and found.peak_bytes > 0
