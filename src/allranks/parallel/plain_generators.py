"""Python's and numpy's global generators, so that a second run of a forward draws what the first one drew.

torch's checkpoint puts back torch's own generators only. numpy builds what it tells of its state number by number (it
takes 30 us, and 20 us to put it back; python 4 us each), so that is done only where the generator has moved meanwhile.
"""

import ctypes
import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.random.mtrand import get_bit_generator

# MT19937: 624 words, and where among them it stands. Read only to see whether they are the same as before.
_BYTES = 625 * 4
# A C int (whether a normal number is held back) and a double (that number).
_HELD = struct.Struct("@id")


@dataclass(frozen=True, slots=True)
class _Numpy:
    """A state of numpy's generator.

    Attributes:
        memory: its words and the normal number that it holds back; None for another kind of generator.
    """

    state: Any
    memory: bytes | None

    def stands(self) -> bool:
        """Whether the generator is there now."""
        return self.memory is not None and self.memory == _memory()


_last_plain: Any = None
_last_numpy: _Numpy | None = None


@final
class PlainGenerators:
    """The states of both when this was made; those that have the same one hold it once."""

    def __init__(self) -> None:
        global _last_plain, _last_numpy  # noqa: PLW0603 the generators are the process's
        plain = random.getstate()
        if plain != _last_plain:
            _last_plain = plain
        if _last_numpy is None or not _last_numpy.stands():
            _last_numpy = _Numpy(np.random.get_state(legacy=False), _memory())
        self._plain, self._numpy = _last_plain, _last_numpy

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Both as they were, inside; afterwards as they are now."""
        now = PlainGenerators()
        self._put()
        try:
            yield
        finally:
            now._put()

    def _put(self) -> None:
        global _last_numpy  # noqa: PLW0603 see above
        random.setstate(self._plain)
        if not self._numpy.stands():
            np.random.set_state(self._numpy.state)
        _last_numpy = self._numpy


def _memory() -> bytes | None:
    generator: Any = get_bit_generator()
    if _HELD_AT is None or type(generator) is not np.random.MT19937:
        return None
    held = ctypes.string_at(id(np.random.mtrand._rand) + _HELD_AT, _HELD.size)
    return ctypes.string_at(generator.ctypes.state_address, _BYTES) + held


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


_HELD_AT = _find_held()
