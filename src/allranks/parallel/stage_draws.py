"""Random numbers under a pipeline (law 6): alike between the modules of a model, each stage's own inside of them.

Every stage runs what a forward does between its modules. A mask that is drawn there, the noise of a diffusion model or
whether a layer is skipped has to be the same on all of them, whatever their modules draw. So these draw from another
stream: torch's generators change places around each call of a module, which costs a microsecond, and between modules
they go on as those of one device do whose modules draw nothing. Python's and numpy's cost more to put aside
than to seed, and are seeded on both sides by a number that python's has drawn.

Where the modules' stream stands is in a context variable, so that what a model checkpoints draws again what it drew.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import numpy as np
import torch

_GOLDEN = 0x9E3779B97F4A7C15
_POSITIVE = (1 << 63) - 1
_WORD = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class _Stream:
    """What the modules of a stage draw from in one forward.

    Attributes:
        states: of torch's generators after those that have run; () before the first.
        inside: whether a module runs.
    """

    states: tuple[torch.Tensor, ...] = ()
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
    """Inside a module of the forward runs, or stands for one of another stage; nothing changes inside of another."""
    stream = _STREAM.get()
    if stream.inside:
        yield
        return
    between, key = _states(), random.getrandbits(62)
    if stream.states:
        _put(stream.states)
    else:
        # From where these began: where sequences are cut, too, each part of them has another seed.
        _seed(stage_seed(torch.default_generator.initial_seed(), stage))
    _seed_plain(stage_seed(key, stage))
    _STREAM.set(_Stream(stream.states, inside=True))
    try:
        yield
    finally:
        _STREAM.set(_Stream(_states()))
        _put(between)
        _seed_plain(key)


def stage_seed(key: int, stage: int) -> int:
    """With what the modules of a stage are seeded in a forward that is seeded with `key`; another one than that."""
    return (key ^ ((stage + 1) * _GOLDEN)) & _POSITIVE


def _generators() -> list[torch.Generator]:
    found = [torch.default_generator]
    if torch.cuda.is_initialized():
        found.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return found


def _states() -> tuple[torch.Tensor, ...]:
    return tuple(generator.get_state() for generator in _generators())


def _put(states: Sequence[torch.Tensor]) -> None:
    # A module may be the first to use CUDA.
    for generator, state in zip(_generators(), states, strict=False):
        generator.set_state(state)


def _seed(key: int) -> None:
    for generator in _generators():
        generator.manual_seed(key)


def _seed_plain(key: int) -> None:
    random.seed(key)
    np.random.seed((key ^ (key >> 32)) & _WORD)
