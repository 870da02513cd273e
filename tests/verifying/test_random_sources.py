"""Whose random numbers a program draws: named where it is seen, and nothing named that is not its own."""

import os
import random
import secrets
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from allranks.verifying.observer import Observer
from allranks.verifying.random_sources import RandomOperations, Unseeded, seen_to_draw

OWN = np.random.default_rng(3)
OLDER = np.random.RandomState(3)
PLAIN = random.Random(3)


def test_what_is_seen_to_draw_follows_seeds_or_does_not() -> None:
    def run() -> RandomOperations:
        mode = RandomOperations()
        with mode:
            torch.rand(2)
            torch.rand(2, generator=torch.Generator())
            OWN.random()
        return mode

    assert seen_to_draw(run, seeded=True) == ["rand"]
    own, generator = seen_to_draw(run, seeded=False)
    assert own == "rand with a torch.Generator of its own" and "umpy" in generator


def test_random_operations_are_named() -> None:
    mode = RandomOperations()
    with mode:
        torch.bernoulli(torch.full((3,), 0.5))
        torch.rand(2, generator=torch.Generator())
        torch.ones(3) + 1
    assert mode.names == ["bernoulli"] and mode.own == ["rand with a torch.Generator of its own"]


def test_the_least_precise_type_is_noted() -> None:
    mode, x = RandomOperations(), torch.ones(3, dtype=torch.float64)
    with mode:
        x + 1
        assert (mode.lowest, mode.lowered) == (torch.float64, None)
        x.float().long()
        assert (mode.lowest, mode.lowered) == (torch.float32, None)
        x.half()
        assert (mode.lowest, mode.lowered) == (torch.float16, torch.float16)
        x.bfloat16()
        x.half() + x.float()
        assert (mode.lowest, mode.lowered) == (torch.bfloat16, torch.bfloat16)


def test_generators_that_move_within_a_step_are_named() -> None:
    mode = RandomOperations()
    for draw, names in (
        (random.random, ["python's random"]),
        (lambda: np.random.rand(2), ["numpy.random"]),
        (lambda: torch.randn(3), ["randn"]),
        (lambda: torch.ones(3), []),
    ):
        with mode:
            torch.rand(2)  # initial values, for one: before the step
        random.random()
        mode.around(draw)()
        assert mode.names == names
        with mode:
            torch.randn(2)  # what is evaluated on, for one: behind it
        assert mode.names == names


def test_what_the_observer_draws_is_not_the_programs() -> None:
    observer = Observer(own_noise=True)
    mode = RandomOperations(observer)
    with observer.watching(), mode:
        observer.feed([1, 2, 3])
        nn.functional.dropout(torch.ones(3), 0.5)
        torch.randn(3, 2, generator=torch.Generator())
        assert mode.names == mode.own == []
        torch.rand(2)
    assert mode.names == ["rand"]


@pytest.mark.parametrize(
    ("draw", "names"),
    [
        (lambda: os.urandom(2), ("os.urandom",)),
        (secrets.randbits, ("os.urandom",)),
        (OWN.random, ("a numpy.random.Generator of its own",)),
        (OLDER.rand, ("a numpy.random.RandomState of its own",)),
        (PLAIN.random, ("a random.Random of its own",)),
        (lambda: np.random.default_rng().random(), ("numpy.random.default_rng() without a seed",)),
        (lambda: np.random.default_rng(7).random(), ()),
        (lambda: time.perf_counter(), ("time.perf_counter",)),  # noqa: PLW0108 read here, not by the one who watches
        (lambda: (time.time(), os.urandom(1)), ("os.urandom",)),
        (random.random, ()),
        (np.random.rand, ()),
    ],
)
def test_what_no_seed_reaches_is_named(draw: Callable[..., object], names: tuple[str, ...]) -> None:
    unseeded = Unseeded()
    with unseeded.watching():
        draw(8) if draw is secrets.randbits else draw()
    assert unseeded.names == names
    os.urandom(1)
    assert unseeded.names == names
