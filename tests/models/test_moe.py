"""The mixture of experts: each token through its experts, dropless, balanced by a bias."""

import importlib
import inspect
import itertools
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from allranks.models import moe
from allranks.models.moe import Experts, MixtureOfExperts, MoETransformer, Router, can_group, multiply
from allranks.models.transformer import INIT_STD


@pytest.fixture(scope="module", autouse=True)
def dynamo() -> None:
    """torch.compile imports this, which sets an environment variable: before any test looks."""
    importlib.import_module("torch._dynamo")


SIZES: dict[str, Any] = {
    "vocab_size": 17,
    "num_layers": 2,
    "hidden": 16,
    "num_heads": 2,
    "num_experts": 4,
    "top_k": 2,
    "max_seq": 12,
}
TOKENS = torch.arange(24).view(2, 12) * 5 % 17


def mixture(top_k: int = 2) -> MixtureOfExperts:
    torch.manual_seed(0)
    found = MixtureOfExperts(hidden=6, ffn=10, num_experts=5, top_k=top_k).double()
    for parameter in found.parameters():
        nn.init.normal_(parameter)
    return found


def by_hand(layer: MixtureOfExperts, token: torch.Tensor) -> torch.Tensor:
    """What a mixture of experts is, for one token [hidden]."""
    scores = torch.sigmoid(layer.router.score.weight @ token)
    ranks = (scores.detach() + layer.router.bias).tolist()
    chosen = sorted(range(5), key=lambda e: (-ranks[e], e))[: layer.router.top_k]
    experts = layer.experts
    outputs = [(functional.silu(token @ experts.gate[e]) * (token @ experts.up[e])) @ experts.down[e] for e in chosen]
    total = sum(scores[e] for e in chosen)
    found: torch.Tensor = torch.stack([scores[e] / total * out for e, out in zip(chosen, outputs, strict=True)]).sum(0)
    return found


@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_a_token_passes_through_its_experts_and_no_others(top_k: int) -> None:
    layer = mixture(top_k)
    layer.router.bias.copy_(torch.tensor([0.3, -0.2, 0.0, 0.1, -0.4]))
    value = torch.randn(2, 7, 6, dtype=torch.float64)
    expected = torch.stack([by_hand(layer, token) for token in value.flatten(0, 1)]).view_as(value)
    torch.testing.assert_close(layer(value), expected, rtol=1e-12, atol=1e-12)


def test_gradients_are_exact() -> None:
    layer = mixture().eval()
    value = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layer, value)
    parameters = dict(layer.named_parameters())

    def of_parameters(*values: torch.Tensor) -> Any:
        return torch.func.functional_call(layer, dict(zip(parameters, values, strict=True)), value.detach())

    assert torch.autograd.gradcheck(of_parameters, tuple(parameters.values()))


def test_of_equal_scores_the_first_experts_are_chosen_however_many_tokens_there_are() -> None:
    router = Router(hidden=4, num_experts=64, top_k=3)
    nn.init.zeros_(router.score.weight)
    for number in (1, 2, 100, 3000):
        chosen, weights = router(torch.randn(number, 4))
        assert torch.equal(chosen, torch.arange(3).expand(number, 3))
        torch.testing.assert_close(weights, torch.full((number, 3), 1 / 3))


def test_the_bias_decides_who_is_chosen_and_no_weight() -> None:
    layer = mixture()
    tokens = torch.randn(9, 6, dtype=torch.float64)
    layer.router.bias.copy_(torch.tensor([10.0, 0.0, 0.0, 5.0, 0.0]))
    chosen, weights = layer.router(tokens)
    assert torch.equal(chosen, torch.tensor([0, 3]).expand(9, 2))
    scores = torch.sigmoid(tokens @ layer.router.score.weight.T)[:, [0, 3]]
    torch.testing.assert_close(weights, scores / scores.sum(1, keepdim=True))


def test_an_expert_without_a_token_has_a_gradient_of_zeros() -> None:
    layer = mixture()
    layer.router.bias[4] = -10
    layer(torch.randn(8, 6, dtype=torch.float64)).square().sum().backward()
    for parameter in layer.experts.parameters():
        assert parameter.grad is not None
        assert parameter.grad[4].abs().max() == 0 < parameter.grad.abs().max()


def test_training_forwards_count_and_the_update_moves_against_the_counts() -> None:
    layer = mixture()
    layer(torch.randn(2, 5, 6, dtype=torch.float64))
    layer(torch.randn(3, 6, dtype=torch.float64))
    counts = layer.router.tokens_per_expert
    assert counts.sum() == 13 * 2 and counts.dtype is torch.int64
    layer.eval()(torch.randn(3, 6, dtype=torch.float64))
    assert counts.sum() == 26
    counts.copy_(torch.tensor([6, 5, 4, 0, 10]))
    layer.router.update_balance()
    assert layer.router.bias.tolist() == [-1e-3, 0.0, 1e-3, 1e-3, -1e-3]
    assert not counts.any()
    layer.router.update_balance()  # nothing was counted
    assert layer.router.bias.tolist() == [-1e-3, 0.0, 1e-3, 1e-3, -1e-3]


