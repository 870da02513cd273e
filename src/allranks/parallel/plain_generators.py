"""Python's and numpy's global generators, so that a second run of a forward draws what the first one drew.

torch's checkpoint puts back torch's own generators only. numpy builds what it tells of its state number by number (it
takes 30 us, and 20 us to put it back; python 4 us each), so that is done only where the generator has moved meanwhile.
"""

import ctypes
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.random.mtrand import get_bit_generator

# MT19937: 624 words, and where among them it stands. Read only to see whether they are the same as before.
_BYTES = 625 * 4


@dataclass(frozen=True, slots=True)
class _Numpy:
    """A state of numpy's generator.

    Attributes:
        words: its memory; None where that does not tell all: beside a normal number held back, or of another kind.
    """

    state: Any
    words: bytes | None

    def stands(self) -> bool:
        """Whether the generator is there now."""
        return self.words is not None and self.words == _words()


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
            state = np.random.get_state(legacy=False)
            _last_numpy = _Numpy(state, None if state["has_gauss"] else _words())
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


def _words() -> bytes | None:
    generator: Any = get_bit_generator()
    if type(generator) is not np.random.MT19937:
        return None
    return ctypes.string_at(generator.ctypes.state_address, _BYTES)
