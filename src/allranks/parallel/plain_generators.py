"""Python's and numpy's global generators, so that what is drawn meanwhile, or drawn again, leaves no trace.

torch's checkpoint puts back torch's own generators only. Both of these make what they tell of their state number by
number (numpy takes 30 us for that, and 20 us to take it; python about 10 us each), so it is copied as it lies in
memory, a microsecond or two each. Where it lies there is found once, by a generator that stands at known numbers; where
that finds nothing they are asked.
"""

import ctypes
import random
import struct
from _random import Random as Words
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any, final

import numpy as np
from numpy.random.mtrand import get_bit_generator, set_bit_generator

# MT19937: 624 words, and where among them it stands.
_WORDS = struct.Struct("@624I")
_BYTES = _WORDS.size + 4
# A C int (whether a normal number is held back) and a double (that number).
_HELD = struct.Struct("@id")
_PYTHON: Any = random._inst  # whose methods the functions of `random` are


@final
class PlainGenerators:
    """Where both stood when this was made; those that have the same state hold it once."""

    def __init__(self) -> None:
        global _last  # noqa: PLW0603 the generators are the process's
        now = _python_state(), _numpy_state()
        if now != _last:
            _last = now
        self._states = _last

    def put(self) -> None:
        """Both as they were."""
        plain, arrays = self._states
        if isinstance(plain, _Told):
            random.setstate(plain.state)
        else:
            _view_of_python()[:], _PYTHON.gauss_next = plain
        generator, *kept = arrays
        if get_bit_generator() is not generator:  # somebody has exchanged it since
            set_bit_generator(generator)
        if isinstance(kept[0], _Told):
            np.random.set_state(kept[0].state)
        else:
            words, held = _views_of_numpy(generator)
            words[:], held[:] = kept

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Both as they were, inside; afterwards as they are now."""
        now = PlainGenerators()
        self.put()
        try:
            yield
        finally:
            now.put()


@final
class _Told:
    """A state that a generator told of; no other is known to be the same."""

    def __init__(self, state: Any) -> None:
        self.state = state


_last: tuple[Any, Any] = None, None


def _python_state() -> Any:
    """The words and the normal number that is held back."""
    if _WORDS_AT is None:
        return _Told(random.getstate())
    return _view_of_python().tobytes(), _PYTHON.gauss_next


def _numpy_state() -> Any:
    generator: Any = get_bit_generator()
    if _HELD_AT is None or type(generator) is not np.random.MT19937:
        return generator, _Told(np.random.get_state(legacy=False))
    words, held = _views_of_numpy(generator)
    return generator, words.tobytes(), held.tobytes()


@cache
def _view_of_python() -> memoryview:
    assert _WORDS_AT is not None
    return _view(id(_PYTHON) + _WORDS_AT, _BYTES)


@lru_cache(maxsize=4)
def _views_of_numpy(generator: Any) -> tuple[memoryview, memoryview]:
    """Of its words, and of the number that is held back."""
    assert _HELD_AT is not None
    held = _view(id(np.random.mtrand._rand) + _HELD_AT, _HELD.size)
    return _view(generator.ctypes.state_address, _BYTES), held


def _view(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")


def _find_words() -> int | None:
    """Where python's generator has its place and, behind it, its words, in bytes from its own beginning."""
    one = random.Random(0)
    *words, place = one.getstate()[1]
    found = ctypes.string_at(id(one), Words.__basicsize__).find(_WORDS.pack(*words))
    if found < 4 or ctypes.string_at(id(one) + found - 4, 4) != struct.pack("@i", place):
        return None
    return found - 4


def _find_held() -> int | None:
    """Where a RandomState has its `_HELD`, in bytes from its own beginning; None where it is nowhere to be seen.

    It is no part of what a generator shows of its memory, and after two normal numbers the words are those of after
    one: seeded anew, or put back before them, they come by again with another number held back.
    """
    kind = np.random.RandomState
    one = kind(0)
    one.standard_normal()
    state: Any = one.get_state(legacy=False)
    place = ctypes.string_at(id(one), kind.__basicsize__).find(_HELD.pack(1, state["gauss"]))
    if place < 0:
        return None
    one.standard_normal()
    return place if ctypes.string_at(id(one) + place, _HELD.size) == _HELD.pack(0, 0.0) else None


_WORDS_AT = _find_words()
_HELD_AT = _find_held()
