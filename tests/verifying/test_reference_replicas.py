"""The simulations of replicas that send less, against the plain loop and by hand."""

from typing import Any

import pytest
import torch
from torch import nn

from allranks.verifying.reference import plain_loop
from allranks.verifying.reference_replicas import low_rank, mean, reduced_loop, rounded


def batches() -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(6, 5, generator=generator, dtype=torch.float64) for _ in range(3)]


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 9), nn.Linear(9, 2)).double()


def loss(module: nn.Module, batch: Any) -> torch.Tensor:
    found: torch.Tensor = module(batch).square().sum()
    return found


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def test_the_mean_is_the_plain_loop() -> None:
    whole = plain_loop(model(), sgd, [(batch, 6) for batch in batches()], loss)
    steps = [([batch[:4], None, batch[4:]], 6) for batch in batches()]
    for found, expected in zip(reduced_loop(model(), sgd, steps, loss, mean), whole, strict=True):
        assert (found.loss, found.norm) == pytest.approx((expected.loss, expected.norm), rel=1e-13)
        for name, value in expected.parameters.items():
            torch.testing.assert_close(found.parameters[name], value, rtol=1e-13, atol=1e-15)


def test_a_sum_is_rounded_before_and_after() -> None:
    half = 2.0**-9
    ranks = [{"w": torch.tensor([1 + half, 4.0], dtype=torch.float64)}, {"w": torch.tensor([1.0, half])}]
    assert rounded(torch.bfloat16)(0, ranks)["w"].tolist() == [1.0, 2.0]
    tiny = [{"w": torch.tensor([1e-12, 2e-13], dtype=torch.float64)}] * 2
    assert rounded(torch.float16)(0, tiny)["w"].tolist() == pytest.approx([1e-12, 2e-13], rel=1e-3)


def test_a_low_rank_keeps_what_it_does_not_send() -> None:
    reduce = low_rank(1, start=1)
    gradient = torch.randn(20, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    small = torch.ones(3, 2, dtype=torch.float64)
    found = [reduce(step, [{"w": gradient, "b": gradient[0], "s": small}])["w"] for step in range(60)]
    assert torch.equal(found[0], gradient) and torch.linalg.matrix_rank(found[1]) == 1
    sent = torch.stack(found[1:]).mean(0)
    assert (sent - gradient).norm() < 0.6 * (found[1] - gradient).norm()
    both = low_rank(1, start=0)(0, [{"b": gradient[0], "s": small}])
    assert torch.equal(both["b"], gradient[0]) and torch.equal(both["s"], small)
