"""torch's attention cut between its heads: whole outputs and weights, exact gradients, its masks, and evaluation."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from allranks.layout import Layout
from tests.distributed.pool import Pools
from tests.parallel.spreads import spread
from tests.parallel.test_tensor import gradient_errors, outcome

pytestmark = pytest.mark.distributed

E, HEADS = 12, 4
X = torch.linspace(-1, 1, 2 * 5 * E, dtype=torch.float64).cos().mul(7).sin().view(2, 5, E)
MEMORY = torch.linspace(-1, 1, 2 * 3 * E, dtype=torch.float64).mul(5).sin().view(2, 3, E)
PADDING = torch.tensor([[False, False, False, False, True], [False, False, True, True, True]])
CAUSAL = torch.ones(5, 5, dtype=torch.bool).triu(1)
BY_HEAD = torch.arange(2 * HEADS * 25, dtype=torch.float64).cos().view(2 * HEADS, 5, 5)


class Attends(nn.Module):
    """Attention with biases that are not zero, some arguments, and its weights in the output where it gives them."""

    def __init__(self, options: dict[str, Any], arguments: dict[str, Any], learnt: torch.Tensor | None = None) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(E, HEADS, **{"batch_first": True, **options})
        for name, parameter in self.inner.named_parameters():
            if "bias" in name:
                nn.init.normal_(parameter)
        self.arguments = arguments
        self.mask = None if learnt is None else nn.Parameter(learnt)

    def forward(self, query: torch.Tensor, memory: torch.Tensor | None = None, value: Any = None) -> torch.Tensor:
        key = query if memory is None else memory
        mask = {} if self.mask is None else {"attn_mask": self.mask.to(query)}
        found, weights = self.inner(query, key, key if value is None else value, **self.arguments, **mask)
        parts = [found.flatten()] if weights is None else [found.flatten(), weights.flatten()]
        return torch.cat(parts)


Case = tuple[dict[str, Any], dict[str, Any], tuple[Any, ...], Any]
CASES: dict[str, Case] = {
    "self": ({}, {"need_weights": False}, (X,), None),
    "positions first": ({"batch_first": False}, {"need_weights": False}, (X,), None),
    "one sequence": ({}, {"need_weights": False}, (X[0],), None),
    "one sequence, weights": ({"batch_first": False}, {}, (X[0],), None),
    "no biases": ({"bias": False}, {"need_weights": False}, (X,), None),
    "weights": ({}, {}, (X,), None),
    "weights by head": ({"batch_first": False}, {"average_attn_weights": False}, (X,), None),
    "causal": ({}, {"need_weights": False, "attn_mask": CAUSAL, "is_causal": True}, (X,), None),
    "causal, padded": (
        {},
        {"need_weights": False, "attn_mask": CAUSAL, "is_causal": True, "key_padding_mask": PADDING},
        (X,),
        None,
    ),
    "causal, weights": ({}, {"attn_mask": CAUSAL, "is_causal": True}, (X,), None),
    "padded": ({}, {"need_weights": False, "key_padding_mask": PADDING}, (X,), None),
    "padded, weights": ({}, {"key_padding_mask": PADDING}, (X,), None),
    "padded by numbers": ({}, {"need_weights": False, "key_padding_mask": PADDING.double() * -3}, (X,), None),
    "by head": ({}, {"need_weights": False, "attn_mask": BY_HEAD, "key_padding_mask": PADDING.double()}, (X,), None),
    "by head, weights": ({}, {"attn_mask": BY_HEAD}, (X,), None),
    "by head, one sequence": ({}, {"attn_mask": BY_HEAD[:HEADS]}, (X[0],), None),
    "learnt": ({}, {"need_weights": False}, (X,), torch.eye(5)),
    "learnt by head": ({}, {}, (X,), BY_HEAD),
    "cross": ({}, {"need_weights": False}, (X, MEMORY), None),
    "three apart": ({}, {}, (X, MEMORY, MEMORY * 2), None),
    "other widths": ({"kdim": 6, "vdim": 8}, {}, (X, MEMORY[..., :6], MEMORY[..., 3:11]), None),
    "other widths, no biases": ({"kdim": 6, "bias": False}, {}, (X, MEMORY[..., :6], MEMORY), None),
}


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_those_of_whole_attention(pool: Pools, name: str) -> None:
    options, arguments, inputs, learnt = CASES[name]
    for output, gradient, held in pool(2).run(outcome, lambda: Attends(options, arguments, learnt), {}, *inputs):
        assert output < 1e-13 and gradient < 1e-13
        assert held < 0.7


class Sequences(nn.Module):
    """torch's encoder and decoder, words in and words out."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(11, E), nn.Linear(E, 11)
        with warnings.catch_warnings(action="ignore"):  # with norm_first, of nested tensors
            self.inner = nn.Transformer(E, HEADS, 1, 1, 10, dropout=0.0, batch_first=True, **options)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        value = self.words(tokens)
        found: torch.Tensor = self.head(self.inner(value, value.flip(-2)[:, 1:]))
        return found


