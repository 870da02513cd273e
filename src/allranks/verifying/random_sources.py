"""Where the random numbers of a program come from: operations of torch, shared generators, and what no seed reaches.

Of the last are seen bytes of the operating system, generators that a program has for itself (their states move, or they
are made without a seed), and clocks that its own code reads. A generator that began with a seed is one of them where a
build does not make it anew: it goes on from run to run.
"""

import gc
import os
import random
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, final
from unittest.mock import patch

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from allranks.verifying.observation import generator_digests
from allranks.verifying.observer import Observer

SYSTEM: Final = "os.urandom"
MADE: Final = "numpy.random.default_rng() without a seed"
OWN: Final = {
    np.random.Generator: "a numpy.random.Generator of its own",
    np.random.RandomState: "a numpy.random.RandomState of its own",
    random.Random: "a random.Random of its own",
}
PRECISIONS: Final = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""The most precise first."""
CLOCKS: Final = ("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns")
_PATHS: Final = sysconfig.get_paths()
_NOT_THE_PROGRAM: Final = (
    *(_PATHS[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    str(Path(__file__).parents[1]),
)
_SHARED: Final = (id(np.random.mtrand._rand), id(random._inst))


class RandomOperations(TorchDispatchMode):
    """Inside, what draws random numbers is noted: torch's operations by their own tag, and others' generators.

    Of numpy and python those generators are seen which everybody shares; `Unseeded` sees those of the program's own.

    Attributes:
        names: theirs; of what draws from a shared generator.
        own: of what draws from a torch.Generator that the program has for itself.
        lowest: of float64, float32, float16 and bfloat16 the least precise type of which an operation gives numbers.
    """

    def __init__(self, observer: Observer | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._observer = observer or Observer()
        self.names: list[str] = []
        self.own: list[str] = []
        self.lowest = torch.float64
        self._before = generator_digests()
        self._within = True

    def begin(self) -> None:
        """Here a step begins: what was drawn before it, for initial values, does not count."""
        self.names.clear()
        self.own.clear()
        self._before, self._within = generator_digests(), True

    def end(self) -> None:
        """Here it ends: note whose generators have moved. What draws behind it, for an evaluation, does not count."""
        self._within = False
        moved = [a != b for a, b in zip(self._before, generator_digests(), strict=True)]
        others = [name for name, drew in zip(("numpy.random", "python's random"), moved[1:], strict=True) if drew]
        self.names += [name for name in others if name not in self.names]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute, and note what draws, and in which type."""
        if torch.Tag.nondeterministic_seeded in func.tags and self._within and not self._observer.drawing:
            name, noted = str(func.overloadpacket).removeprefix("aten."), self.names
            if (kwargs or {}).get("generator") is not None:
                name, noted = f"{name} with a torch.Generator of its own", self.own
            if name not in noted:
                noted.append(name)
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and found.dtype in PRECISIONS:
            self.lowest = max(self.lowest, found.dtype, key=PRECISIONS.index)
        return found

    @property
    def lowered(self) -> torch.dtype | None:
        """bfloat16 or float16, where an operation gives numbers of that type; else None."""
        return self.lowest if self.lowest in PRECISIONS[2:] else None

    def around(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """The step inside of it."""

        def watched(*arguments: Any) -> Any:
            self.begin()
            with self:
                found = step(*arguments)
            self.end()
            return found

        return watched


@final
@dataclass
class Unseeded:
    """While `watching`, what is drawn from where no seed of torch, numpy or python reaches.

    Attributes:
        drawn: names of it.
        clocks: names of the clocks that were read; a program may do that to tell how long it takes.
    """

    drawn: list[str] = field(default_factory=list)
    clocks: list[str] = field(default_factory=list)
    _making: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """What was seen; clocks only where nothing else was."""
        return tuple(dict.fromkeys(self.drawn)) or tuple(dict.fromkeys(self.clocks))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, it is noted."""
        before = _states()
        with ExitStack() as stack:
            # python's own module has a name of its own for it.
            for module, name in ((os, "urandom"), (random, "_urandom")):
                stack.enter_context(patch.object(module, name, self._reading(getattr(module, name))))
            stack.enter_context(patch.object(np.random, "default_rng", self._made(np.random.default_rng)))
            for name in CLOCKS:
                stack.enter_context(patch.object(time, name, self._clock(name, getattr(time, name))))
            yield
        self.drawn += [name for generator, name, state in before if _state(generator) != state]

    def _reading(self, original: Callable[..., bytes]) -> Callable[..., bytes]:
        def urandom(*arguments: Any) -> bytes:
            if not self._making:
                self.drawn.append(SYSTEM)
            return original(*arguments)

        return urandom

    def _made(self, original: Callable[..., np.random.Generator]) -> Callable[..., np.random.Generator]:
        def default_rng(seed: Any = None) -> np.random.Generator:
            if seed is None:
                self.drawn.append(MADE)
            self._making = True  # its seed is the operating system's
            try:
                return original(seed)
            finally:
                self._making = False

        return default_rng

    def _clock(self, name: str, original: Callable[[], Any]) -> Callable[[], Any]:
        def read() -> Any:
            if not sys._getframe(1).f_code.co_filename.startswith(_NOT_THE_PROGRAM):
                self.clocks.append(f"time.{name}")
            return original()

        return read


def seen_to_draw(run: Callable[[], RandomOperations], seeded: bool) -> Sequence[str]:
    """What is seen to draw in the run of some steps: with numbers that seeds decide, or with others."""
    unseeded = Unseeded()
    with unseeded.watching():
        operations = run()
    return operations.names if seeded else (*operations.own, *unseeded.names)


def _states() -> list[tuple[Any, str, str]]:
    """(generator, its name, its state) of all that programs have made for themselves."""
    # By type: an instance may answer isinstance() with whatever its __class__ says, and do anything for it.
    names, found = dict[type, str](), []
    for one in gc.get_objects():
        kind = type(one)
        if kind not in names:
            names[kind] = next((name for own, name in OWN.items() if issubclass(kind, own)), "")
        if names[kind] and kind is not random.SystemRandom and id(one) not in _SHARED:
            found.append((one, names[kind], _state(one)))
    return found


def _state(generator: Any) -> str:
    if isinstance(generator, random.Random):
        return repr(generator.getstate())
    if isinstance(generator, np.random.RandomState):
        return repr([str(np.asarray(part).tolist()) for part in generator.get_state(legacy=True)])
    return repr(generator.bit_generator.state)
