"""The global order of samples and a position in it.

The sample at position p is a pure function of (seed, epoch, p); a rank's part of a step one of (step, Cut, dp_rank). So
a stream has no state but `position`, and a run resumed at another world size continues with the very next sample.
"""

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch.utils.data

from allranks.data.cut import Cut, Span
from allranks.data.iterable import Pass, Share, read_global, read_sharded
from allranks.data.micro_step import MicroPlan, StepBatch, StepPlan
from allranks.data.permutation import IntArray, permute
from allranks.data.random_keys import epoch_key, item_key, random_key, random_keys, seed_all
from allranks.errors import CheckpointError, ConfigError, DataError
from allranks.left_out import LeftOut

__all__ = ["DataStream", "Order", "declared_order", "item_key", "random_key", "seed_all"]

Order = Literal["map", "global", "sharded"]

ALL_FED = LeftOut()

# Samples planned at once: enough that permuting them costs well under a microsecond each, few enough for a short first
# step.
_BLOCK = 4096


class DataStream:
    """The samples of one dp rank, step by step, from `position` on; never two ranks the same, never one left out.

    Args:
        dataset: map-style (`__getitem__`, `__len__`), or iterable with an `order` attribute: "global" (every rank reads
            all and keeps its positions: exact) or "sharded" (the dataset shards itself: coverage only).
        cut: how a step is cut.
        dp_rank: this rank's coordinate, 0 .. cut.num_ranks - 1.
        seed: of the order and of every random key.
        epochs: the end; the only short batch is its last one. None: no end.
        steps: the end in steps from the beginning of the run, if that comes first. None: no end.
        shuffle: a new order every epoch; False: the dataset's own (iterables always keep their own).
        allow_small: whether a dataset may be smaller than one global batch (evaluation).
        left_out: positions that are never fed; a range begins where a step would.

    Raises:
        DataError: no dataset, an empty one, one smaller than a batch, an undeclared order, or a DataLoader in its
        place.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        cut: Cut,
        dp_rank: int = 0,
        seed: int = 0,
        epochs: int | None = None,
        steps: int | None = None,
        shuffle: bool = True,
        allow_small: bool = False,
        left_out: LeftOut = ALL_FED,
    ) -> None:
        self.order: Order = declared_order(dataset)
        self.dataset, self.cut, self.dp_rank, self.seed = dataset, cut, dp_rank, seed
        self.epochs, self.steps_limit, self.shuffle = epochs, steps, shuffle
        self.left_out = left_out
        self.position = left_out.beyond(0)
        self._resumed = (0, 0)  # (steps, samples fed) where this run began: see continue_at
        self.num_samples: int | None = None
        # The length of a dataset that shards itself could be its part's or the whole's: nobody knows.
        if self.order == "map" or (self.order == "global" and _tells_length(dataset)):
            self.num_samples = checked_len(dataset, cut.global_batch, allow_small=allow_small)
        for name, value in (("epochs", epochs), ("steps", steps)):
            if value is not None and value < 0:
                raise ConfigError(f"train.{name}={value}, but it cannot be negative")
        if left_out.ranges and self.order == "sharded":
            raise DataError(
                f'data.skip={left_out}: {type(dataset).__name__} declares order="sharded", so that nobody knows which '
                'sample stands at which position: declare order="global", or leave samples out in the dataset'
            )

    def __repr__(self) -> str:
        return f"<DataStream {self.order} at {self.position}, rank {self.dp_rank} of {self.cut.num_ranks}>"

    @property
    def step(self) -> int:
        """Steps done since the beginning of the run."""
        steps, samples = self._resumed
        return steps + self._num_steps(self.seen - samples)

    @property
    def seen(self) -> int:
        """Samples fed since the beginning of the run: `position` without what was left out."""
        return self.position - self.left_out.before(self.position)

    def continue_at(self, step: int) -> None:
        """Count on from `step` steps done, which `position` alone does not tell: before it, global_batch may have been
        another, or the last batch of fewer epochs short.
        """
        self._resumed = step, self.seen

    @property
    def samples_total(self) -> int | None:
        """Samples of all epochs, or None where there is no end or the dataset's length is unknown."""
        return None if self.epochs is None or self.num_samples is None else self.epochs * self.num_samples

    @property
    def steps_per_epoch(self) -> float | None:
        """Steps in which an epoch passes; a fraction where it does not divide, for epochs run end to end. None:
        unknown.
        """
        return None if self.num_samples is None else self.num_samples / self.cut.global_batch

    @property
    def steps_total(self) -> int | None:
        """Steps of the whole run, those already done included; None where that is unknown or without end."""
        if self.samples_total is None:
            return self.steps_limit
        left = self.samples_total - self.left_out.before(self.samples_total) - self.seen
        total = self.step + self._num_steps(max(0, left))
        return total if self.steps_limit is None else min(total, self.steps_limit)

    @property
    def steps_in_full(self) -> int | None:
        """Steps of the whole run if nothing were left out; None where that is unknown or without end."""
        if self.samples_total is None:
            return self.steps_limit
        total = self._num_steps(self.samples_total)
        return total if self.steps_limit is None else min(total, self.steps_limit)

    def take(self, step: StepPlan | StepBatch) -> None:
        """Moves `position` past a step that was done. Planning and loading run ahead of it, so only the loop can say
        so.
        """
        assert step.position == self.position, f"a step at {step.position}, but the stream stands at {self.position}"
        self.position = self.left_out.beyond(self.position + step.size)

    def state_dict(self) -> dict[str, int]:
        """`{"position": samples consumed over the whole world}`: all that a resume needs, at any world size."""
        return {"position": self.position}

    def load_state_dict(self, state: object) -> None:
        """Continues after the samples that `state` says were consumed. Raises CheckpointError for anything else in
        it.
        """
        position = state.get("position") if isinstance(state, Mapping) and len(state) == 1 else None
        if type(position) is not int or position < 0:
            raise CheckpointError(
                f"the data stream's state is {state!r:.200}, but it has to be {{'position': samples consumed}}"
            )
        self.position = self.left_out.beyond(position)

    def samples_at(self, positions: IntArray) -> IntArray:
        """The dataset indices at global positions (map-style only): the one definition of the order."""
        assert self.num_samples is not None
        epochs = positions // self.num_samples
        within = positions - epochs * self.num_samples
        if not self.shuffle:
            return within
        samples = np.empty_like(positions)
        for epoch in np.unique(epochs).tolist():
            chosen = epochs == epoch
            samples[chosen] = permute(self.num_samples, epoch_key(self.seed, epoch), within[chosen])
        return samples

    def steps(self) -> Iterator[StepPlan]:
        """This rank's plans from `position` on (map-style only); runs ahead without moving `position`."""
        total, limit = self.samples_total, self.steps_limit
        position, step = self.position, self.step
        full = self.cut.global_batch
        self._check_ranges()
        while (total is None or position < total) and (limit is None or step < limit):
            size = full if total is None else min(full, total - position)
            ends = [end for end in (total, self.left_out.next_after(position)) if end is not None]
            spans = self.cut.spans(size, self.dp_rank)
            rows = max(1, _BLOCK // sum(max(1, length) for _, length in spans))
            if ends:
                rows = min(rows, max(1, (min(ends) - position) // full))
            if limit is not None:
                rows = min(rows, limit - step)
            yield from self._block(step, position, size, rows, spans)
            step, position = step + rows, self.left_out.beyond(position + rows * size)

    def read(self, draws: bool) -> Iterator[tuple[StepPlan, list[list[Any]]]]:
        """This rank's plans from `position` on, each with the items of its micro-steps (iterable only).

        `draws` seeds the generators before each item. Runs in the process that loads: it reads as it goes.
        """
        assert self.order != "map"
        self._check_ranges()
        source = Pass(self.dataset, self.epochs, self.seed if draws else None, self.num_samples)
        share, step = Share(self.cut, self.dp_rank, self.seed, self.left_out), self.step
        reader = read_global if self.order == "global" else read_sharded
        left = None if self.steps_limit is None else max(0, self.steps_limit - step)
        return islice(reader(source, share, self.position, step), left)

    def _check_ranges(self) -> None:
        """Raises ConfigError where a step would be cut short by a range that begins in its middle."""
        first = self.left_out.misplaced(self.position, self.cut.global_batch)
        if first is not None:
            raise ConfigError(
                f"data.skip={self.left_out}: position {first} lies in the middle of a step of "
                f"{self.cut.global_batch} samples (from position {self.position} on): begin ranges where steps do"
            )

    def _num_steps(self, samples: int) -> int:
        return -(-samples // self.cut.global_batch)

    def _block(self, step: int, position: int, size: int, rows: int, spans: list[Span]) -> Iterator[StepPlan]:
        """`rows` steps at once: permuting a few samples costs as much as permuting thousands."""
        columns = np.concatenate([np.arange(offset, offset + max(1, length)) for offset, length in spans])
        positions = position + size * np.arange(rows)[:, None] + columns
        samples = self.samples_at(positions.ravel()).reshape(positions.shape)
        ends = np.cumsum([max(1, length) for _, length in spans]).tolist()
        parts = list(zip([0, *ends[:-1]], ends, [length for _, length in spans], strict=True))
        keys = random_keys(self.seed, step, (rows, len(spans)), self.dp_rank)
        left_out = self.left_out.before(position)
        for row, indices in enumerate(samples.tolist()):
            firsts = positions[row]
            plans = tuple(
                MicroPlan(
                    first=int(firsts[start]),
                    indices=indices[start:end],
                    weight=1 if length else 0,
                    random_key=keys[row][micro_step],
                    positions=firsts[start : start + length],
                    samples=samples[row, start : start + length],
                )
                for micro_step, (start, end, length) in enumerate(parts)
            )
            yield StepPlan(step + row, position + row * size, size, plans, left_out=left_out)


def draws(dataset: object) -> bool:
    """Whether loading an item may draw random numbers; built-in sources declare that they do not."""
    return bool(getattr(dataset, "draws", True))


def declared_order(dataset: Any) -> Order:
    """ "map", or what an iterable declares in its `order`. Raises DataError, with the remedy, for what cannot be
    ordered.
    """
    name = type(dataset).__name__
    if dataset is None:
        raise DataError(
            'dataset("train") returned None: return a map-style dataset, or an iterable one with an `order`'
        )
    if isinstance(dataset, torch.utils.data.DataLoader):
        raise DataError(
            "dataset(...) returned a torch DataLoader, which batches and shards by itself, so that the order would "
            "depend on the number of processes: return its .dataset "
            "(train.global_batch makes the batches, data.workers loads, Task.collate collates)"
        )
    order = getattr(dataset, "order", None)
    is_map = callable(getattr(dataset, "__getitem__", None)) and not isinstance(
        dataset, torch.utils.data.IterableDataset
    )
    if is_map and callable(getattr(dataset, "__len__", None)):
        return "map"
    if not callable(getattr(dataset, "__iter__", None)):
        raise DataError(f"{name} is no dataset: it needs __getitem__ and __len__, or __iter__ and an `order`")
    if order == "global":
        return "global"
    if order == "sharded":
        return "sharded"
    raise DataError(
        f'{name} is iterable and declares order={order!r}: set `order = "global"` on it if every process may read all '
        'of it (exact: each keeps its own samples), or `order = "sharded"` if it gives each process a part of its own '
        "(coverage only)"
    )


def _tells_length(dataset: Any) -> bool:
    """Whether an iterable dataset has a `__len__` that can say it: torch's ChainDataset has one for parts that have."""
    if not callable(getattr(dataset, "__len__", None)):
        return False
    try:
        len(dataset)
    except (TypeError, NotImplementedError):  # as for Python's own list(dataset)
        return False
    return True


def checked_len(dataset: Any, global_batch: int, *, allow_small: bool = False) -> int:
    """Samples of a map-style dataset. Raises DataError where there is none, or not one global batch of them."""
    size, name = len(dataset), type(dataset).__name__
    if size == 0:
        needed = "" if allow_small else f", and train.global_batch is {global_batch}"
        raise DataError(f"{name} is empty: it has 0 samples{needed}")
    if size < global_batch and not allow_small:
        raise DataError(
            f"{name} has {size} samples, fewer than train.global_batch({global_batch}): "
            f"set train.global_batch={size} or less, or bring more data"
        )
    return size
