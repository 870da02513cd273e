"""When a training saves, for how long it waits, and what the journal says of it.

At most one checkpoint is written beside the training. The next one that comes due waits until that is committed: so a
fault never costs more than two intervals, however slow the disk is, and a disk that hangs is seen as what it is.

A copy in the memory of this host waits for no other save, and none waits for it: one that comes due while anything is
being written is left out, one that is being written when the disk's turn comes is given up, and one that fails ends no
run, because the checkpoints on the disk are what counts. Of those a few in a row may fail, too (failed_saves.py); the
last one may not.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import final

from allranks.checkpointing.background import BackgroundSave
from allranks.checkpointing.commit import TAKEN_OVER
from allranks.errors import CheckpointError
from allranks.observing.counters import Stopwatch
from allranks.observing.heartbeat import Heartbeat
from allranks.observing.recorder import Recorder
from allranks.stepping.agreement import NOTHING, Agreed, Pending, Saving
from allranks.training.failed_saves import FailedSaves
from allranks.training.grace import Grace
from allranks.training.memory_copies import MemoryCopies
from allranks.training.saver import Saver
from allranks.verdict import Verdict

SLOW_SECONDS = 1.0
"""So long may a training wait for the checkpoint before without a word; the journal has every wait."""


@dataclass(slots=True)
class _UnderWay:
    """A checkpoint that is written beside the training.

    Attributes:
        saver: who writes it.
        samples: consumed when it was begun.
        began: when, by the clock of `time.perf_counter`.
        waited: seconds that the training has waited for it so far.
    """

    saver: Saver
    save: BackgroundSave
    samples: int
    began: float
    waited: float


@final
class Saves:
    """The saves of one training; every rank makes the same calls.

    Args:
        saver: writes them.
        position: samples consumed so far.
        recorder: rank 0's pen; None elsewhere.
        tell: says a verdict about a step, on rank 0.
        memory: copies between those that the saver writes; None: none.
        begun: the step that this process goes on from.
        grace: how long after a request to stop workers are killed; inf: nobody kills them.
        check: sees that what is live after so many steps may be kept, and raises where not; called before each save,
            wherever to, after the one before is settled. Collective.

    Attributes:
        newest: (step, position in the order of samples) of the newest checkpoint or copy, or of where this process
            began.
    """

    def __init__(
        self,
        saver: Saver,
        position: Callable[[], int],
        stopwatch: Stopwatch,
        heart: Heartbeat,
        recorder: Recorder | None,
        tell: Callable[[Verdict, int], None],
        memory: MemoryCopies | None = None,
        begun: int = 0,
        grace: float = math.inf,
        check: Callable[[int], None] = lambda step: None,
    ) -> None:
        self._saver = saver
        self._position = position
        self._stopwatch = stopwatch
        self._heart = heart
        self._recorder = recorder
        self._tell = tell
        self._under_way: _UnderWay | None = None
        self.newest = begun, position()
        self._told_of_slowness = self._told_of_memory = False
        self._took = 0.0
        self._memory, self._check = memory, check
        self._failed = FailedSaves(saver.failures)
        self._grace = Grace(grace, beside=saver.beside, in_memory=memory is not None)

    def at_boundary(self, step: int) -> None:
        """Save after `step` steps, if the config asks for it: on the disk, or else in memory; collective."""
        copy = self._memory is not None and self._memory.due(step)
        if self._saver.due(step):
            saver = self._saver
            saver.clock.begin()
        elif self._memory is not None and copy and self._under_way is None and self._may_copy(self._memory, step):
            saver = self._memory.saver
        else:
            return
        if saver.goes_beside():
            self.begin(step, saver)
        else:
            self.wait()
            with self._bearing(saver, step):
                self._save(step, saver)
        self._heart.enter("step")

    def save(self, step: int) -> None:
        """Save on the disk while the training waits; collective. Raises CheckpointError: it could not be saved."""
        self.wait()
        self._save(step, self._saver)

    def _save(self, step: int, saver: Saver) -> None:
        if saver.saved_step == step:
            return
        started = time.perf_counter()
        self._check(step)
        self._heart.enter("checkpoint")
        path = saver.save(step, self.flush)
        self._record(saver, path, step, self._position(), started)
        self._stopwatch.mark("checkpoint")

    def save_last(self, step: int) -> None:
        """See that there is a checkpoint of `step`, the training's last one; collective."""
        self.wait()
        if self._saver.saved_step == step:
            self._saver.tidy()  # who saved it may have died before it had deleted what is too old
        else:
            self.save(step)

    def finish(self) -> None:
        """The training is over: what is on its way to a mirror gets there."""
        self._heart.enter("checkpoint")
        self._saver.finish(self._heart.progress)
        self._stopwatch.mark("checkpoint")

    def begin(self, step: int, saver: Saver | None = None) -> None:
        """Begin to save beside the training, by default on the disk, after the one before; collective."""
        held_up = self._under_way
        self.wait()
        if held_up is not None and held_up.saver is self._saver:
            self._tell_of_slowness(held_up, step)
        started, saver = time.perf_counter(), saver or self._saver
        self._check(step)
        self._heart.enter("checkpoint")
        save = saver.begin(step, self.flush)
        waited = time.perf_counter() - started
        self._under_way = _UnderWay(saver, save, self._position(), started, waited)
        self._stopwatch.mark("checkpoint")

    def standing(self) -> Saving:
        """Where this rank stands with the one under way: what it tells the others."""
        if self._under_way is None:
            return NOTHING
        save = self._under_way.save
        return Saving(save.step, save.written, save.committed, save.failed)

    def hear(self, pending: Pending, agreed: Agreed) -> None:
        """Act upon what the ranks have told of the one under way; collective where one has failed.

        Raises:
            CheckpointError: on every rank: it could not be saved, once too often.
        """
        under_way = self._under_way
        if under_way is None or pending.saving != under_way.save.step:
            return  # told of one that is settled
        if agreed.failed:
            self._under_way = None
            self._heart.enter("checkpoint")
            with self._bearing(under_way.saver, under_way.save.step):
                under_way.save.fail()
        elif agreed.committed:
            self._heart.enter("checkpoint")  # of the first one files are read
            self._settle(under_way)
            self._heart.enter("step")
        elif agreed.written == agreed.num_ranks:
            under_way.save.all_have_written()

    def wait(self) -> None:
        """Wait until nothing is under way; a copy in memory is given up. Collective. Raises as `hear`."""
        under_way = self._under_way
        if under_way is None:
            return
        started = time.perf_counter()
        self._heart.enter("checkpoint")
        self._under_way = None
        with self._bearing(under_way.saver, under_way.save.step):
            counts = True
            if under_way.saver is self._saver:
                under_way.save.settle()
            else:
                counts = under_way.save.give_way()
            under_way.waited += time.perf_counter() - started
            if counts:
                self._settle(under_way)
        self._stopwatch.mark("checkpoint")

    def close(self) -> None:
        """Nothing is written any more: the training has ended, by an error where something is still under way."""
        if self._under_way is not None:
            self._under_way.save.abandon()
            self._under_way = None

    def seconds_to_save(self) -> float:
        """How long it would take now to have a last checkpoint, judged by the newest: 0.0 before there was one."""
        return self._took if self._under_way is None else 2 * self._took

    def flush(self) -> None:
        """What a resume will not do again has to stand in the journal before the checkpoint counts."""
        if self._recorder is not None:
            self._recorder.flush()

    def _settle(self, under_way: _UnderWay) -> None:
        self._under_way = None
        save, saver = under_way.save, under_way.saver
        saver.settled(save.step)
        self._record(saver, save.place.target, save.step, under_way.samples, under_way.began, under_way.waited)

    @contextmanager
    def _bearing(self, saver: Saver, step: int) -> Iterator[None]:
        """What cannot be saved is told of, on the disk each time, and ends the run when there are too many; of copies
        in memory once until there is one, unless it shows that this attempt is not the newest. The same on every rank.
        """
        try:
            yield
        except CheckpointError as error:
            self._stopwatch.mark("checkpoint")
            if saver is self._saver:
                self._tell(self._failed.bear(error, step, self.newest[0]), step)
            elif TAKEN_OVER in str(error):
                raise
            else:
                saver.forget(step)
                self._tell_of_memory(step, str(error))

    def _may_copy(self, memory: MemoryCopies, step: int) -> bool:
        """Whether nothing is in the way of a copy of `step`; what is, is told. Collective."""
        why = memory.obstacle()
        if why:
            self._tell_of_memory(step, why)
        return not why

    def _tell_of_memory(self, step: int, why: str) -> None:
        if not self._told_of_memory:
            self._told_of_memory = True
            what = f"there is no copy of step {step} in the memory of this host: {why}"
            move = "the run goes on, and tries again; see what fills that memory"
            self._tell(Verdict("checkpoint", what, (), move), step)

    def _tell_of_slowness(self, held_up: _UnderWay, step: int) -> None:
        if self._told_of_slowness or held_up.waited < SLOW_SECONDS:
            return
        self._told_of_slowness = True
        before = held_up.save.step
        what = f"the checkpoint of step {before} was still being written when the next one came due, at step {step}"
        evidence = f"training waited {held_up.waited:.2f} s for it; so do later ones, which the journal tells"
        move = f"take a larger {self._saver.clock.key}, or a faster disk"
        self._tell(Verdict("checkpoint", what, (evidence,), move), step)

    def _record(
        self, saver: Saver, path: Path, step: int, samples: int, started: float, waited: float | None = None
    ) -> None:
        self.newest = step, samples
        took = time.perf_counter() - started
        if saver is self._saver:
            self._took = took
            saver.clock.saved()
            self._failed.saved()
            if verdict := self._grace.judge(took, self._heart.step_seconds):
                self._tell(verdict, step)
        self._told_of_memory &= saver is self._saver  # once there is a copy, what keeps one away is news
        if self._recorder is None:
            return
        seconds = round(took if waited is None else waited, 6)
        more: dict[str, object] = {} if waited is None else {"background_seconds": round(took, 6)}
        more |= {} if saver is self._saver else {"tier": "memory"}
        self._recorder.write("checkpoint", step=step, samples=samples, path=path.name, seconds=seconds, **more)
