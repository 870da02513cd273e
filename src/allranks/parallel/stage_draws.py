"""Random numbers under a pipeline (law 6): alike between the modules of a model, each stage's own inside of them.

Every stage runs what a forward does between its modules. A mask that is drawn there, the noise of a diffusion model or
whether a layer is skipped has to be the same on all of them, whatever their modules draw. So these draw from another
stream: the generators of torch, python and numpy change places around each call of a module that is computed, and
between modules they go on as those of one device do whose modules draw nothing.

Where the modules' stream stands is in a context variable, so that what a model checkpoints draws again what it drew.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from allranks.parallel.plain_generators import PlainGenerators
from allranks.seeds import part_key, seed_plain


@dataclass(frozen=True, slots=True)
class _States:
    """Where the generators stand: torch's, and the others."""

    torchs: tuple[torch.Tensor, ...]
    plain: PlainGenerators


@dataclass(frozen=True, slots=True)
class _Stream:
    """What the modules of a stage draw from in one forward.

    Attributes:
        states: of the generators after those that have run; None before the first.
        inside: whether a module runs.
    """

    states: _States | None = None
    inside: bool = False


_STREAM: ContextVar[_Stream] = ContextVar("stream")


@contextmanager
def drawing_alike() -> Iterator[None]:
    """Inside is the forward of a stage; all generators stand at the same numbers on all stages."""
    before = _STREAM.set(_Stream())
    try:
        yield
    finally:
        _STREAM.reset(before)


@contextmanager
def drawing_apart(stage: int) -> Iterator[None]:
    """Inside a module of the forward runs; nothing changes inside of another."""
    stream = _STREAM.get()
    if stream.inside:
        yield
        return
    between = _states()
    if stream.states is None:
        # From where torch's began: where sequences are cut, too, each part of them has another seed.
        _seed(stage_seed(torch.default_generator.initial_seed(), stage))
    else:
        _put(stream.states)
    _STREAM.set(_Stream(stream.states, inside=True))
    try:
        yield
    finally:
        _STREAM.set(_Stream(_states()))
        _put(between)


@contextmanager
def drawing_aside() -> Iterator[None]:
    """What is drawn inside, where a module of another stage is asked for its shapes, is no draw of anybody's."""
    before = _states()
    try:
        yield
    finally:
        _put(before)


def stage_seed(key: int, stage: int) -> int:
    """With what the modules of a stage are seeded in a forward that is seeded with `key`; another one than that."""
    return part_key(key, stage + 1)


def _generators() -> list[torch.Generator]:
    found = [torch.default_generator]
    if torch.cuda.is_initialized():
        found.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return found


def _states() -> _States:
    return _States(tuple(generator.get_state() for generator in _generators()), PlainGenerators())


def _put(states: _States) -> None:
    # A module may be the first to use CUDA.
    for generator, state in zip(_generators(), states.torchs, strict=False):
        generator.set_state(state)
    states.plain.put()


def _seed(key: int) -> None:
    for generator in _generators():
        generator.manual_seed(key)
    seed_plain(key)