class Encoded(nn.Module):
    """The same with an encoder only, between layers that sequence rules ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(11, E), nn.Linear(E, 11)
        self.layer = nn.TransformerEncoderLayer(E, HEADS, 10, dropout=0.0, batch_first=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.layer(self.words(tokens)))
        return found


TOKENS = torch.arange(10).view(2, 5)
ON_POSITIONS = {
    "words": "vocab",
    "layer.self_attn": "heads",
    "layer.linear1": "colwise",
    "layer.linear2": "rowwise",
    "layer.norm?": "sequence",
    "head": "vocab",
}


@pytest.mark.parametrize(
    ("build", "tensor"),
    [(Sequences, {}), (lambda: Sequences(norm_first=True, activation="gelu"), {}), (Encoded, ON_POSITIONS)],
    ids=["behind", "first", "on positions"],
)
def test_layers_of_torch_are_those_of_the_whole(pool: Pools, build: Callable[[], nn.Module], tensor: Any) -> None:
    for output, gradient, held in pool(2).run(outcome, build, tensor, TOKENS):
        assert output < 1e-13 and gradient < 1e-13
        assert held < 0.75


def entries(layout: Layout) -> list[tuple[str, Any, Any, Any, Any]]:
    found = spread(lambda: nn.MultiheadAttention(10, 2), layout)
    # E/tp = 5, so 15 rows of three matrices, which two ranks do not share alike
    return [
        (name, e.shape, e.box.place(e.shape), found.local(name).clone(), e.holders) for name, e in found.map.items()
    ]


def test_the_map_tells_which_rows_of_each_matrix_a_rank_has(pool: Pools) -> None:
    torch.manual_seed(0)
    whole = dict(nn.MultiheadAttention(10, 2).named_parameters())
    seen: dict[str, set[int]] = {}
    for rank, found in enumerate(pool(4).run(entries, Layout(tp=2, dp_shard=2))):
        for name, shape, place, local, holders in found:
            assert shape == tuple(whole[name].shape) and torch.equal(local, whole[name].detach()[place])
            if name.startswith("in_proj"):
                assert holders == (rank,)
                seen.setdefault(name, set()).update(place[0])
    assert seen == {name: set(range(30)) for name in ("in_proj_weight", "in_proj_bias")}


def dropped(need_weights: bool) -> list[torch.Tensor]:
    """In a worker: of values that are one, what attention's dropout leaves of each head, and what a later one does."""

    def build() -> nn.Module:
        module = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
        with torch.no_grad():
            module.in_proj_weight.zero_()
            module.in_proj_bias[16:] = 1.0
            module.out_proj.weight.copy_(torch.eye(8))
        return nn.ModuleDict({"attention": module, "after": nn.Dropout(0.5)})

    cut = spread(build, Layout(tp=2), "float64").modules[""]
    attention: Any = cut.get_submodule("attention")
    torch.manual_seed(5)
    found, _ = attention(*(torch.ones(1, 64, 8, dtype=torch.float64),) * 3, need_weights=need_weights)
    return [found.detach(), cut.get_submodule("after")(torch.ones(64))]


@pytest.mark.parametrize("need_weights", [True, False])
def test_dropout_draws_apart_by_head_and_alike_afterwards(pool: Pools, need_weights: bool) -> None:
    (first, later), (second, later_too) = pool(2).run(dropped, need_weights)
    assert torch.equal(first, second)  # the sum over heads is whole
    assert not torch.equal(first[..., 0], first[..., 4])
    assert (first.std() > 0.01) and torch.equal(later, later_too)


