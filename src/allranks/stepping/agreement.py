"""No rank decides alone (law 11): everything that a step must agree on, in one small vector and one reduction.

The vector of step n carries the number of targets of step n+1, which the loader has counted one step ahead. It is
reduced asynchronously on a process group of its own; the training loop reads it at the start of the next step, and the
journal when it is there.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import final

import torch
import torch.distributed as dist

from allranks.parallel.path import differ, path_digest, wait_plainly

LEDGER_DIGITS = 4
DIGIT_BITS = 16
RANK_BITS = 26
"""Two counts of ranks share one number: both are exact up to 2**26 ranks."""
SKIPPED = 5
"""Where in the vector stands what may be known to the device alone, besides the loss, which comes first."""


@dataclass(frozen=True, slots=True)
class Saving:
    """Where one rank stands with the checkpoint that is written beside the training, if there is one.

    Attributes:
        step: the checkpoint's; every rank says this of the same one. None: there is none.
        written: its part is on the disk.
        committed: the checkpoint has its name; only the rank that commits knows.
        failed: it could not do its part.
    """

    step: int | None = None
    written: bool = False
    committed: bool = False
    failed: bool = False


NOTHING = Saving()


@dataclass(frozen=True, slots=True)
class Ballot:
    """What one rank brings to the agreement on a step.

    Attributes:
        loss: its sum of losses, float64, 0-dim, on the device.
        next_targets: its targets in the coming step.
        next_samples: its samples in the coming step (0 everywhere ends an epoch of self-sharding data).
        interrupt: whether it was asked to stop by Ctrl-C.
        terminate: whether it was asked to stop by the system.
        ledger: its 64-bit sum of hash(position, sample).
        path: the sharded units that its forwards have entered.
        wait: how to wait for the ranks, which may have parted.
        skipped: 1.0 where it left out the update of the step before, 0-dim; None: it did not.
        saving: where it stands with a checkpoint.
        pace: where it stands and with which settings, which all ranks must have alike (pace.py); "" where nobody asks.
        noticed: whether its sentinels have found something that the others have not heard of (sentinel.py).
        expired: whether the run's time is over (train.max_seconds), by its clock.
        due: whether a checkpoint is due (checkpoint.seconds), by its clock; said once for each.
    """

    loss: torch.Tensor
    next_targets: int
    next_samples: int
    interrupt: bool
    terminate: bool
    ledger: int
    path: tuple[str, ...] = ()
    wait: Callable[[dist.Work], object] = wait_plainly
    skipped: torch.Tensor | None = None
    saving: Saving = NOTHING
    pace: str = ""
    noticed: bool = False
    expired: bool = False
    due: bool = False


@dataclass(frozen=True, slots=True)
class Agreed:
    """The world's sums, on the host; `diverged`: the ranks' paths, or what else they tell of them, were not the same.

    Of `num_ranks` ranks `skipped` left out the update of the step before; of the checkpoint under way so many have
    `written` their part, `committed` it, or `failed`; the sentinels of `noticed` have found something; by the clocks of
    `expired` the run's time is over, by those of `due` a checkpoint is due.
    """

    loss: float
    next_targets: int
    next_samples: int
    interrupt: bool
    terminate: bool
    ledger: int
    diverged: bool = False
    skipped: int = 0
    num_ranks: int = 1
    written: int = 0
    committed: int = 0
    failed: int = 0
    noticed: int = 0
    expired: int = 0
    due: int = 0


class Pending:
    """An agreement on its way.

    Attributes:
        path: what this rank brought to it.
        saving: the step of the checkpoint that it tells of; None: of none.
        pace: likewise.
        stage: this rank's place along pp, with whose ranks its path is compared.

    Args:
        aside: the vector on its way to the host, where it is read from without a wait for what the device does behind.
    """

    def __init__(
        self,
        vector: torch.Tensor | None,
        work: dist.Work | None,
        agreed: Agreed | None = None,
        path: tuple[str, ...] = (),
        wait: Callable[[dist.Work], object] = wait_plainly,
        saving: int | None = None,
        pace: str = "",
        stage: int = 0,
        aside: "Aside | None" = None,
    ) -> None:
        assert vector is not None or agreed is not None
        self.path, self.saving, self.pace, self.stage = path, saving, pace, stage
        self._vector, self._aside = vector, aside
        self._work, self._wait = work, wait
        self._agreed = agreed

    @property
    def next_targets(self) -> torch.Tensor:
        """The coming step's targets over the world, a 0-dim float64 tensor on the device; waits on the stream only."""
        if self._vector is None:
            return torch.tensor(float(self.read().next_targets), dtype=torch.float64)
        if self._work is not None:
            self._wait(self._work)
        return self._vector[1]

    def read(self) -> Agreed:
        """The agreement on the host: the one declared synchronisation of a step (law 13)."""
        if self._agreed is None:
            assert self._vector is not None
            if self._aside is not None:
                self._agreed = _decode(self._aside.read())
                return self._agreed
            if self._work is not None:
                self._wait(self._work)
            self._agreed = _decode(self._vector.tolist())
        return self._agreed


