"""FixedDraws: every draw of torch has one value, the same for any number of samples, and of the right form."""

import random
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional

from allranks.stepping import fixed_draws
from allranks.stepping.fixed_draws import FixedDraws

Draw = Callable[[int], torch.Tensor]


def like(size: int) -> torch.Tensor:
    return torch.full((size, 3), 2.0)


LIMITS: dict[str, Any] = {"from": -1, "to": 0}  # one of these is a word of the language
ELEMENTS: list[tuple[Draw, float]] = [
    (torch.rand, 0.5),
    (lambda n: torch.rand(n, generator=torch.Generator().manual_seed(n)), 0.5),
    (lambda n: torch.rand_like(like(n)), 0.5),
    (lambda n: torch.randn(n, 3), 0.5),
    (lambda n: torch.randn(n, 3, requires_grad=True), 0.5),
    (lambda n: torch.randn_like(like(n)), 0.5),
    (lambda n: like(n).uniform_(2, 4), 3.0),
    (lambda n: like(n).uniform_(**LIMITS), -0.5),
    (lambda n: like(n).normal_(1, 4), 3.0),
    (lambda n: like(n).normal_(std=4), 2.0),
    (lambda n: torch.normal(like(n), 4.0), 4.0),
    (lambda n: torch.normal(1.0, 4.0, (n,)), 3.0),
    (lambda n: torch.bernoulli(like(n) / 4), 1.0),
    (lambda n: torch.bernoulli(like(n) / 5), 0.0),
    (lambda n: like(n).bernoulli_(0.8), 1.0),
    (lambda n: like(n).bernoulli_(0.2), 0.0),
    (lambda n: torch.randint(10, (n,)), 0),
    (lambda n: torch.randint(4, 10, (n,)), 4),
    (lambda n: torch.randint(low=4, high=10, size=(n,)), 4),
    (lambda n: torch.randint_like(like(n), 4, 10), 4.0),
    (lambda n: like(n).random_(4, 10), 4.0),
    (lambda n: like(n).exponential_(), 1.0),
    (lambda n: torch.poisson(like(n)), 1.0),
    (lambda n: torch.distributions.Normal(1.0, 4.0).sample((n,)), 3.0),
    (lambda n: torch.multinomial(torch.tensor([[0.2, 0.8]]).expand(n, 2), 4, replacement=True), 1),
    (lambda n: torch.multinomial(torch.tensor([[0.2, 0.1, 0.4, 0.3]]).expand(n, 4), 3, replacement=True), 2),
    (lambda n: torch.multinomial(torch.tensor([0.1, 0.1, 0.1, 0.4, 0.1, 0.2]), n, True), 3),
    (lambda n: torch.tensor([0.1, 0.1, 0.1, 0.4, 0.1, 0.2]).multinomial(num_samples=n, replacement=True), 3),
]


@pytest.mark.parametrize(("draw", "value"), ELEMENTS)
def test_each_element_of_a_draw_is_one_number(draw: Draw, value: float) -> None:
    for size in (2, 5):
        plain = draw(size)
        with FixedDraws():
            found = draw(size)
        assert (found.shape, found.dtype, found.requires_grad) == (plain.shape, plain.dtype, plain.requires_grad)
        assert bool((found == value).all()), found


def test_what_is_chosen_without_replacement_is_chosen_once() -> None:
    with FixedDraws():
        assert torch.multinomial(torch.tensor([[0.2, 0.5, 0.3]] * 2), 2).tolist() == [[1, 2], [1, 2]]
        assert torch.randperm(4).tolist() == [3, 0, 1, 2]
        assert torch.distributions.Beta(torch.tensor(1.0), torch.tensor(3.0)).sample().item() == 0.25


def test_what_is_chosen_from_is_noted_and_may_be_turned_further() -> None:
    weights = torch.tensor([0.0, 0.5, 0.3, 0.1, 0.2])

    def choose() -> tuple[list[int], ...]:
        rows = torch.multinomial(weights.expand(2, 5), 2).tolist()[0]
        drawn = torch.multinomial(weights, 5, replacement=True), torch.rand(7), torch.randint(9, (9,))
        assert drawn[0].tolist() == [1] * 5
        return torch.randperm(4).tolist(), torch.randperm(n=6).tolist(), torch.multinomial(weights, 3).tolist(), rows

    with FixedDraws() as draws:
        assert choose() == ([3, 0, 1, 2], [5, 0, 1, 2, 3, 4], [2, 4, 3], [1, 2])
    assert draws.lengths == {4, 5, 6}  # rows of weights choose for themselves
    with FixedDraws({4, 5}) as draws:
        # what has no weight is never chosen
        assert choose() == ([1, 2, 3, 0], [5, 0, 1, 2, 3, 4], [3, 1, 2], [1, 2])
    assert draws.lengths == {4, 5, 6}


@pytest.mark.parametrize(
    "drop",
    [
        functional.dropout,
        functional.dropout2d,
        functional.alpha_dropout,
        functional.feature_alpha_dropout,
        torch.dropout,
        lambda x, p, training: nn.Dropout(p)(x),
        lambda x, p, training: functional.dropout(input=x, p=p, training=training),
    ],
)
def test_nothing_is_dropped(drop: Any) -> None:
    x = torch.randn(3, 4, 5, 5)
    with FixedDraws():
        assert torch.equal(drop(x, 0.5, True), x)
    assert not torch.equal(drop(x, 0.5, True), x)


def test_attention_drops_nothing() -> None:
    x = torch.randn(2, 3, 4)
    expected = functional.scaled_dot_product_attention(x, x, x)
    with FixedDraws():
        assert torch.equal(functional.scaled_dot_product_attention(x, x, x, None, 0.5), expected)
        assert torch.equal(functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5), expected)
        assert torch.equal(functional.scaled_dot_product_attention(x, x, x), expected)


def test_a_loop_that_waits_for_a_draw_ends() -> None:
    def wait() -> None:
        while float(torch.rand(())) <= 0.5:
            pass

    with patch.object(fixed_draws, "MOST_DRAWS", 20), FixedDraws():
        wait()


def test_other_draws_are_as_ever() -> None:
    random.seed(0)
    numpy.random.seed(0)
    expected = random.random(), numpy.random.rand()
    random.seed(0)
    numpy.random.seed(0)
    with FixedDraws():
        assert (random.random(), numpy.random.rand()) == expected
