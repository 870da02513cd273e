"""Looking at the permutations that a program draws while it makes its data: with torch, numpy or python.

An order that is drawn once more for another epoch is known by its values, whichever generator it is of. What draws a
whole permutation is seen; an order that is made otherwise (the `argsort` of random numbers, say) is not.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, final
from unittest.mock import patch

import numpy as np
import torch

from allranks.verifying.early_names import renaming

FEWEST = 8  # two orders of so many are equal by chance once in 40,320 times
CLASSES: tuple[Any, ...] = (np.random.Generator, np.random.RandomState)
Drawing = Callable[..., Any]


@final
@dataclass
class PermutationWatch:
    """The permutations that were drawn within `making` since `reset`."""

    _drawn: "Counter[tuple[int, int]]" = field(default_factory=Counter)
    _kept: list[Sequence[Any]] = field(default_factory=list)
    _making: bool = False
    _within: bool = False

    def __post_init__(self) -> None:
        """Make the classes of numpy's generators that tell."""
        self._telling = {kind: self._telling_class(kind) for kind in CLASSES}

    @property
    def redrawn(self) -> list[int]:
        """The lengths of those that were drawn more than once with the same values, each once."""
        return sorted({length for (length, _), times in self._drawn.items() if times > 1})

    def reset(self) -> None:
        """Forget everything."""
        self._drawn.clear()
        self._kept.clear()

    @contextmanager
    def making(self) -> Iterator[None]:
        """Inside, the program makes its data. Here alone numpy's generators are of classes that tell."""
        with ExitStack() as stack:
            for kind, telling in self._telling.items():
                stack.enter_context(patch.object(np.random, kind.__name__, telling))
            self._making = True
            try:
                yield
            finally:
                self._making = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, functions that draw permutations tell, under names that a program has given to them as well."""
        functions: list[tuple[Any, str, Drawing]] = [
            (torch, "randperm", self._noting(torch.randperm, _given)),
            (random, "shuffle", self._noting(random.shuffle, _permuted)),
            (random, "sample", self._noting(random.sample, _sampled)),
            (np.random, "permutation", self._noting(np.random.permutation, _given)),
            (np.random, "shuffle", self._noting(np.random.shuffle, _permuted)),
            (np.random, "default_rng", self._making_one(np.random.default_rng)),
        ]
        methods: list[tuple[Any, str, Drawing]] = [
            (random.Random, "shuffle", self._noting(random.Random.shuffle, _of_method(_permuted))),
            (random.Random, "sample", self._noting(random.Random.sample, _of_method(_sampled))),
        ]
        with ExitStack() as stack:
            stack.enter_context(renaming({getattr(owner, name): other for owner, name, other in functions}))
            for owner, name, other in (*functions, *methods):
                stack.enter_context(patch.object(owner, name, other))
            yield

    def _noting(self, original: Drawing, drawn: Drawing) -> Drawing:
        """`original`, of which `drawn` gives the permutation, from what it has returned and its arguments."""

        @wraps(original)
        def draw(*args: Any, **options: Any) -> Any:
            if not self._making or self._within:  # numpy's permutation calls its own shuffle
                return original(*args, **options)
            self._within = True
            try:
                found = original(*args, **options)
            finally:
                self._within = False
            self._note(drawn(found, *args, **options))
            return found

        return draw

    def _making_one(self, original: Drawing) -> Drawing:
        @wraps(original)
        def default_rng(seed: Any = None) -> Any:
            found = original(seed)
            telling = self._telling.get(type(found)) if self._making and found is not seed else None
            return found if telling is None else telling(found.bit_generator)

        return default_rng

    def _telling_class(self, kind: Any) -> Any:
        """A class whose methods tell; its objects are pickled and copied as those of `kind`, and these are of it."""

        class Kind(type):
            def __instancecheck__(cls, one: object) -> bool:
                return super().__instancecheck__(one) or (cls is telling and isinstance(one, kind))

        methods = {
            "permutation": self._noting(kind.permutation, _given),
            "shuffle": self._noting(kind.shuffle, _of_method(_permuted)),
        }
        telling = Kind(kind.__name__, (kind,), {"__module__": kind.__module__, **methods})
        return telling

    def _note(self, values: Any) -> None:
        if len(values) < FEWEST:
            return
        held = () if isinstance(values, torch.Tensor | np.ndarray) and values.dtype != object else tuple(values)
        self._drawn[len(values), digest_of(values)] += 1
        self._kept.append(held)  # what is known by its place in memory alone has to keep that


def digest_of(values: Any) -> int:
    """A digest of some things in their order: of each its value, where it can be hashed, else which object it is."""
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().numpy()
    if isinstance(values, np.ndarray) and values.dtype != object:
        return hash((values.dtype.str, values.shape, values.tobytes()))
    return hash(tuple(map(_value, values)))


def _value(one: Any) -> int:
    try:
        return hash(one)
    except TypeError:
        return id(one)


def _given(found: Any, *_: Any, **__: Any) -> Any:
    return found


def _permuted(_: None, x: Any, *__: Any, **___: Any) -> Any:
    return x


def _sampled(found: list[Any], population: Any, *_: Any, **__: Any) -> list[Any]:
    """Nothing of a part: some that are chosen are no order of all."""
    return found if len(found) == len(population) else []


def _of_method(drawn: Drawing) -> Drawing:
    return lambda found, _, *args, **options: drawn(found, *args, **options)
