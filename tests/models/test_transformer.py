"""The reference transformer: causal, positions relative, sizes and initial values as documented."""

import itertools
import math

import pytest
import torch
from torch import nn

from allranks.models.transformer import INIT_STD, Attention, FeedForward, Transformer, generate, rotary_angles, rotate

SIZES = {"vocab_size": 17, "num_layers": 2, "hidden": 16, "num_heads": 2, "max_seq": 12}


def small(tied: bool = True) -> Transformer:
    torch.manual_seed(0)
    return Transformer(**SIZES, tied=tied).double()


TOKENS = torch.arange(24).view(2, 12) * 5 % 17


def test_logits_of_a_position_depend_on_it_and_on_those_before_it_only() -> None:
    model = small()
    logits = model(TOKENS)
    assert logits.shape == (2, 12, 17)
    changed = TOKENS.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 17
    difference = (model(changed) - logits).abs().amax(dim=(0, 2))
    assert difference[:7].max() == 0
    assert difference[7:].min() > 0
    torch.testing.assert_close(model(TOKENS[:, :5]), logits[:, :5])


def test_positions_may_be_given() -> None:
    model = small()
    places = torch.tensor([3, 4, 5, 9, 10, 11])
    shifted = model(TOKENS[:, :6], torch.arange(6) + 5)
    torch.testing.assert_close(shifted, model(TOKENS[:, :6]))  # they are relative
    assert float((model(TOKENS[:, :6], places) - shifted).detach().abs().max()) > 1e-6


def test_attention_is_the_textbooks() -> None:
    torch.manual_seed(1)
    attention = Attention(hidden=8, num_heads=2, num_kv_heads=2, max_seq=6).double()
    value = torch.randn(1, 6, 8, dtype=torch.float64)
    query, key, content = (value @ layer.weight.T for layer in (attention.query, attention.key, attention.value))
    cos, sin = rotary_angles(6, 4)
    heads = []
    for head in (slice(0, 4), slice(4, 8)):
        turned = rotate(query[..., head], cos, sin), rotate(key[..., head], cos, sin)
        scores = turned[0] @ turned[1].transpose(1, 2) / math.sqrt(4)
        scores = scores.masked_fill(torch.ones(6, 6).triu(1).bool(), -math.inf)
        heads.append(scores.softmax(-1) @ content[..., head])
    torch.testing.assert_close(attention(value), torch.cat(heads, dim=-1) @ attention.out.weight.T)


def test_grouped_queries_share_keys_and_values() -> None:
    torch.manual_seed(1)
    grouped, whole = Attention(16, 4, 2, 6).double(), Attention(16, 4, 4, 6).double()
    whole.load_state_dict(
        grouped.state_dict()
        | {
            f"{name}.weight": getattr(grouped, name).weight.unflatten(0, (2, 4)).repeat_interleave(2, 0).flatten(0, 1)
            for name in ("key", "value")
        }
    )
    value = torch.randn(2, 6, 16, dtype=torch.float64)
    torch.testing.assert_close(grouped(value), whole(value))
    with pytest.raises(ValueError, match=r"num_heads\(4\) must be a multiple of num_kv_heads\(3\)"):
        Transformer(8, 1, 16, 4, num_kv_heads=3)


def test_rotated_products_depend_on_the_distance_only() -> None:
    cos, sin = (angles.double() for angles in rotary_angles(50, 8))
    query, key = torch.randn(2, 8, dtype=torch.float64).expand(50, 2, 8).unbind(1)
    scores = rotate(query, cos, sin) @ rotate(key, cos, sin).T
    torch.testing.assert_close(scores.diagonal(-3), scores[3, 0].expand(47), rtol=1e-5, atol=1e-5)
    assert (scores[3, 0] - scores[9, 0]).abs() > 1e-3
    torch.testing.assert_close(rotate(query, cos, sin).norm(dim=-1), query.norm(dim=-1))


def test_the_feed_forward_is_swiglu() -> None:
    torch.manual_seed(1)
    feed_forward = FeedForward(4, 6).double()
    value = torch.randn(3, 4, dtype=torch.float64)
    gate, up = feed_forward.gate.weight, feed_forward.up.weight
    expected = (nn.functional.silu(value @ gate.T) * (value @ up.T)) @ feed_forward.down.weight.T
    torch.testing.assert_close(feed_forward(value), expected)


