"""Random numbers where tensors are whole, and where they are cut (law 6)."""

import pytest
import torch
from torch import nn

from allranks.parallel.recompute import recompute
from allranks.parallel.regions import Regions


def draw(coordinate: int, seed: int = 3) -> tuple[list[float], list[float], list[float]]:
    """What a rank draws before, inside and after a cut region."""
    torch.manual_seed(seed)
    regions = Regions(coordinate)
    before = torch.rand(3).tolist()
    regions.enter()
    inside = torch.rand(3).tolist()
    regions.enter()  # a second layer of the same region
    regions.exit()
    regions.exit()
    return before, inside, torch.rand(3).tolist()


def test_ranks_draw_alike_outside_and_apart_inside() -> None:
    first, second = draw(0), draw(1)
    assert first[0] == second[0] and first[2] == second[2]
    assert first[1] != second[1]
    assert len({*first[0], *first[1], *second[1], *first[2]}) == 12


def test_the_numbers_are_a_function_of_the_seed() -> None:
    assert draw(1) == draw(1) != draw(1, seed=4)


def test_a_recomputed_forward_draws_the_same() -> None:
    torch.manual_seed(0)
    regions = Regions(1)
    found = []
    state = torch.get_rng_state()
    for _ in range(2):
        torch.set_rng_state(state)
        regions.enter()
        found.append(torch.rand(2).tolist())
        regions.exit()
    assert found[0] == found[1]


def test_a_forward_after_one_that_failed_draws_alike() -> None:
    found = []
    for coordinate in (0, 1):
        torch.manual_seed(3)
        regions = Regions(coordinate)
        regions.enter()
        torch.rand(1)
        regions.begin()
        found.append(torch.rand(3).tolist())
        assert not regions.inside
    assert found[0] == found[1]


def test_a_forward_that_was_seeded_draws_by_its_seed_whatever_was_left_open() -> None:
    """A recomputed block that opens a region ends in it, and the generator is put back behind it."""
    torch.manual_seed(4)
    expected = torch.rand(3).tolist()
    torch.manual_seed(3)
    regions = Regions(1)
    state = torch.get_rng_state()
    regions.enter()
    torch.set_rng_state(state)
    before = torch.rand(3).tolist()
    torch.set_rng_state(state)
    regions.begin()
    assert torch.rand(3).tolist() == before
    torch.manual_seed(3)
    regions.enter()
    torch.manual_seed(4)
    regions.begin()
    assert torch.rand(3).tolist() == expected and not regions.inside


class Opening(nn.Module):
    """A block in which a region opens and stays open, as under sequence rules."""

    def __init__(self, regions: Regions) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.regions = [regions]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x).tanh()
        self.regions[0].enter()
        return nn.functional.dropout(hidden.tanh(), 0.5)


def gradient(again: bool, forwards: int, backwards: int) -> torch.Tensor:
    torch.manual_seed(0)
    regions = Regions(1)
    block = Opening(regions)
    if again:
        block.forward = recompute("block", block, block.forward)  # type: ignore[method-assign]
    total = torch.zeros(())
    for index in range(forwards):
        regions.begin()
        total = total + block(torch.arange(8.0).view(2, 4) * (index + 1) / 7).sum()
        regions.exit()
    for left in reversed(range(backwards)):
        total.backward(retain_graph=left > 0)
    assert block.linear.weight.grad is not None
    return block.linear.weight.grad


@pytest.mark.parametrize(("forwards", "backwards"), [(1, 2), (2, 1), (3, 2)])
def test_a_block_that_opens_a_region_draws_the_same_after_another_was_recomputed(forwards: int, backwards: int) -> None:
    """Each recomputation ends in the region that it has opened; the next one begins before it."""
    found, expected = (gradient(again, forwards, backwards) for again in (True, False))
    assert torch.equal(found, expected)
