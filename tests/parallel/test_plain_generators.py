"""Python's and numpy's generators are put back to where they were, and are not asked where that is."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.random.mtrand import get_bit_generator, set_bit_generator

from allranks.parallel import plain_generators
from allranks.parallel.plain_generators import PlainGenerators


def draw() -> list[float]:
    """One normal number of numpy's: it makes two, and holds the other back, so that not every draw moves its words."""
    return [random.random(), random.gauss(0, 1), float(np.random.standard_normal()), float(np.random.random())]


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    plain, arrays = random.getstate(), np.random.get_state()
    random.seed(1)
    np.random.seed(1)
    yield
    random.setstate(plain)
    np.random.set_state(arrays)


def test_what_is_drawn_again_is_what_was_drawn_and_leaves_no_trace() -> None:
    for number in range(4):
        kept = PlainGenerators()
        first = draw()
        expected = draw()
        random.seed(1 + number)
        np.random.seed(1 + number)
        later = PlainGenerators()
        following = draw()
        with later.put_back():
            for _ in range(2):
                with kept.put_back():
                    assert draw() + draw() == first + expected
            with pytest.raises(ZeroDivisionError), kept.put_back():
                draw()
                raise ZeroDivisionError
            assert draw() == following
        now = draw()
        with later.put_back():
            assert draw() + draw() == following + now


def test_a_number_held_back_is_seen_though_it_moves_nothing() -> None:
    np.random.standard_normal()
    kept = PlainGenerators()
    held_back = np.random.standard_normal()
    after = PlainGenerators()
    following = np.random.standard_normal()
    with kept.put_back():
        inside = PlainGenerators()
        assert np.random.standard_normal() == held_back
        with inside.put_back():
            assert np.random.standard_normal() == held_back
        with after.put_back():
            assert np.random.standard_normal() == following


def test_words_that_come_by_again_are_told_apart_by_the_number_held_back() -> None:
    """Seeded with the same key again, as in a pass that is made once more."""
    for _ in range(2):
        np.random.seed(7)
        np.random.standard_normal()
        first, held_back = PlainGenerators(), np.random.standard_normal()
        second = PlainGenerators()
        following = np.random.standard_normal()
        np.random.seed(7)
        np.random.standard_normal()
        assert PlainGenerators()._states != second._states
        with first.put_back():
            assert np.random.standard_normal() == held_back
            with second.put_back():
                assert np.random.standard_normal() == following


def test_a_pass_that_ends_one_number_short_is_undone() -> None:
    start = PlainGenerators()
    np.random.standard_normal(2)
    end = PlainGenerators()
    following = np.random.standard_normal()
    with end.put_back():
        with start.put_back():
            np.random.standard_normal()
        assert np.random.standard_normal() == following


def test_a_held_back_number_that_is_nowhere_to_be_seen_is_put_back_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert plain_generators._HELD_AT is not None, "this numpy shows it"
    assert plain_generators._WORDS_AT is not None, "this python shows its words"
    monkeypatch.setattr(plain_generators, "_HELD_AT", None)
    monkeypatch.setattr(plain_generators, "_WORDS_AT", None)
    test_what_is_drawn_again_is_what_was_drawn_and_leaves_no_trace()
    test_words_that_come_by_again_are_told_apart_by_the_number_held_back()
    test_a_pass_that_ends_one_number_short_is_undone()


def test_none_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def watched(module: Any, name: str) -> Any:
        real = getattr(module, name)

        def call(*given: Any, **named: Any) -> Any:
            asked.append(name)
            return real(*given, **named)

        return call

    for module, names in ((np.random, ("get_state", "set_state")), (random, ("getstate", "setstate"))):
        for name in names:
            monkeypatch.setattr(module, name, watched(module, name))
    kept = [PlainGenerators() for _ in range(3)]
    for one in kept:
        with one.put_back():
            draw()
    assert len({id(one._states) for one in kept}) == 1, "the state is held once"
    assert asked == []


def test_another_kind_of_generator_is_put_back_too() -> None:
    own = get_bit_generator()
    try:
        set_bit_generator(np.random.PCG64(3))
        kept = PlainGenerators()
        first = draw()
        with kept.put_back():
            assert draw() == first
        set_bit_generator(own)
        for kind in (np.random.PCG64, np.random.MT19937):
            exchanged, twin = kind(3), kind(3)
            before = PlainGenerators()
            first = draw()
            set_bit_generator(exchanged)
            before.put()
            assert get_bit_generator() is own and draw() == first
            assert exchanged.random_raw() == twin.random_raw(), "the other one stays where it stood"
    finally:
        set_bit_generator(own)
