"""Random numbers where tensors are whole, and where they are cut (law 6)."""

import torch

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
