"""Looking at torch's loaders and samplers: which epochs they were told, and what they draw for themselves."""

import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, final
from unittest.mock import patch

import torch
from torch.utils.data import DistributedSampler, RandomSampler, dataloader


@final
@dataclass
class LoaderWatch:
    """What loaders have done since `reset`.

    Attributes:
        repeated: epochs that a shuffling DistributedSampler has begun once more, in the very order of before.
    """

    repeated: list[int] = field(default_factory=list)
    _begun: list[tuple[Any, tuple[int, ...]]] = field(default_factory=list)
    _draws: dict[int, int] = field(default_factory=dict)

    def reset(self) -> None:
        """Forget everything."""
        self.repeated, self._begun, self._draws = [], [], {}

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
            yield

    def _noting_epochs(self) -> Callable[[Any], Iterator[Any]]:
        original = DistributedSampler.__iter__

        def iterate(sampler: Any) -> Iterator[Any]:
            # The order follows from these alone, also where the sampler is made anew for every epoch.
            order = sampler.epoch, sampler.seed, sampler.rank, sampler.num_replicas
            if sampler.shuffle:
                if any(dataset is sampler.dataset and order == known for dataset, known in self._begun):
                    self.repeated.append(sampler.epoch)
                self._begun.append((sampler.dataset, order))
            return original(sampler)

        return iterate

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
