"""Randomness as a function (law 6): every generator is seeded from where it stands, and nothing has to be saved."""

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from allranks.seeds import seed_plain

_WORD: Final = (1 << 64) - 1
_POSITIVE: Final = (1 << 63) - 1
_last_key = 0
_devices: tuple[int, ...] = ()  # where this process uses several CUDA devices: those, its home first
# One tag for each use, so that no two uses ever share a stream of numbers.
_STEP_TAG, _ITEM_TAG, _EPOCH_TAG, _EVALUATION_TAG, _COLLATE_TAG = 0x5354, 0x4954, 0x4550, 0x4556, 0x434F
_DEVICE_TAG = 0x4445


def mix(*values: int) -> int:
    """A key in 0 .. 2**63 - 1 from the values in their order: splitmix64's finalizer, the same on every platform."""
    word: int = _absorb_all(0, values)
    return word & _POSITIVE


def _absorb_all(word: Any, values: Iterable[Any]) -> Any:
    """Mixes the values into the word one after another; a value that is a uint64 array makes the word one too."""
    for value in values:
        word = (((word * 0x2545F4914F6CDD1D + 0x9E3779B97F4A7C15) & _WORD) + value) & _WORD
        word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
        word = word ^ (word >> 31)
    return word


def random_key(seed: int, step: int, micro_step: int, dp_rank: int, stage: int = 0) -> int:
    """The key under which a rank runs a micro-step (dropout and the like)."""
    return mix(_STEP_TAG, seed, step, micro_step, dp_rank, stage)


def random_keys(seed: int, first_step: int, shape: tuple[int, int], dp_rank: int) -> list[list[int]]:
    """`random_key` of `shape` = (steps, micro-steps) at once, from `first_step` on: a tenth of the time for each."""
    steps = np.arange(first_step, first_step + shape[0], dtype=np.uint64)[:, None]
    micro_steps = np.arange(shape[1], dtype=np.uint64)
    word = _absorb_all(_absorb_all(0, (_STEP_TAG, seed)), (steps, micro_steps, dp_rank, 0))
    keys: list[list[int]] = (word & _POSITIVE).tolist()
    return keys


def item_key(seed: int, epoch: int, position: int) -> int:
    """The key under which a dataset makes the item at a position: no rank, no worker and no world size in it."""
    return mix(_ITEM_TAG, seed, epoch, position)


def collate_key(seed: int, position: int) -> int:
    """The key under which the samples from a position on are collated; positions count on over the epochs."""
    return mix(_COLLATE_TAG, seed, position)


def epoch_key(seed: int, epoch: int) -> int:
    """The key of an epoch's order of samples."""
    return mix(_EPOCH_TAG, seed, epoch)


def evaluation_seed(seed: int) -> int:
    """The seed of evaluation: fixed for a run, so that every evaluation sees the same numbers."""
    return mix(_EVALUATION_TAG, seed)


def device_key(key: int, place: int) -> int:
    """What `seed_all(key)` seeds the CUDA device with that stands at `place` among `cuda_devices()`.

    Each draws other numbers: its replica sees other samples, or it has other layers of the same model.
    """
    return mix(_DEVICE_TAG, key, place) if place else key


def note_devices(indices: Sequence[int]) -> None:
    """Say once which CUDA devices this process uses, its home first; initialises none of them."""
    global _devices  # noqa: PLW0603 they are the process's
    # One alone is the current one, whatever its number.
    _devices = tuple(indices) if len(indices) > 1 else ()


def cuda_devices() -> tuple[int, ...]:
    """The CUDA devices whose generators `seed_all` seeds, by number, the home first; none where CUDA is not in use."""
    if not torch.cuda.is_initialized():
        return ()
    return _devices or (torch.cuda.current_device(),)


def seed_all(key: int) -> None:
    """Seeds the global generators of python, numpy and torch (CPU, and `cuda_devices()`).

    Takes about 7 us: torch's generators are seeded one by one, because `torch.manual_seed` visits every device type and
    costs 80 us. Each CUDA device beside the first adds 2 us.
    """
    global _last_key  # noqa: PLW0603 the generators are the process's, and so is what they were seeded with
    _last_key = key
    seed_plain(key)
    torch.default_generator.manual_seed(key)
    for place, index in enumerate(cuda_devices()):
        torch.cuda.default_generators[index].manual_seed(device_key(key, place))


def last_key() -> int:
    """The key with which `seed_all` was last called in this process."""
    return _last_key


@contextmanager
def generators_kept(module: nn.Module | None = None) -> Iterator[None]:
    """What is drawn inside, from the generators that `seed_all` seeds, is no draw of the caller's; nor is a key there.

    Args:
        module: those of the devices on which its parameters are, too.
    """
    global _last_key  # noqa: PLW0603 as in seed_all
    plain, arrays, key = random.getstate(), np.random.get_state(), _last_key
    devices = set(cuda_devices())
    parameters = () if module is None else module.parameters()
    devices |= {parameter.device.index for parameter in parameters if parameter.is_cuda}
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(plain)
        np.random.set_state(arrays)
        _last_key = key
