"""Reading datasets that can only be iterated over, without losing the meaning of a position.

order="global": every rank reads every sample and keeps its own, so the order and the end are exact.
order="sharded": every rank has an iterator of its own; each step takes its share from it, and fillers once it has
ended.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from allranks.data.cut import Cut
from allranks.data.micro_step import MicroPlan, StepPlan
from allranks.data.random_keys import item_key, random_key, seed_all
from allranks.errors import DataError
from allranks.left_out import LeftOut

_END: Final = object()

PlannedItems = tuple[StepPlan, list[list[Any]]]


@dataclass(frozen=True, slots=True)
class Share:
    """Whose part of a step it is: dp rank `dp_rank`'s under `cut`, with random keys from `seed`, without `left_out`."""

    cut: Cut
    dp_rank: int
    seed: int
    left_out: LeftOut = field(default_factory=LeftOut)


class Pass:
    """One sample after another out of an iterable dataset, over `epochs` passes end to end (None: no end).

    `draw_seed`: seeds the generators before each item from (draw_seed, epoch, position), so that a dataset that
    shuffles or augments gives every rank, and a resumed run, the same samples; a pass begins, up to its first item,
    under (draw_seed, epoch, 0) wherever it lies, because ranks that read a shard each have to shuffle what they share
    out alike. None: the dataset draws nothing.
    `length`: samples of every pass where it is known; another number of them raises DataError, because positions are
    counted with it.
    """

    def __init__(self, dataset: Any, epochs: int | None, draw_seed: int | None, length: int | None = None) -> None:
        self.dataset, self.epochs, self.draw_seed, self.length = dataset, epochs, draw_seed, length
        self.epoch, self.number = 0, -1  # of the item drawn last; number counts from 0 in every epoch
        self._iterator: Iterator[Any] | None = None

    def draw(self, position: int) -> Any:
        """The next sample, whose global position is `position`; `_END` after the last epoch."""
        while self.epochs is None or self.epoch < self.epochs:
            if self._iterator is None:
                self._iterator = self._begin()
            # What a generator does before its first item happens here.
            self._seed(0 if self.number < 0 else position)
            try:
                item = next(self._iterator)
            except StopIteration:
                self._end_epoch()
                continue
            except Exception as error:
                where = f"sample {self.number + 1} of epoch {self.epoch} (position {position})"
                error.add_note(f"allranks: while reading {where} of {type(self.dataset).__name__}")
                raise
            self.number += 1
            return item
        return _END

    def skip(self, positions: Iterable[int]) -> None:
        """Reads over the samples at `positions`."""
        for position in positions:
            if self.draw(position) is _END:
                return

    def skip_to(self, position: int) -> None:
        """Moves to global `position`: over whole epochs at once where the length is known, over the rest by reading."""
        self.epoch = position // self.length if self.length else 0
        self.skip(range(self.epoch * (self.length or 0), position))

    def _begin(self) -> Iterator[Any]:
        set_epoch = getattr(self.dataset, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(self.epoch)
        self._seed(0)
        return iter(self.dataset)

    def _end_epoch(self) -> None:
        name, count = type(self.dataset).__name__, self.number + 1
        if count == 0:
            raise DataError(
                f"{name} yields no sample in epoch {self.epoch}: "
                "it is empty on this rank, or can be iterated over only once"
            )
        if self.length not in (None, count):
            raise DataError(
                f"len({name}) is {self.length}, but epoch {self.epoch} has {count} samples: "
                "correct its __len__ or remove it"
            )
        self.epoch, self.number, self._iterator = self.epoch + 1, -1, None

    def _seed(self, position: int) -> None:
        if self.draw_seed is not None:
            seed_all(item_key(self.draw_seed, self.epoch, position))


def read_global(source: Pass, share: Share, position: int, step: int) -> Iterator[PlannedItems]:
    """Every sample is read and this rank's are kept, from `position` on; a step is held whole, because only its end
    tells its cut.
    """
    source.skip_to(position)
    cut = share.cut
    while True:
        fed = share.left_out.beyond(position)
        source.skip(range(position, fed))
        position, left_out = fed, share.left_out.before(fed)
        items, numbers = _draw(source, range(position, position + cut.global_batch))
        if not items:
            return
        plans: list[MicroPlan] = []
        kept: list[list[Any]] = []
        for offset, length in cut.spans(len(items), share.dp_rank):
            end = offset + max(1, length)
            plans.append(_micro_plan(share, step, len(plans), position + offset, numbers[offset : offset + length]))
            kept.append(items[offset:end])
        yield StepPlan(step, position, len(items), tuple(plans), left_out=left_out), kept
        position, step = position + len(items), step + 1


def read_sharded(source: Pass, share: Share, position: int, step: int) -> Iterator[PlannedItems]:
    """This rank's share of each step out of its own iterator; after its end fillers without end, for other ranks may
    have more.

    A sample's number is its place in this rank's shard, interleaved with the other ranks', so that no two are alike.
    """
    cut, dp_rank = share.cut, share.dp_rank
    spans = cut.spans(cut.global_batch, dp_rank)
    offsets = [offset + place for offset, length in spans for place in range(length)]
    source.skip(start + offset for start in range(0, position, cut.global_batch) for offset in offsets)
    filler: list[Any] = []
    while True:
        items, places = _draw(source, [position + offset for offset in offsets])
        exhausted = len(items) < len(offsets)
        # A rank resumed after its shard's end has nothing to repeat yet: it looks at its first sample once more.
        filler = items[:1] or filler or [Pass(source.dataset, None, source.draw_seed).draw(0)]
        numbers = [place * cut.num_ranks + dp_rank for place in places]
        plans: list[MicroPlan] = []
        kept: list[list[Any]] = []
        for offset, length in spans:
            plans.append(_micro_plan(share, step, len(plans), position + offset, numbers[:length]))
            kept.append(items[:length] or filler)
            items, numbers = items[length:], numbers[length:]
        yield StepPlan(step, position, cut.global_batch, tuple(plans), exhausted), kept
        position, step = position + cut.global_batch, step + 1


def _draw(source: Pass, positions: Iterable[int]) -> tuple[list[Any], list[int]]:
    """The items at `positions` and their numbers in their epochs; fewer where the last epoch ends."""
    items: list[Any] = []
    numbers: list[int] = []
    for position in positions:
        item = source.draw(position)
        if item is _END:
            break
        items.append(item)
        numbers.append(source.number)
    return items, numbers


def _micro_plan(share: Share, step: int, micro_step: int, first: int, numbers: list[int]) -> MicroPlan:
    return MicroPlan(
        first=first,
        indices=numbers,
        weight=1 if numbers else 0,
        random_key=random_key(share.seed, step, micro_step, share.dp_rank),
        positions=np.arange(first, first + len(numbers), dtype=np.int64),
        samples=np.array(numbers, dtype=np.int64),
    )
