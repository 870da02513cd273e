"""What the stages of a pipeline draw: alike between modules, apart inside of them."""

import random
from contextvars import copy_context
from typing import Any

import numpy as np
import torch

from allranks.data.random_keys import last_key, seed_all
from allranks.parallel.stage_draws import drawing_alike, drawing_apart, drawing_aside, stage_seed


def draw() -> tuple[float, float, float]:
    return float(torch.rand(())), random.random(), float(np.random.rand())


def forward(stage: int, draws: int = 1, calls: int = 3) -> tuple[list[Any], list[Any]]:
    """What is drawn between modules, and by modules, of which each draws so often."""
    between, inside = [], []
    seed_all(5)
    with drawing_alike():
        for _ in range(calls):
            between.append(draw())
            with drawing_apart(stage):
                inside += [draw() for _ in range(draws)]
        between.append(draw())
    return between, inside


def test_between_modules_all_stages_draw_the_same_and_inside_each_its_own() -> None:
    (first, own), (other, others), (idle, _) = forward(0), forward(1), forward(2, draws=0)
    assert first == other == idle and len(set(first)) == 4
    assert len({number for drawn in (first, own, others) for numbers in drawn for number in numbers}) == 3 * (4 + 3 + 3)
    assert forward(1) == (other, others) and last_key() == 5


def test_between_modules_all_go_on_as_on_one_device() -> None:
    seed_all(5)
    alone = [draw() for _ in range(4)]
    assert forward(1)[0] == alone
    assert torch.initial_seed() == 5


def test_what_is_drawn_aside_is_nobodys() -> None:
    seed_all(5)
    alone = [draw() for _ in range(2)]
    seed_all(5)
    with drawing_alike():
        between = [draw()]
        for _ in range(2):
            with drawing_aside():
                draw()
        with drawing_apart(1):
            first = draw()
        between.append(draw())
    assert between == alone and first == forward(1)[1][0]


def test_the_seed_inside_is_the_stages_own() -> None:
    seed_all(5)
    with drawing_alike():
        torch.manual_seed(7)  # as where each part of a sequence draws its own
        with drawing_apart(1):
            assert torch.initial_seed() == stage_seed(7, 1)
            with drawing_apart(1):  # a module inside of a module
                assert torch.initial_seed() == stage_seed(7, 1)
        assert torch.initial_seed() == 7


def test_what_is_computed_again_in_its_context_draws_again_what_it_drew() -> None:
    seed_all(5)
    with drawing_alike():
        with drawing_apart(0):
            draw()
        context, state, plain = copy_context(), torch.get_rng_state(), random.getstate()

        def run() -> tuple[float, float, float]:
            with drawing_apart(0):
                return draw()

        first = run()
    draw()
    for _ in range(2):
        torch.set_rng_state(state)  # as torch's checkpoint does, and ours with python's
        random.setstate(plain)
        assert context.copy().run(run) == first
