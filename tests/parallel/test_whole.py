"""The user's model as one process has it."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from allranks.parallel.precision import choose_precision
from allranks.parallel.whole import float32_products, shake, shake_part, square_of, whole_gradients


def build() -> Any:
    module = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5), nn.Linear(3, 1), nn.Linear(1, 1))
    module[0].bias.requires_grad_(False)
    return module


def seed() -> None:
    torch.manual_seed(4)


def loss_of(module: Any) -> torch.Tensor:
    """The last layer has no part in it."""
    found: torch.Tensor = module[2](module[:2](torch.ones(1, 2, dtype=torch.float64))).sum()
    return found


def test_loss_and_norms_are_those_of_a_plain_forward_and_backward() -> None:
    found = whole_gradients(build, choose_precision("float64", None, "cpu"), seed, loss_of, nullcontext())
    seed()
    module = build().double().eval()
    whole = tuple(slice(None) for _ in range(2))
    for name, parameter in module.named_parameters():
        before = parameter.detach().clone()
        shake(parameter.detach(), name, parameter.shape, whole[: parameter.dim()])
        assert 0 < (parameter.detach() - before).abs().max() < 0.05
    loss = loss_of(module)
    loss.backward()
    assert found.loss == loss.item()
    assert found.norms == {
        "0.weight": module[0].weight.grad.norm().item(),
        "2.weight": module[2].weight.grad.norm().item(),
        "2.bias": 1.0,
        "3.weight": 0.0,
        "3.bias": 0.0,
    }


def test_a_module_that_computes_on_its_way_into_evaluation_mode_sees_the_noise() -> None:
    """As one that merges adapters: the ranks' parts have their noise before they enter it, too."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.twice = nn.Parameter(torch.ones(2)), torch.zeros(2)

        def train(self, mode: bool = True) -> "Twice":
            self.twice = 2 * self.weight.detach()
            super().train(mode)
            return self

    seen: list[Any] = []

    def loss_of(module: Any) -> torch.Tensor:
        seen.append((module.training, torch.equal(module.twice, 2 * module.weight)))
        found: torch.Tensor = module.weight.sum()
        return found

    whole_gradients(Twice, choose_precision("float64", None, "cpu"), seed, loss_of, nullcontext())
    assert seen == [(False, True)]


def test_a_part_gets_its_part_of_the_noise() -> None:
    whole, rows = torch.zeros(5, 3), torch.zeros(2, 2)
    shake(whole, "a", whole.shape, (slice(None), slice(None)))
    shake(rows, "a", whole.shape, (slice(3, 5), slice(1, 3)))
    assert torch.equal(rows, whole[3:5, 1:3])
    counts = torch.zeros(2, dtype=torch.int64)
    shake(counts, "a", counts.shape, (slice(None),))
    assert not counts.any()


def test_noise_of_a_part_alone_is_that_of_its_copies_and_of_no_other_part() -> None:
    first, copy, other, name = (torch.zeros(2, 2) for _ in range(4))
    place = (slice(3, 5), slice(1, 3))
    shake_part(first, "a", place)
    shake_part(copy, "a", place)
    shake_part(other, "a", (slice(1, 3), slice(1, 3)))
    shake_part(name, "b", place)
    assert torch.equal(first, copy) and 0 < first.abs().max() < 0.1
    assert not torch.equal(first, other) and not torch.equal(first, name)


def test_an_output_may_be_any_tree() -> None:
    leaves = {"logits": torch.full((2,), 3.0), "more": (torch.tensor(4.0), torch.tensor(7), None)}
    assert square_of(leaves) == torch.tensor(34.0, dtype=torch.float64)
    assert square_of(None) == 0


def test_no_product_is_made_in_tf32_while_a_gpu_is_compared_with_a_processor() -> None:
    cudnn: Any = torch.backends.cudnn
    conv, before = cudnn.conv, cudnn.conv.fp32_precision
    with float32_products(torch.device("cpu")):
        assert conv.fp32_precision == before
    with pytest.raises(ZeroDivisionError), float32_products(torch.device("cuda")):
        assert conv.fp32_precision == torch.backends.cuda.matmul.fp32_precision == "ieee"
        1 / 0  # noqa: B018
    assert conv.fp32_precision == before != "ieee"
    assert torch.backends.cudnn.allow_tf32
