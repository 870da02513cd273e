import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from allranks.data.random_keys import (
    collate_key,
    cuda_devices,
    device_key,
    epoch_key,
    evaluation_seed,
    generators_kept,
    item_key,
    mix,
    note_devices,
    random_key,
    random_keys,
    seed_all,
)
from tests import fake_cuda

SEEDS = st.integers(-(2**63), 2**70)


def drawn() -> tuple[float, float, float]:
    """One number from each global generator."""
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_seed_all_fixes_the_three_generators() -> None:
    seed_all(2**63 - 1)
    first = drawn()
    seed_all(12345)
    other = drawn()
    seed_all(2**63 - 1)
    assert drawn() == first
    assert all(a != b for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("fault", [nullcontext, partial(pytest.raises, ZeroDivisionError)])
def test_draws_inside_are_nobodys(fault: Callable[[], AbstractContextManager[object]]) -> None:
    """Nor where what draws them fails."""
    seed_all(7)
    expected = drawn()
    seed_all(7)
    with fault() as failing, generators_kept():
        drawn()
        if failing is not None:
            raise ZeroDivisionError
    assert drawn() == expected


def test_one_device_is_seeded_with_the_key_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    generators = fake_cuda.put_in(monkeypatch, 3, current=1)
    for generator in generators:
        generator.manual_seed(17)
    for noted in ((), (2,)):  # one alone is the current one
        note_devices(noted)
        seed_all(2**63 - 1)
        assert [generator.initial_seed() for generator in generators] == [17, 2**63 - 1, 17]
        assert cuda_devices() == (1,)


def test_every_device_of_the_process_is_seeded_and_draws_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    generators = fake_cuda.put_in(monkeypatch, 5, current=3)
    note_devices((3, 2))
    for generator in generators:
        generator.manual_seed(17)
    seed_all(5)
    mine = [generator.initial_seed() for generator in generators]
    assert mine == [17, 17, device_key(5, 1), 5, 17]
    draws = [float(torch.rand((), generator=generators[index])) for index in (3, 2)]
    assert draws[0] != draws[1]
    seed_all(5)
    assert [float(torch.rand((), generator=generators[index])) for index in (3, 2)] == draws
    assert len({device_key(key, place) for key in range(4) for place in range(4)}) == 16
    assert (device_key(5, 0), device_key(5, 1)) == (5, 5190533010177694113), "a resumed run draws these"


def test_where_cuda_is_not_in_use_it_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise AssertionError("this would initialise CUDA")

    fake_cuda.put_in(monkeypatch, 2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", refuse)
    note_devices((1, 0))
    seed_all(5)
    assert cuda_devices() == ()


def test_draws_inside_are_nobodys_on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    generators = fake_cuda.put_in(monkeypatch, 3, current=1)
    note_devices((1, 0))
    seed_all(7)
    before = [generator.get_state() for generator in generators]
    with generators_kept():
        for generator in generators:
            torch.rand(3, generator=generator)
    kept = [torch.equal(generator.get_state(), state) for generator, state in zip(generators, before, strict=True)]
    assert kept == [True, True, False], "the third one is not this process's"


def test_every_argument_matters() -> None:
    base = (1, 2, 3, 4, 5)
    keys = {random_key(*base)} | {random_key(*(value + (i == j) for j, value in enumerate(base))) for i in range(5)}
    assert len(keys) == 6
    assert len({item_key(a, b, c) for a in range(4) for b in range(4) for c in range(4)}) == 64
    assert len({collate_key(a, b) for a in range(4) for b in range(4)}) == 16
    assert mix(1, 2) != mix(2, 1) and mix(0) != mix(0, 0)


def test_uses_never_share_a_key() -> None:
    keys = {random_key(0, 0, 0, 0), item_key(0, 0, 0), epoch_key(0, 0), evaluation_seed(0), collate_key(0, 0), mix(0)}
    assert len(keys) == 6


@given(SEEDS, st.integers(0, 2**40), st.integers(1, 4), st.integers(1, 4), st.integers(0, 2**20))
def test_many_keys_at_once_are_the_same_keys(seed: int, step: int, rows: int, micro_steps: int, rank: int) -> None:
    assert random_keys(seed, step, (rows, micro_steps), rank) == [
        [random_key(seed, step + row, micro_step, rank) for micro_step in range(micro_steps)] for row in range(rows)
    ]


@given(SEEDS, st.integers(0, 2**62))
def test_keys_fit_an_int64(seed: int, position: int) -> None:
    assert 0 <= item_key(seed, 0, position) < 2**63


def test_bits_are_balanced() -> None:
    keys = np.array([item_key(0, 0, position) for position in range(4096)])
    ones = ((keys[:, None] >> np.arange(63)) & 1).sum(axis=0)
    assert np.abs(ones - 2048).max() < 5 * 32


def test_outputs_are_frozen() -> None:
    """A resumed run draws the same numbers only under the same keys: these never change."""
    assert (random_key(0, 0, 0, 0), random_key(17, 1200, 3, 5, 1)) == (8805685517686248013, 1629861093123536573)
    assert (item_key(0, 0, 0), item_key(-1, 2, 2**40)) == (695311066142196439, 524478307333153495)
    assert collate_key(3, 4) == 1302452956750393254
    assert (epoch_key(3, 4), evaluation_seed(0)) == (2466865381688764451, 3849882132649978710)
