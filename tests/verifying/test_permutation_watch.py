"""Permutations are known by their values, whoever draws them; nothing stays patched, and nothing is drawn otherwise."""

import copy
import pickle
import random
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from allranks.verifying.permutation_watch import CLASSES, FEWEST, PermutationWatch, digest_of

N = 12
EARLY = "from numpy.random import default_rng\nfrom random import shuffle\nfrom torch import randperm\n"
EARLY_NAMES = ("default_rng", "shuffle", "randperm")


@pytest.fixture
def watch() -> Iterator[PermutationWatch]:
    found = PermutationWatch()
    with found.watching():
        yield found


def by_loader(seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    loader = DataLoader(TensorDataset(torch.arange(N)), batch_size=5, shuffle=True, generator=generator)
    return [int(x) for (batch,) in loader for x in batch]


def shuffled(shuffle: Callable[[Any], object], values: Any) -> list[int]:
    shuffle(values)
    return [int(value) for value in values]


def after(seeding: Any, drawing: Any) -> Any:
    return drawing


DRAWN: dict[str, Callable[[int], Any]] = {
    "torch.randperm": lambda seed: torch.randperm(N, generator=torch.Generator().manual_seed(seed)),
    "a DataLoader": by_loader,
    "random.shuffle": lambda seed: after(random.seed(seed), shuffled(random.shuffle, [*range(N)])),
    "random.sample": lambda seed: after(random.seed(seed), random.sample(range(N), N)),
    "Random.shuffle": lambda seed: shuffled(random.Random(seed).shuffle, [*range(N)]),
    "Random.sample": lambda seed: random.Random(seed).sample(range(N), k=N),
    "np.random.permutation": lambda seed: after(np.random.seed(seed), np.random.permutation(N)),
    "np.random.shuffle": lambda seed: after(np.random.seed(seed), shuffled(np.random.shuffle, np.arange(N))),
    "default_rng().permutation": lambda seed: np.random.default_rng(seed).permutation(N),
    "default_rng().shuffle": lambda seed: shuffled(np.random.default_rng(seed).shuffle, np.arange(N)),
    "Generator().permutation": lambda seed: np.random.Generator(np.random.PCG64(seed)).permutation(N),
    "RandomState().permutation": lambda seed: np.random.RandomState(seed).permutation(N),
    "RandomState().shuffle": lambda seed: shuffled(np.random.RandomState(seed).shuffle, [*range(N)]),
}


@pytest.mark.parametrize("name", DRAWN)
def test_a_permutation_that_is_drawn_again_is_seen_and_no_other(name: str) -> None:
    draw, watch = DRAWN[name], PermutationWatch()
    due = [list(draw(seed)) for seed in (0, 1)]
    with watch.watching(), watch.making():
        assert list(draw(0)) == due[0]
        assert watch.redrawn == []  # numpy's permutation calls its own shuffle, and is one draw for all that
        assert list(draw(1)) == due[1]
        assert watch.redrawn == []
        draw(0)
        assert watch.redrawn == [N]


def test_what_is_drawn_while_no_data_is_made_does_not_count(watch: PermutationWatch) -> None:
    DRAWN["torch.randperm"](0)
    with watch.making():
        DRAWN["torch.randperm"](0)
    DRAWN["torch.randperm"](0)
    assert watch.redrawn == []
    with watch.making():
        DRAWN["torch.randperm"](0)
    assert watch.redrawn == [N]
    watch.reset()
    assert watch.redrawn == []
    with watch.making():
        DRAWN["torch.randperm"](0)
    assert watch.redrawn == []


def test_short_ones_are_equal_by_chance_and_parts_are_no_order(watch: PermutationWatch) -> None:
    with watch.making():
        for _ in range(2):
            np.random.default_rng(0).permutation(FEWEST - 1)
            random.Random(0).sample(range(N), N - 1)
        assert watch.redrawn == []
        for _ in range(2):
            np.random.default_rng(0).permutation(FEWEST)
        assert watch.redrawn == [FEWEST]


def test_an_order_that_is_shuffled_on_is_another_one_though_the_seed_is_the_same(watch: PermutationWatch) -> None:
    kept = [*range(N)]
    with watch.making():
        for _ in range(3):
            random.Random(0).shuffle(kept)
    assert watch.redrawn == []


def test_samples_are_told_apart_by_what_they_are(watch: PermutationWatch) -> None:
    """Those that have no value by which they could be are other ones wherever they are made anew."""
    with watch.making():
        for _ in range(2):
            random.Random(0).shuffle([(f"{number}.png", number) for number in range(N)])
        assert watch.redrawn == [N]
        watch.reset()
        for _ in range(2):
            random.Random(0).shuffle([[number] for number in range(N)])
        assert watch.redrawn == []


def test_samples_that_are_known_by_their_place_in_memory_keep_it(watch: PermutationWatch) -> None:
    class Sample:
        """Another one than any other."""

    samples = [Sample() for _ in range(N)]
    last = weakref.ref(samples[-1])
    with watch.making():
        random.Random(0).shuffle(samples)
    samples.clear()
    assert last() is not None
    watch.reset()
    assert last() is None


def test_digests_are_of_values_and_their_order() -> None:
    order = torch.randperm(N)
    assert digest_of(order) == digest_of(order.numpy()) == digest_of(order.clone()) != digest_of(order.flip(0))
    assert digest_of(np.array(["a", None], dtype=object)) == digest_of(["a", None])


def test_generators_of_numpy_stay_what_they_are_to_a_program(watch: PermutationWatch) -> None:
    early = np.random.default_rng(0), np.random.RandomState(0)
    with watch.making():
        late = np.random.default_rng(0), np.random.RandomState(0)
        for kind, one, other in zip((np.random.Generator, np.random.RandomState), early, late, strict=True):
            assert isinstance(one, kind) and isinstance(other, kind) and not isinstance(3, kind)
        mine = type("Mine", (np.random.RandomState,), {})
        assert isinstance(mine(0), mine) and not isinstance(early[1], mine)
        assert np.random.default_rng(early[0]) is early[0]
    for kind, one, other in zip(CLASSES, early, late, strict=True):
        assert isinstance(other, kind)
        found: list[Any] = [one, copy.deepcopy(other), pickle.loads(pickle.dumps(other))]
        assert {type(made) for made in found} == {kind} and len({made.normal() for made in found}) == 1


def test_names_that_a_program_has_given_to_them_tell_too() -> None:
    program = ModuleType("user_program")
    exec(EARLY, program.__dict__)
    before, watch = [program.__dict__[name] for name in EARLY_NAMES], PermutationWatch()
    with watch.watching(), watch.making():
        for _ in range(2):
            program.default_rng(0).permutation(N)
            program.randperm(N + 1, generator=torch.Generator().manual_seed(0))
            random.seed(0)
            program.shuffle([*range(N + 2)])
    assert watch.redrawn == [N, N + 1, N + 2]
    assert [program.__dict__[name] for name in EARLY_NAMES] == before


def test_nothing_stays_patched() -> None:
    def names() -> list[Any]:
        found = [getattr(np.random, name) for name in ("permutation", "shuffle", "default_rng")]
        found += [np.random.Generator, np.random.RandomState, torch.randperm, random.shuffle, random.sample]
        return [*found, random.Random.shuffle, random.Random.sample]

    before, watch = names(), PermutationWatch()
    with pytest.raises(ValueError), watch.watching(), watch.making():
        assert all(now is not then for now, then in zip(names(), before, strict=True))
        raise ValueError
    assert names() == before
    with watch.watching():
        DRAWN["torch.randperm"](0), DRAWN["torch.randperm"](0)
    assert watch.redrawn == []
