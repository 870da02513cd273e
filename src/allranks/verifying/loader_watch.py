"""Looking at torch's loaders and samplers: which epochs they were told, and what they draw for themselves."""

import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, final
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import DistributedSampler, RandomSampler, dataloader


@final
@dataclass
class _Epoch:
    """One that a shuffling DistributedSampler has begun.

    Attributes:
        order: what its order follows from: epoch, seed, rank, replicas.
        used: whether steps were made of it; not where a program has taken a look at one batch.
    """

    dataset: Any
    order: tuple[int, ...]
    used: bool = False


@final
@dataclass
class LoaderWatch:
    """What loaders have done since `reset`."""

    _epochs: list[_Epoch] = field(default_factory=list)
    _giving: dict[int, _Epoch] = field(default_factory=dict)
    _draws: dict[int, int] = field(default_factory=dict)
    _stepped: bool = False
    _reading: Any = None
    _read: "WeakKeyDictionary[Any, _Epoch]" = field(default_factory=WeakKeyDictionary)

    def reset(self) -> None:
        """Forget everything."""
        self._epochs, self._giving, self._draws, self._stepped = [], {}, {}, False
        self._read.clear()

    @property
    def repeated(self) -> list[int]:
        """Epochs of a shuffling DistributedSampler that steps were made of once more, in the very order of before."""
        used = [epoch for epoch in self._epochs if epoch.used]
        return [
            one.order[0]
            for place, one in enumerate(used)
            if any(one.dataset is other.dataset and one.order == other.order for other in used[:place])
        ]

    def note_step(self) -> None:
        """A step is made of what was given: of each dataset by the epoch that has given last."""
        for epoch in self._giving.values():
            epoch.used = True
        self._giving.clear()
        self._stepped = True

    def is_own_draw(self, before: int, after: int) -> bool:
        """Whether loaders alone have moved torch's generator between two digests of its state.

        A loader draws a seed for its workers, and a sampler one for its order: no sample is made of them here.
        """
        while before != after and before in self._draws:
            before = self._draws.pop(before)
        return before == after

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, torch's loaders and samplers tell."""
        with ExitStack() as stack:
            stack.enter_context(patch.object(DistributedSampler, "__iter__", self._noting_epochs()))
            stack.enter_context(patch.object(RandomSampler, "__iter__", self._drawing_first(RandomSampler.__iter__)))
            base: Any = dataloader._BaseDataLoaderIter
            stack.enter_context(patch.object(base, "__init__", self._drawing(base.__init__)))
            stack.enter_context(patch.object(base, "_next_index", self._noting_reader(base._next_index)))
            stack.enter_context(patch.object(base, "__next__", self._giving_one(base.__next__)))
            yield

    def _noting_epochs(self) -> Callable[[Any], Iterator[Any]]:
        original = DistributedSampler.__iter__

        def iterate(sampler: Any) -> Iterator[Any]:
            if not sampler.shuffle:
                return original(sampler)
            # The order follows from these alone, also where the sampler is made anew for every epoch.
            epoch = _Epoch(sampler.dataset, (sampler.epoch, sampler.seed, sampler.rank, sampler.num_replicas))
            self._epochs.append(epoch)
            return self._given(epoch, original(sampler))

        return iterate

    def _given(self, epoch: _Epoch, order: Iterator[Any]) -> Iterator[Any]:
        for index in order:
            if self._reading is None:
                self._giving[id(epoch.dataset)] = epoch
            else:
                self._read[self._reading] = epoch
            yield index

    def _noting_reader(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """With workers a loader reads far ahead: it gives of an epoch only when it gives a batch."""

        def reading(iterator: Any) -> Any:
            self._reading = iterator
            try:
                return original(iterator)
            finally:
                self._reading = None

        return reading

    def _giving_one(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Where all batches are made before the first step: a loader that was read to its end was no look."""

        def following(iterator: Any) -> Any:
            try:
                batch = original(iterator)
                if iterator in self._read:
                    epoch = self._read[iterator]
                    self._giving[id(epoch.dataset)] = epoch
                return batch
            except StopIteration:
                begun = [epoch for epoch in self._epochs if epoch.dataset is iterator._dataset]
                if begun and not self._stepped:
                    begun[-1].used = True
                raise

        return following

    def _drawing(self, original: Callable[..., None]) -> Callable[..., None]:
        def begin(iterator: Any, loader: Any) -> None:
            before = torch_digest()
            original(iterator, loader)
            self._draws[before] = torch_digest()

        return begin

    def _drawing_first(self, original: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
        def iterate(sampler: Any) -> Iterator[Any]:
            before, order = torch_digest(), original(sampler)
            first = list(zip(range(1), order, strict=False))
            self._draws[before] = torch_digest()
            yield from (index for _, index in first)
            yield from order

        return iterate


def torch_digest(generator: torch.Generator | None = None) -> int:
    """A digest of the state of a generator; None: of the one that torch's operations share."""
    state = torch.get_rng_state() if generator is None else generator.get_state()
    return zlib.crc32(state.numpy().tobytes())