@final
class Aside:
    """A vector's copy on the host, made on a stream of its own.

    Read from its own stream, it would be there only when the device has done all that was enqueued meanwhile: the step
    behind it.
    """

    def __init__(self, vector: torch.Tensor, work: dist.Work | None, stream: torch.cuda.Stream) -> None:
        self._device = vector.device
        self._copy = torch.empty(vector.shape, dtype=vector.dtype, pin_memory=True)
        self._arrived = torch.cuda.Event()
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            if work is not None:
                work.wait()  # of NCCL: for this stream alone
            self._copy.copy_(vector, non_blocking=True)
            self._arrived.record(stream)
        vector.record_stream(stream)

    def read(self) -> list[float]:
        """The numbers, when they have come; any thread may ask."""
        with torch.cuda.device(self._device):
            self._arrived.synchronize()
        found: list[float] = self._copy.tolist()
        return found


class Agreement:
    """Makes the reductions of a run.

    Args:
        group: a process group of its own, over the world; None for one process.
        device: where the vector is reduced (that of the group's backend).
        counts: whether this rank's samples count; not where another rank that sees the same ones tells of them.
        adds_loss: whether its loss does: it may be that of other positions of the same samples. None: as `counts`.
        stage: this rank's place along pp; ranks of one place enter the same units.
        num_stages: the degree of pp.

    Attributes:
        group: as given.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        *,
        counts: bool = True,
        adds_loss: bool | None = None,
        stage: int = 0,
        num_stages: int = 1,
    ) -> None:
        self.group = group
        self._stage, self._num_stages = stage, num_stages
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._counts = counts
        self._adds_loss = counts if adds_loss is None else adds_loss

    def count(self, targets: int) -> torch.Tensor:
        """The world's sum of what each rank counts in the step under way, 0-dim, float64, at once; collective."""
        # Filled on the device: copied to it, it would make the host wait for the whole stream.
        told = torch.full((), float(targets if self._counts else 0), dtype=torch.float64, device=self._device)
        if self.group is not None:
            dist.all_reduce(told, group=self.group)
        return told

    def start(self, ballot: Ballot) -> Pending:
        """Begin to agree; collective."""
        if not self._counts:
            loss = ballot.loss if self._adds_loss else torch.zeros_like(ballot.loss)
            ballot = replace(ballot, loss=loss, next_targets=0, next_samples=0, ledger=0)
        if self.group is None and self._device.type == "cpu":
            # One process agrees with itself: a vector would only cost it a tenth of what a small step may cost in all.
            counts, stop = (ballot.next_targets, ballot.next_samples), (ballot.interrupt, ballot.terminate)
            skipped = 0 if ballot.skipped is None else int(ballot.skipped)
            saving = (int(ballot.saving.written), int(ballot.saving.committed), int(ballot.saving.failed))
            found = (int(ballot.noticed), int(ballot.expired), int(ballot.due))
            told = (float(ballot.loss), *counts, *stop, ballot.ledger, False, skipped, 1, *saving, *found)
            return Pending(None, None, Agreed(*told), saving=ballot.saving.step)
        vector = torch.tensor(_encode(ballot, self._stage, self._num_stages), dtype=torch.float64)
        if self._device.type == "cuda":
            # Made on the device, or copied from ordinary memory, it would make the host wait for the whole stream.
            vector = vector.pin_memory().to(self._device, non_blocking=True)
        vector[0] = ballot.loss
        if ballot.skipped is not None:
            vector[SKIPPED] = ballot.skipped
        work = None
        if self.group is not None:
            work = dist.all_reduce(vector, group=self.group, async_op=True)
        brought = (ballot.path, ballot.wait, ballot.saving.step, ballot.pace)
        return Pending(vector, work, None, *brought, self._stage, self._bring_aside(vector, work))

    def _bring_aside(self, vector: torch.Tensor, work: dist.Work | None) -> Aside | None:
        """None where it is on the host, and where gloo reduces it: the host itself waits for that."""
        if vector.device.type != "cuda":
            return None
        if self.group is not None and self.group._get_backend(vector.device).name() != "nccl":
            return None
        if self._stream is None:
            self._stream = torch.cuda.Stream(vector.device)
        return Aside(vector, work, self._stream)