def test_the_balance_evens_out_the_load() -> None:
    torch.manual_seed(3)
    router = Router(hidden=8, num_experts=6, top_k=2, rate=0.02)
    tokens = torch.randn(400, 8) + 1.0  # not centred: some experts suit nearly all
    spans = []
    for _ in range(150):
        chosen, _ = router(tokens)
        router.tokens_per_expert += torch.bincount(chosen.flatten(), minlength=6)
        spans.append(int(router.tokens_per_expert.max() - router.tokens_per_expert.min()))
        router.update_balance()
    assert spans[-1] < spans[0] / 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_grouped_product_is_the_loops(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    counts = torch.tensor([3, 0, 6, 1])
    results = []
    values = torch.randn(10, 16).to(dtype), torch.randn(4, 16, 8).to(dtype)
    assert can_group(*values) is (moe._grouped_mm is not None)
    for grouped in (moe._grouped_mm, None):
        monkeypatch.setattr(moe, "_grouped_mm", grouped)
        tokens, stacked = (value.clone().requires_grad_() for value in values)
        found = multiply(tokens, stacked, counts)
        found.sum().backward()  # a gradient without strides
        results.append((found.detach(), tokens.grad, stacked.grad))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


class Residual(torch.autograd.Function):
    """A grouped product of Blackwell's: the gradient of an expert without tokens is what stood in the registers."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, stacked: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tokens, stacked, ends)
        bounds = [0, *ends.tolist()]
        parts = [tokens[first:past] @ stacked[at] for at, (first, past) in enumerate(itertools.pairwise(bounds))]
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        tokens, stacked, ends = ctx.saved_tensors
        bounds = list(itertools.pairwise([0, *ends.tolist()]))
        of_tokens = torch.cat([gradient[first:past] @ stacked[at].T for at, (first, past) in enumerate(bounds)])
        parts = [tokens[first:past].T @ gradient[first:past] for first, past in bounds]
        rest = torch.full_like(stacked[0], math.nan)
        return (
            of_tokens,
            torch.stack([part if past > first else rest for part, (first, past) in zip(parts, bounds, strict=True)]),
            None,
        )


def test_what_a_kernel_leaves_for_an_expert_without_tokens_is_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)

    def grouped(tokens: torch.Tensor, stacked: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = Residual.apply(tokens, stacked, offs)  # type: ignore[no-untyped-call]
        return product

    monkeypatch.setattr(moe, "_grouped_mm", grouped)
    counts, found = torch.tensor([3, 0, 6, 1]), []
    for rest in (False, True):
        monkeypatch.setattr(moe, "leaves_rest", lambda device, rest=rest: rest)
        stacked = torch.randn(4, 16, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
        multiply(torch.arange(160.0).view(10, 16).sin(), stacked, counts).sum().backward()
        assert stacked.grad is not None
        found.append(stacked.grad)
    wrong, right = found
    assert wrong[1].isnan().all() and torch.equal(right[1], torch.zeros(16, 8))
    assert torch.equal(wrong[[0, 2, 3]], right[[0, 2, 3]])


@pytest.mark.parametrize(("capability", "rest"), [((9, 0), False), ((10, 0), True), ((12, 0), True)])
def test_which_gpus_leave_a_rest(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], rest: bool) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert moe.leaves_rest(torch.device("cuda", 0)) is rest
    assert not moe.leaves_rest(torch.device("cpu"))


def test_what_cannot_be_grouped() -> None:
    tokens, stacked = torch.randn(3, 8), torch.randn(2, 8, 8)
    assert not can_group(tokens.double(), stacked.double())
    assert not can_group(tokens, torch.randn(2, 8, 3))
    assert not can_group(tokens[:0], stacked)
    assert not can_group(tokens.bfloat16(), stacked)
    assert not can_group(tokens, torch.randn(129)[1:].view(2, 8, 8))


def test_autocast_lowers_the_experts_and_not_the_router() -> None:
    torch.manual_seed(0)
    layer = MixtureOfExperts(hidden=16, ffn=8, num_experts=4, top_k=2)
    value = torch.randn(5, 16)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer.experts(value, torch.tensor([2, 0, 3, 0])).dtype is torch.bfloat16
        chosen, weights = layer.router(value)
        mixed = layer(value)
    plain, exact = layer.router(value)
    assert torch.equal(chosen, plain) and torch.equal(weights, exact)
    assert mixed.dtype is torch.float32
    torch.testing.assert_close(mixed, layer(value), rtol=0.05, atol=1e-4)


def test_a_router_whose_weight_was_rounded_to_be_gathered_scores_in_float32() -> None:
    """As FSDP gathers it under layout.gather=bfloat16: scores in bfloat16 would be equal where they lie close."""
    torch.manual_seed(0)
    router = Router(hidden=16, num_experts=64, top_k=4).bfloat16()
    tokens = torch.randn(200, 16)
    weight = router.score.weight.float()
    expected = functional.linear(tokens, weight).sigmoid()
    chosen, weights = router(tokens)
    assert torch.equal(chosen, expected.sort(dim=-1, descending=True, stable=True).indices[:, :4])
    best = expected.gather(1, chosen)
    torch.testing.assert_close(weights, best / best.sum(1, keepdim=True), rtol=1e-6, atol=0)


# torch 2.13's own, where it goes on after what it could not compile.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.full
def test_compiled_it_computes_the_same() -> None:
    """What torch.compile cannot group it multiplies one by one."""
    torch.manual_seed(0)
    layer = MixtureOfExperts(hidden=16, ffn=8, num_experts=4, top_k=2)
    compiled = torch.compile(layer.forward, backend="aot_eager")
    for number in (5, 9):
        value = torch.randn(number, 16)
        torch.testing.assert_close(compiled(value), layer(value))
    assert layer.router.tokens_per_expert.sum() == 2 * 2 * (5 + 9)


def test_experts_compute_as_many_as_they_hold() -> None:
    whole = Experts(num_experts=4, hidden=6, ffn=3).double()
    tokens, counts = torch.randn(9, 6, dtype=torch.float64), torch.tensor([2, 3, 0, 4])
    expected = whole(tokens, counts)
    for stacked in ("gate", "up", "down"):
        setattr(whole, stacked, nn.Parameter(getattr(whole, stacked)[2:].detach()))
    torch.testing.assert_close(whole(tokens[5:], counts[2:]), expected[5:])


def small(**changes: Any) -> MoETransformer:
    torch.manual_seed(0)
    return MoETransformer(**(SIZES | changes)).double()


def test_logits_of_a_position_depend_on_it_and_on_those_before_it_only() -> None:
    model = small()
    logits = model(TOKENS)
    assert logits.shape == (2, 12, 17)
    changed = TOKENS.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 17
    difference = (model(changed) - logits).abs().amax(dim=(0, 2))
    assert difference[:7].max() < 1e-15 and difference[7:].min() > 0
    with pytest.raises(ValueError, match="a sequence of 13 tokens, but max_seq is 12"):
        model(torch.zeros(1, 13, dtype=torch.int64))


def test_losses_in_chunks_are_those_of_the_logits() -> None:
    torch.manual_seed(0)
    whole = MoETransformer(**SIZES).double()
    chunked = MoETransformer(**SIZES, chunk=5).double()
    chunked.load_state_dict(whole.state_dict())
    targets = TOKENS.roll(-1, 1)
    expected = functional.cross_entropy(whole(TOKENS).flatten(0, 1), targets.flatten(), reduction="none")
    losses = chunked(TOKENS, targets=targets)
    torch.testing.assert_close(losses, expected.view_as(targets), rtol=1e-12, atol=1e-12)
    gradients = (torch.autograd.grad(found.sum(), m.embedding.weight)[0] for m, found in (
        (whole, expected), (chunked, losses)
    ))  # fmt: skip
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


def test_initial_values_and_names() -> None:
    changes: dict[str, Any] = {"hidden": 128, "num_layers": 3, "tied": False}
    model = MoETransformer(**(SIZES | changes))
    state = model.state_dict()
    assert state["layers.1.feed_forward.experts.down"].shape == (4, 128, 128)
    assert float(state["layers.1.feed_forward.experts.down"].std()) == pytest.approx(INIT_STD / math.sqrt(6), rel=0.05)
    assert float(state["layers.1.feed_forward.experts.gate"].std()) == pytest.approx(INIT_STD, rel=0.05)
    assert "layers.0.feed_forward.router.bias" in state
    assert "layers.0.feed_forward.router.tokens_per_expert" not in state
    assert "output.weight" in dict(model.named_parameters())
    assert "output.weight" not in dict(small().named_parameters())


def test_a_step_of_ones_own() -> None:
    model = small()
    model(TOKENS)
    model.update_balance()
    routers = [member for member in model.modules() if isinstance(member, Router)]
    assert len(routers) == 2 and all(router.bias.abs().max() == 1e-3 for router in routers)
    assert not any(router.tokens_per_expert.any() for router in routers)


def test_more_experts_than_there_are_are_refused() -> None:
    for top_k in (0, 5):
        with pytest.raises(ValueError, match=rf"top_k\({top_k}\) must be 1 to num_experts\(4\)"):
            Router(8, 4, top_k)


def test_it_needs_nothing_of_the_rest() -> None:
    imports = [line for line in inspect.getsource(moe).splitlines() if "import" in line and "allranks" in line]
    assert imports == ["from allranks.models.transformer import INIT_STD, Attention, Block, Decoder"]