@pytest.mark.parametrize("tied", [True, False])
def test_sizes_names_and_initial_values(tied: bool) -> None:
    torch.manual_seed(0)
    model = Transformer(256, 3, 96, 4, ffn=200, max_seq=8, tied=tied)
    count = sum(parameter.numel() for parameter in model.parameters())
    block = 2 * 96 + 4 * 96 * 96 + 3 * 96 * 200
    assert count == (1 if tied else 2) * 256 * 96 + 3 * block + 96
    assert (model.output.weight is model.embedding.weight) == tied
    assert list(model.state_dict()) == [name for name in model.state_dict() if "cos" not in name and "sin" not in name]
    assert {type(layer).__name__ for layer in model.layers} == {"Block"}
    std = {name: float(parameter.detach().std()) for name, parameter in model.named_parameters() if parameter.ndim == 2}
    assert std["layers.1.attention.out.weight"] == pytest.approx(INIT_STD / math.sqrt(6), rel=0.05)
    assert std["layers.1.feed_forward.gate.weight"] == pytest.approx(INIT_STD, rel=0.05)
    assert std["embedding.weight"] == pytest.approx(INIT_STD, rel=0.05)
    loss = nn.functional.cross_entropy(model(torch.arange(8)[None])[0], torch.arange(100, 108))
    assert float(loss.detach()) == pytest.approx(math.log(256), rel=0.05)


def test_sizes_that_do_not_fit_are_refused() -> None:
    assert Transformer(8, 1, 128, 4).layers[0].get_submodule("feed_forward.down").weight.shape == (128, 352)
    with pytest.raises(ValueError, match=r"hidden\(10\) must be a multiple of 2 \* num_heads\(2\)"):
        Transformer(8, 1, 10, 2)
    with pytest.raises(ValueError, match=r"head_dim\(3\) must be a multiple of 2"):
        Transformer(8, 1, 10, 2, head_dim=3)
    with pytest.raises(ValueError, match="a sequence of 13 tokens, but max_seq is 12"):
        small()(torch.zeros(1, 13, dtype=torch.long))


def test_heads_of_a_width_of_their_own() -> None:
    """Wider than the stream divided by their number, as Qwen 3's are; told to be as wide as that, nothing changes."""
    wide = Transformer(8, 1, 10, 2, num_kv_heads=1, head_dim=6, max_seq=8)
    attention = wide.layers[0].get_submodule("attention")
    shapes = {name: tuple(parameter.shape) for name, parameter in attention.named_parameters()}
    assert shapes == {
        "query.weight": (12, 10), "key.weight": (6, 10), "value.weight": (6, 10), "out.weight": (10, 12)
    }  # fmt: skip
    assert wide(torch.zeros(1, 8, dtype=torch.long)).shape == (1, 8, 8)
    torch.manual_seed(0)
    said = Transformer(8, 1, 16, 2, head_dim=8, max_seq=8)
    torch.manual_seed(0)
    tokens = torch.arange(8)[None]
    assert torch.equal(said(tokens), Transformer(8, 1, 16, 2, max_seq=8)(tokens))


class Counter(nn.Module):
    """Says that after a token comes the next number, three of four times, whatever stood before."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        assert tokens.shape[1] <= 4
        assert not self.training
        return (nn.functional.one_hot((tokens + 1) % 5, 5) * 12 + 1.0).log()


def test_generate_continues_the_prompt() -> None:
    model = Counter()
    prompt = torch.tensor([0, 1, 2])
    assert generate(model, prompt, 6, max_seq=4, temperature=0).tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3]
    assert model.training

    def sample(seed: int, temperature: float) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        tokens: list[int] = generate(
            model, prompt, 200, max_seq=4, temperature=temperature, generator=generator
        ).tolist()
        return tokens

    assert sample(1, 1.0) == sample(1, 1.0) != sample(2, 1.0)

    def hits(tokens: list[int]) -> int:
        return sum((a + 1) % 5 == b for a, b in itertools.pairwise(tokens[2:]))

    assert hits(sample(1, 0.3)) > hits(sample(1, 1.0)) > hits(sample(1, 5.0))
