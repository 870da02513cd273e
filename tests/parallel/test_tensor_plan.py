"""Which modules tensor parallelism cuts: hints, the model's own plan, or structure; and what it refuses."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from allranks.errors import LayoutError
from allranks.models.transformer import Transformer
from allranks.parallel.tensor_plan import plan_tensor


class Feed(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, width), nn.Linear(width, 4)


class Heads(nn.Module):
    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query, self.out = nn.Linear(12, 12), nn.Linear(12, 12)


def model_of(*parts: nn.Module, **attributes: Any) -> nn.Module:
    module: Any = nn.Module()
    module.add_module("layers", nn.ModuleList(parts))
    for name, value in attributes.items():
        setattr(module, name, value)
    found: nn.Module = module
    return found


def styles(module: nn.Module, degree: int = 2, **hints: Any) -> dict[str, str]:
    return dict(plan_tensor({"": module}, hints.get("hints", {}), degree).styles)


def test_pairs_of_linear_layers_are_found() -> None:
    stack = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Dropout(0.1), nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 2))
    assert styles(stack) == {"0": "colwise", "3": "rowwise"}
    assert styles(model_of(Feed(), Feed())) == {
        f"layers.{layer}.{name}": style for layer in (0, 1) for name, style in (("up", "colwise"), ("down", "rowwise"))
    }


@pytest.mark.parametrize("between", [nn.Softmax(-1), nn.LayerNorm(4), nn.GLU(), nn.PReLU(4)])
def test_what_looks_at_its_neighbours_parts_a_pair(between: nn.Module) -> None:
    with pytest.raises(LayoutError, match=r"tp finds nothing to cut.*Hints\(tensor="):
        styles(nn.Sequential(nn.Linear(4, 4), between, nn.Linear(4, 4)))


def test_a_list_is_no_sequence() -> None:
    with pytest.raises(LayoutError, match="tp finds nothing to cut"):
        styles(model_of(nn.Linear(4, 4), nn.Linear(4, 4)))


def encoder_layer(**options: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(12, 6, 10, **options)


class OwnForward(nn.MultiheadAttention):
    def forward(self, *given: Any, **options: Any) -> Any:
        return super().forward(*given, **options)


def with_own_projection() -> nn.Module:
    module = nn.MultiheadAttention(4, 2)
    module.out_proj = nn.Linear(4, 4)  # type: ignore[assignment]
    return module


class OwnFeedForward(nn.TransformerEncoderLayer):
    def _ff_block(self, x: Any) -> Any:
        return self.linear2(self.linear1(x).softmax(-1))


def test_torchs_attention_and_the_pairs_of_its_layers_are_found() -> None:
    pair = {"linear1": "colwise", "linear2": "rowwise"}
    assert styles(encoder_layer()) == {"self_attn": "heads", **pair}
    assert styles(encoder_layer(activation=nn.GELU())) == {"self_attn": "heads", **pair}
    decoder = nn.TransformerDecoderLayer(12, 6, 10, activation="gelu")
    assert styles(decoder, 3) == {"self_attn": "heads", "multihead_attn": "heads", **pair}
    plan = plan_tensor({"": encoder_layer()}, {}, 2)
    assert plan.because == "attention is cut between its heads, and these linear layers follow each other in pairs"
    alone = plan_tensor({"one": nn.MultiheadAttention(4, 2)}, {}, 2)
    assert (dict(alone.styles), alone.because) == ({"one": "heads"}, "attention is cut between its heads")


@pytest.mark.parametrize("activation", [lambda x: x.softmax(-1), nn.Softmax(-1), nn.PReLU(10)])
def test_an_activation_that_may_look_at_its_neighbours_parts_the_pair_of_a_layer(activation: Any) -> None:
    assert styles(encoder_layer(activation=activation)) == {"self_attn": "heads"}


def test_a_layer_with_a_feed_forward_of_its_own_keeps_it_whole() -> None:
    assert styles(OwnFeedForward(12, 6, 10)) == {"self_attn": "heads"}


def test_attention_that_is_more_than_its_heads_stays_whole() -> None:
    more = [nn.MultiheadAttention(4, 2, add_bias_kv=True), nn.MultiheadAttention(4, 2, add_zero_attn=True)]
    plan = plan_tensor({"": model_of(Feed(), *more)}, {}, 2)
    assert plan.because == (
        "these linear layers follow each other in pairs; layers.1 stays whole: it has add_bias_kv, keys and values "
        "beside the heads'"
    )
    assert styles(model_of(Feed(), OwnForward(4, 2), with_own_projection(), *more)) == {
        "layers.0.up": "colwise",
        "layers.0.down": "rowwise",
    }


@pytest.mark.parametrize(
    ("module", "style", "message"),
    [
        (
            nn.MultiheadAttention(4, 2, add_bias_kv=True),
            "heads",
            "layers.0 has add_bias_kv, keys and values beside the",
        ),
        (
            nn.MultiheadAttention(4, 2, add_zero_attn=True),
            "heads",
            "layers.0 has add_zero_attn, keys and values beside",
        ),
        (OwnForward(4, 2), "heads", "layers.0 is OwnForward, which has a forward of its own: replicate it"),
        (with_own_projection(), "heads", "layers.0 has an out_proj of its own, Linear: replicate it"),
        (nn.Linear(4, 4), "heads", "heads cuts nn.MultiheadAttention, and layers.0 is Linear: replicate it"),
        (nn.MultiheadAttention(4, 2), "colwise", 'layers.0 is MultiheadAttention: attention\'s style is "heads"'),
        (nn.MultiheadAttention(6, 3), "heads", "layers.0 has num_heads=3, which tp(2) does not divide; tp can be 1, 3"),
    ],
)
def test_attention_that_cannot_be_cut_is_refused(module: nn.Module, style: str, message: str) -> None:
    with pytest.raises(LayoutError, match=re.escape(message)):
        styles(model_of(module), hints={"layers.0": style})


def test_the_output_projection_alone_is_not_cut() -> None:
    message = 'layers.0.out_proj is NonDynamicallyQuantizableLinear: it lies in layers.0, whose style is "heads"'
    with pytest.raises(LayoutError, match=re.escape(message)):
        styles(model_of(nn.MultiheadAttention(4, 2)), hints={"layers.0.out_proj": "rowwise"})


def test_heads_that_structure_finds_have_to_divide() -> None:
    with pytest.raises(
        LayoutError, match=re.escape("self_attn has num_heads=6, which tp(4) does not divide; tp can be")
    ):
        styles(encoder_layer(), 4)


def test_the_reference_model_brings_its_plan() -> None:
    plan = plan_tensor({"": Transformer(11, 2, 24, 4)}, {}, 2)
    assert plan.sequence and plan.because == "the model carries its own plan"
    assert plan.styles["layers.1.attention.out"] == "rowwise" and plan.styles["norm"] == "sequence"


def test_a_plan_in_hugging_faces_words() -> None:
    plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise", "head": "colwise_rep"}
    module: Any = model_of(Feed(), _tp_plan=plan, head=nn.Linear(4, 9))
    assert styles(module)["head"] == "vocab"
    wrapped = nn.Sequential(module)
    assert styles(wrapped)["0.layers.0.up"] == "colwise"
    module._tp_plan = plan | {"head": "mla_kv_a_proj"}
    with pytest.raises(LayoutError, match=r"cuts head in the way 'mla_kv_a_proj', which allranks does not know"):
        styles(module)


def test_hints_come_first() -> None:
    module = Transformer(11, 1, 24, 4)
    assert styles(module, hints={"layers.*.feed_forward.up": "vocab"}) == {"layers.0.feed_forward.up": "vocab"}


@pytest.mark.parametrize(
    ("hints", "degree", "message"),
    [
        ({"layers.*.upp": "colwise"}, 2, r"'layers\.\*\.upp' matches no module; the nearest are .*layers\.0\.up"),
        ({"*.up": "colwise", "layers.0.*": "rowwise"}, 2, r"both '\*\.up' and 'layers\.0\.\*' match layers\.0\.up"),
        ({"*.up": "colwize"}, 2, r"'\*\.up' is 'colwize'; a style is one of colwise, rowwise"),
        ({"layers.0": "replicate", "layers.0.up": "colwise"}, 2, r"layers\.0\.up lies in layers\.0, and both have a"),
        ({"*.up": "colwise"}, 3, r"layers\.0\.up has 4 outputs, which tp\(3\) does not divide; tp can be 1, 2, 4"),
        ({"*.down": "rowwise"}, 3, r"layers\.0\.down has 4 inputs, which tp\(3\)"),
        ({"layers.0": "colwise"}, 2, r"colwise cuts nn\.Linear, and layers\.0 is Feed"),
        ({"*.up": "colwise", "*.down": "sequence"}, 2, r"layers\.1\.query has parameters and no rule"),
        ({"layers.1.query": "colwise"}, 4, r"layers\.1 has num_heads=6, which tp\(4\) does not divide; .*1, 2, 3, 6"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_its_numbers(hints: Any, degree: int, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        styles(model_of(Feed(), Heads(6)), degree, hints=hints)


def test_of_heads_and_sizes_the_heads_say_what_fits() -> None:
    with pytest.raises(LayoutError, match=r"num_heads=6, which tp\(5\) does not divide; tp can be 1, 2, 3, 6$"):
        styles(model_of(Heads(6)), 5, hints={"layers.0.query": "colwise"})


@pytest.mark.parametrize("degree", [3, 6, 16])
def test_every_degree_that_is_named_would_be_taken(degree: int) -> None:
    """Of 32 heads 8 are keys and values; and 4 divides no feed-forward of 18."""
    shared = Transformer(11, 2, 64, 32, num_kv_heads=8, ffn=64)
    with pytest.raises(LayoutError, match=r"tp can be 1, 2, 4, 8$"):
        styles(shared, degree)
    narrow = Transformer(11, 2, 64, 32, num_kv_heads=8, ffn=18)
    with pytest.raises(LayoutError, match=rf"tp\({degree}\) does not divide; tp can be 1, 2$"):
        styles(narrow, degree)
    for module, fitting in ((shared, (1, 2, 4, 8)), (narrow, (1, 2))):
        for fits in fitting:
            styles(module, fits)


def test_heads_in_a_config_count_too() -> None:
    feed: Any = Feed()
    feed.config = SimpleNamespace(num_key_value_heads=3)
    module = model_of(feed)
    with pytest.raises(LayoutError, match=re.escape("num_key_value_heads=3, which tp(2) does not divide")):
        styles(module)


COUNTS = [
    *("n_head", "nhead", "num_head", "nb_head", "nHead", "_n_head", "number_of_head", "head_num", "head_count"),
    *(
        "n_kv_head",
        "num_kv_head",
        "n_head_kv",
        "num_query_head",
        "num_attention_head",
        "heads_kv",
        "kv_heads",
        "nheads",
    ),
]
NO_COUNTS = ["head", "head_dim", "dim_head", "head_size", "heads_dim", "num_head_channels", "h", "overhead", "n_ahead"]


@pytest.mark.parametrize("name", COUNTS)
def test_heads_that_do_not_divide_are_refused_by_whatever_name(name: str) -> None:
    for holder in ("the module", "its config"):
        feed: Any = Feed()
        feed.config = SimpleNamespace()
        setattr(feed if holder == "the module" else feed.config, name, 3)
        with pytest.raises(LayoutError, match=re.escape(f"layers.0 has {name}=3, which tp(2) does not divide")):
            styles(model_of(feed))
        assert styles(model_of(feed), 3) == {"layers.0.up": "colwise", "layers.0.down": "rowwise"}


@pytest.mark.parametrize(("name", "value"), [*((name, 3) for name in NO_COUNTS), ("n_head", True), ("n_head", 3.0)])
def test_what_is_no_number_of_heads_may_be_odd(name: str, value: object) -> None:
    feed: Any = Feed()
    setattr(feed, name, value)
    assert styles(model_of(feed)) == {"layers.0.up": "colwise", "layers.0.down": "rowwise"}


def test_an_embedding_that_scales_by_rows_of_others_is_refused() -> None:
    module = model_of(nn.Embedding(5, 4, max_norm=1.0))
    with pytest.raises(LayoutError, match="max_norm or scale_grad_by_freq"):
        styles(module, hints={"layers.0": "vocab"})
    assert styles(module, hints={"layers.0": "replicate"}) == {"layers.0": "replicate"}


@pytest.mark.parametrize("style", ["vocab", "rowwise"])
def test_an_embedding_bag_is_refused_and_what_cuts_it_is_said(style: str) -> None:
    module = model_of(nn.EmbeddingBag(5, 4), Feed())
    whole = "layers.0 is EmbeddingBag: it stays whole over tp, so leave its rule out; dp_shard (fsdp) cuts it by row"
    with pytest.raises(LayoutError, match=re.escape(whole)):
        styles(module, hints={"layers.0": style})
    assert "layers.0" not in styles(module)
