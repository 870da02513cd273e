"""allranks.data.Sampler: DistributedSampler's place in a loop that allranks does not run, without its faults."""

from collections.abc import Iterator, Mapping, Sized
from typing import Any, Final

import numpy as np
import torch.distributed as dist
import torch.utils.data

from allranks.data.permutation import permute
from allranks.data.random_keys import epoch_key
from allranks.errors import CheckpointError, DataError, LayoutError

_BLOCK: Final = 4096


class Sampler(torch.utils.data.Sampler[int]):
    """The dataset indices of one of `num_replicas` processes, for torch's DataLoader; the arguments are
    DistributedSampler's.

    What differs from DistributedSampler:

    - No sample comes twice. It pads with repeated samples until all processes have equally many, which counts these
      twice. Here the processes' lengths differ by at most one; where they have to be equal (DDP in a plain loop hangs
      otherwise) use `drop_last=True`, which leaves out at most num_replicas - 1 samples, other ones in every epoch.
    - Every epoch has a new order, also without `set_epoch`. With it the epoch is the one that was set, as before.
    - `state_dict()` and `load_state_dict()` resume within an epoch, also with another num_replicas: what was not seen
      comes, once.
    - The order takes no memory, starts at once, and is that of allranks' own DataStream under the same seed.

    Args:
        dataset: anything with a length.
        num_replicas, rank: default to torch.distributed's, where it is initialised, else to 1 and 0.
        shuffle: a new order every epoch; False: the dataset's own.
        seed: of the order; the same on every process.
        drop_last: all processes get equally many samples, at most num_replicas - 1 are left out.

    Raises:
        DataError: an empty dataset. LayoutError: a rank that is not in 0..num_replicas-1.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        joined = dist.is_available() and dist.is_initialized()
        self.num_replicas = num_replicas if num_replicas is not None else dist.get_world_size() if joined else 1
        self.rank = rank if rank is not None else dist.get_rank() if joined else 0
        if not 0 <= self.rank < self.num_replicas:
            raise LayoutError(f"rank({self.rank}) is not in 0 .. num_replicas({self.num_replicas}) - 1")
        self.dataset, self.shuffle, self.seed, self.drop_last = dataset, shuffle, seed, drop_last
        self._num_samples = len(dataset)
        if self._num_samples == 0:
            raise DataError(f"{type(dataset).__name__} is empty: there is nothing to sample")
        self._epoch = 0  # of the pass that runs, or of the next one where none does
        self._start = 0  # samples of that epoch that all processes together had seen before the pass
        self._yielded = 0  # by this process in the pass
        self._running = False
        self._over: tuple[int, int] | None = None  # epoch and start of the pass that ended last, until another begins

    def __len__(self) -> int:
        """Samples of this process in a whole epoch."""
        return len(self._mine(0))

    def __iter__(self) -> Iterator[int]:
        """This process's indices: the rest of a resumed epoch, else a whole one; given up and begun again: the next."""
        if self._running:
            self.set_epoch(self._epoch + 1)
        self._running, self._over = True, None
        return self._indices(self._epoch, self._start)

    def set_epoch(self, epoch: int) -> None:
        """The next pass is the whole of `epoch`; after `load_state_dict` the same epoch goes on where it stood."""
        self._over = None
        if epoch != self._epoch or self._running:
            self._move(epoch, 0)

    def state_dict(self, consumed: int | None = None) -> dict[str, int]:
        """`{"epoch", "position"}`, position counting the samples of the epoch that all processes have seen.

        `consumed`: samples that this process's loop has taken in this pass, which is the one that began last, until
        another begins or `set_epoch` chooses one. Give it where the DataLoader has workers, which ask for samples ahead
        of the loop, in its last batches for all that are left; without it what was yielded counts. Save after steps in
        which every process took equally many.
        """
        if consumed is None:
            return self._state(self._epoch, self._start + self._yielded * self.num_replicas)
        epoch, start = self._over or (self._epoch, self._start)
        return self._state(epoch, start + consumed * self.num_replicas)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next pass is what the saved epoch had left. Raises CheckpointError for what is no such state."""
        epoch, position = state.get("epoch"), state.get("position")
        if not isinstance(epoch, int) or not isinstance(position, int) or position < 0:
            raise CheckpointError(
                f"the sampler's state is {dict(state)!r}, but it has to be {{'epoch': int, 'position': int}}"
            )
        self._move(*self._state(epoch, position).values())

    def _move(self, epoch: int, start: int) -> None:
        self._epoch, self._start, self._yielded, self._running, self._over = epoch, start, 0, False, None

    def _state(self, epoch: int, position: int) -> dict[str, int]:
        """The place in the order, the end of an epoch being the beginning of the next."""
        over = position >= self._end(position)
        return {"epoch": epoch + 1, "position": 0} if over else {"epoch": epoch, "position": position}

    def _end(self, start: int) -> int:
        left = self._num_samples - start
        return self._num_samples - left % self.num_replicas if self.drop_last else self._num_samples

    def _mine(self, start: int) -> range:
        return range(start + self.rank, self._end(start), self.num_replicas)

    def _indices(self, epoch: int, start: int) -> Iterator[int]:
        mine, key = self._mine(start), epoch_key(self.seed, epoch)
        for block in range(0, len(mine), _BLOCK):
            positions = np.array(mine[block : block + _BLOCK], dtype=np.int64)
            indices = permute(self._num_samples, key, positions) if self.shuffle else positions
            for index in indices.tolist():
                self._yielded += 1
                yield index
        if self._epoch == epoch:
            self._move(epoch + 1, 0)
            self._over = (epoch, start)