class Dropping(nn.Module):
    """Attention with dropout, on positions that are cut where its norm comes first."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.first = first
        self.norm, self.attention = nn.LayerNorm(8), nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(x) if self.first else x
        hidden = self.attention(hidden, hidden, hidden, need_weights=False)[0]
        found: torch.Tensor = self.dropout(hidden if self.first else self.norm(hidden))
        return found


def drawn_again(first: bool, recompute: str) -> list[torch.Tensor]:
    """In a worker: the gradients of two blocks after two micro-steps, each under a key of its own and of two views."""
    torch.manual_seed(0)
    blocks = nn.Sequential(Dropping(first), Dropping(True))
    layers = nn.Sequential(*([nn.Embedding(11, 8)] if first else []), blocks, nn.Linear(8, 11))
    place = int(first)
    tensor = {f"{place}.*.attention": "heads", f"{place}.*.norm": "sequence", f"{place + 1}": "vocab"}
    tensor |= {"0": "vocab"} if first else {}
    cut = spread(lambda: layers, Layout(tp=2, recompute=recompute), "float64", tensor=tensor)
    for key in (3, 4):
        torch.manual_seed(key)
        x = TOKENS if first else torch.arange(80, dtype=torch.float64).cos().view(2, 5, 8)
        outputs = [cut.modules[""](view) for view in (x, x.flip(0))]
        sum(output.square().sum() for output in outputs).backward()
    return [parameter.grad for parameter in cut.trainable().values() if parameter.grad is not None]


@pytest.mark.parametrize("first", [True, False], ids=["on positions", "before them"])
def test_a_recomputed_block_draws_again_and_leaves_the_next_key_alone(pool: Pools, first: bool) -> None:
    kept = pool(2).run(drawn_again, first, "none")
    for mode in ("full", "selective"):
        for found, expected in zip(pool(2).run(drawn_again, first, mode), kept, strict=True):
            assert len(found) == len(expected) > 12
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def evaluated(padded: bool, tensor: Any) -> tuple[float, float]:
    """In a worker: in evaluation, where torch takes its fused path on one device, the largest differences of outputs at
    positions with words; and whether that path does make a difference, where sequences are padded."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(E, HEADS, 10, dropout=0.3, batch_first=True)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=padded).eval()

    whole, cut = build().double(), spread(build, Layout(tp=2), "float64", tensor=tensor).modules[""].eval()
    mask = {"src_key_padding_mask": PADDING} if padded else {}
    with torch.no_grad(), warnings.catch_warnings(action="ignore"):  # nested tensors are a prototype
        expected, found = whole(X, **mask), cut(X, **mask)
    words = ~PADDING if padded else torch.ones(2, 5, dtype=torch.bool)
    return float((expected - found)[words].abs().max()), float(expected[~words].abs().sum())


@pytest.mark.parametrize("tensor", [{}, {"layers.*.linear1": "colwise", "layers.*.linear2": "rowwise"}])
@pytest.mark.parametrize("padded", [False, True])
def test_evaluation_is_that_of_one_device(pool: Pools, padded: bool, tensor: Any) -> None:
    for difference, behind in pool(2).run(evaluated, padded, tensor):
        assert difference < 1e-13
        assert behind == 0.0  # of padding torch's fused path makes zeros, which no loss may look at


def fused(tensor: Any) -> tuple[list[int], bool]:
    def build() -> nn.Module:
        layer = nn.TransformerEncoderLayer(E, HEADS, 10, batch_first=True)
        return nn.Sequential(nn.Linear(E, E), nn.TransformerEncoder(layer, 2))

    encoder: Any = spread(build, Layout(tp=2), tensor=tensor).modules[""].get_submodule("1")
    return [layer.activation_relu_or_gelu for layer in encoder.layers], encoder.use_nested_tensor


def test_the_fused_path_stays_where_nothing_is_cut(pool: Pools) -> None:
    assert pool(2).run(fused, {"0": "vocab"})[0] == ([1, 1], True)
    pair = {"1.layers.1.linear1": "colwise", "1.layers.1.linear2": "rowwise"}
    assert pool(2).run(fused, pair)[0] == ([1, 0], False)


def refusals() -> list[str]:
    attention: Any = spread(lambda: nn.MultiheadAttention(E, HEADS, batch_first=True), Layout(tp=2)).modules[""]
    x = torch.zeros(2, 5, E)
    found = []
    for options in (
        {"is_causal": True},
        {"attn_mask": torch.zeros(1, 5)},
        {"attn_mask": torch.zeros(2, 5, 5)},
        {"key_padding_mask": torch.zeros(2, 5, dtype=torch.int64)},
        {"key_padding_mask": torch.zeros(2, 4)},
    ):
        try:
            attention(x, x, x, **options)
        except RuntimeError as error:
            found.append(str(error))
    return found


def test_arguments_that_torch_refuses_are_refused(pool: Pools) -> None:
    messages = pool(2).run(refusals)[0]
    assert messages[:2] == [
        "is_causal says what attn_mask is: give attn_mask too",
        "attn_mask is (1, 5), and should be (5, 5)",
    ]
    assert messages[3] == "key_padding_mask is of torch.int64: a mask is bool, or floating numbers that are added"
    assert len(messages) == 5


def penalised() -> float:
    """In a worker: the largest difference of a gradient penalty's gradients from those of whole attention."""
    torch.manual_seed(0)
    whole, cut = Attends({}, {}).double(), spread(lambda: Attends({}, {}), Layout(tp=2), "float64")
    for module in (whole, cut.modules[""]):
        x = X.clone().requires_grad_()
        (slope,) = torch.autograd.grad(module(x).cos().sum(), x, create_graph=True)
        (slope.norm() - 1).square().backward()
    return max(gradient_errors(cut, whole))


def test_a_gradient_penalty_is_that_of_whole_attention(pool: Pools) -> None:
    assert max(pool(2).run(penalised)) < 1e-12