def _encode(ballot: Ballot, stage: int, num_stages: int) -> list[float]:
    # A sum of 64-bit words does not fit a float64; four 16-bit digits do, over up to 2**37 ranks.
    mask = (1 << DIGIT_BITS) - 1
    digits = [float((ballot.ledger >> (DIGIT_BITS * place)) & mask) for place in range(LEDGER_DIGITS)]
    interrupt, terminate = ballot.interrupt + (ballot.expired << RANK_BITS), ballot.terminate
    flags = [float(interrupt), float(terminate + (ballot.noticed << RANK_BITS)), 0.0]
    common = ballot.path if num_stages == 1 else ()
    digest = path_digest((*common, ballot.pace) if ballot.pace else common)
    paths = [1.0, float(digest), float(digest**2)]
    # What the ranks of a stage have entered those of another have not: each stage adds up its own.
    by_stage = [0.0] * (2 * num_stages if num_stages > 1 else 0)
    if by_stage:
        digest = path_digest(ballot.path)
        by_stage[2 * stage : 2 * stage + 2] = [float(digest), float(digest**2)]
    written = ballot.saving.written + (ballot.due << RANK_BITS)
    saving = [float(written), float(ballot.saving.committed), float(ballot.saving.failed)]
    return [0.0, float(ballot.next_targets), float(ballot.next_samples), *flags, *paths, *saving, *digits, *by_stage]


def _decode(values: list[float]) -> Agreed:
    loss, targets, samples, stops, flags, skipped, num_ranks, paths, squares, *rest = values
    (written, committed, failed), digits = map(int, rest[:3]), rest[3 : 3 + LEDGER_DIGITS]
    noticed, terminate = divmod(int(flags), 1 << RANK_BITS)
    expired, interrupt = divmod(int(stops), 1 << RANK_BITS)
    due, written = divmod(written, 1 << RANK_BITS)
    ledger = sum(int(digit) << (DIGIT_BITS * place) for place, digit in enumerate(digits)) % (1 << 64)
    by_stage = rest[3 + LEDGER_DIGITS :]
    stages = list(zip(by_stage[::2], by_stage[1::2], strict=True))
    diverged = differ(num_ranks, paths, squares) or any(differ(num_ranks / len(stages), *sums) for sums in stages)
    counts, stop = (int(targets), int(samples)), (interrupt > 0, terminate > 0)
    saving = (written, committed, failed)
    found = (noticed, expired, due)
    return Agreed(loss, *counts, *stop, ledger, diverged, int(skipped), int(num_ranks), *saving, *found)
