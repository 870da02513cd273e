"""Losses from logits of which each rank has some words: values, gradients, gradients of gradients, nothing lost."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from allranks.errors import LayoutError
from allranks.layout import Layout
from allranks.losses import ChunkedHead, chunked_cross_entropy, cross_entropy
from allranks.parallel.tensor_ops import enter
from allranks.parallel.tensor_vocabulary import TensorVocabulary
from allranks.vocabulary import CutLogits
from tests.distributed.pool import Pools
from tests.parallel.spreads import spread

pytestmark = pytest.mark.distributed

Found = tuple[torch.Tensor, ...]


def operands(num_words: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden values that reach far, weight and bias of all words, targets of which some are ignored."""
    generator = torch.Generator().manual_seed(1)
    hidden = (torch.randn(2, 7, 5, generator=generator).double() * 30).requires_grad_()
    weight, bias = (torch.randn(num_words, *rest, generator=generator).double() for rest in ((5,), ()))
    targets = torch.randint(num_words, (2, 7), generator=generator)
    targets.view(-1)[::5] = -100
    return hidden, weight.requires_grad_(), bias.requires_grad_(), targets


def ours(num_words: int, chunk: int | None) -> list[float]:
    """In a worker: the errors of losses and gradients."""
    group = dist.group.WORLD
    assert group is not None
    words = TensorVocabulary(num_words, group)
    hidden, weight, bias, targets = operands(num_words)
    expected = functional.linear(hidden, weight, bias)
    whole = functional.cross_entropy(expected.flatten(0, 1), targets.flatten(), reduction="none").view(2, 7)
    mine = [whole_value.detach()[words.start : words.end].requires_grad_() for whole_value in (weight, bias)]
    own = hidden.detach().requires_grad_()
    entered = enter(own, group)
    if chunk is None:
        losses = cross_entropy(CutLogits(functional.linear(entered, *mine), words), targets, reduction="none")
    else:
        how = {"bias": mine[1], "chunk": chunk, "reduction": "none", "vocabulary": words}
        losses = chunked_cross_entropy(entered, mine[0], targets, **how)  # type: ignore[arg-type]
    errors = [relative(losses, whole)]
    factors = torch.linspace(-1, 2, whole.numel(), dtype=torch.float64).view(2, 7)
    found = torch.autograd.grad((losses * factors).sum(), (own, *mine))
    known = torch.autograd.grad((whole * factors).sum(), (hidden, weight, bias))
    parts = [known[0], *(value[words.start : words.end] for value in known[1:])]
    return errors + [relative(a, b) for a, b in zip(found, parts, strict=True)]


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    if not expected.numel():
        return float(found.numel())
    found, expected = found.detach(), expected.detach()
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-300))


@pytest.mark.parametrize("chunk", [None, 1, 4, 100])
@pytest.mark.parametrize("num_words", [11, 4])  # 4, 4 and 3; 2, 2 and none
def test_it_is_cross_entropy_of_the_whole(pool: Pools, num_words: int, chunk: int | None) -> None:
    for errors in pool(3).run(ours, num_words, chunk):
        assert len(errors) == 4 and max(errors) < 1e-12, errors


def penalised(num_words: int) -> float:
    """In a worker: the error of the gradient of a gradient's square."""
    group = dist.group.WORLD
    assert group is not None
    words = TensorVocabulary(num_words, group)
    logits = torch.randn(6, num_words, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    targets = torch.tensor([0, 1, -100, 3, 2, 1])
    found = []
    for cut in (True, False):
        leaf = logits.clone().requires_grad_()
        whole = enter(leaf, group) if cut else leaf
        given = CutLogits(whole[:, words.start : words.end], words) if cut else whole
        (first,) = torch.autograd.grad(cross_entropy(given, targets), leaf, create_graph=True)
        (second,) = torch.autograd.grad((first.square() * logits).sum(), leaf)
        found.append(second)
    return relative(*found)


@pytest.mark.parametrize("num_words", [11, 4])
def test_a_gradient_may_be_differentiated(pool: Pools, num_words: int) -> None:
    assert max(pool(3).run(penalised, num_words)) < 1e-12


def infinite() -> list[list[float]]:
    """In a worker: the losses where logits are not finite, with ours and with torch's function."""
    group = dist.group.WORLD
    assert group is not None
    words, inf, nan = TensorVocabulary(4, group), torch.inf, torch.nan
    logits = torch.tensor([[-inf, -inf, 1, 2], [0, inf, 1, 2], [nan, 0, 0, 0], [-inf] * 4, [1e300, -1e300, 0, 0]])
    targets = torch.tensor([3, 1, 2, 0, 0])
    mine = CutLogits(logits.double()[:, words.start : words.end], words)
    known = functional.cross_entropy(logits.double(), targets, reduction="none")
    return [cross_entropy(mine, targets, reduction="none").tolist(), known.tolist()]


def test_what_is_not_finite_is_what_torch_makes_of_it(pool: Pools) -> None:
    for found, known in pool(2).run(infinite):
        assert found == pytest.approx(known, nan_ok=True)
        assert found[0] == pytest.approx(0.3132616875182228) and found[2] != found[2]


class Headed(nn.Module):
    """A head that is told the targets, behind a pair that is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(4, 6), nn.Linear(6, 4), ChunkedHead(4, 5, bias=True, chunk=2)

    def forward(self, value: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        found: torch.Tensor = self.head(self.down(self.up(value)), targets)
        return found


def headed(loss_parallel: bool) -> tuple[Found, list[str]]:
    """In a worker: losses, and logits without targets; what the start says."""
    styles = {"up": "colwise", "down": "rowwise", "head": "vocab"}
    cut = spread(Headed, Layout(tp=2), "float64", tensor=styles, loss_parallel=loss_parallel)
    value = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)
    losses, logits = (cut.modules[""](value, targets) for targets in (torch.tensor([4, -100, 0]), None))
    if loss_parallel:
        assert isinstance(logits, CutLogits)
        logits = logits.whole()
    return (losses.detach(), logits.detach()), [said.what for said in cut.decisions]


@pytest.mark.parametrize("loss_parallel", [False, True])
def test_a_chunked_head_gives_losses_or_logits(pool: Pools, loss_parallel: bool) -> None:
    for (losses, logits), said in pool(2).run(headed, loss_parallel):
        assert logits.shape == (3, 5)
        expected = functional.cross_entropy(logits, torch.tensor([4, -100, 0]), reduction="none")
        assert torch.allclose(losses, expected, rtol=1e-13, atol=0)
        assert "head computes the loss with a part of the words" in said
        assert ("the logits of head stay cut until the loss; metrics() gets whole ones" in said) == loss_parallel


def meddling() -> str:
    """In a worker: what is said of a model that goes on with its logits."""
    styles = {"0": "vocab"}
    module = spread(
        lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh()), Layout(tp=2), tensor=styles, loss_parallel=True
    ).modules[""]
    with pytest.raises(LayoutError) as caught:
        module(torch.ones(2, 4))
    return str(caught.value)


def test_a_model_that_goes_on_with_its_logits_is_told(pool: Pools) -> None:
    for message in pool(2).run(meddling):
        assert message.startswith("tanh() meets logits of which this process has words")
