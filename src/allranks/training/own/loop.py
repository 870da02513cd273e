"""The loop of a world: what happens around the user's own lines, from the stream's position to its end."""

import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import torch

from allranks.data.loader import Loader
from allranks.data.stream import DataStream
from allranks.errors import ConfigError, TaskError
from allranks.failure import INTERRUPTED, PREEMPTED, AgreedStop
from allranks.observing.recorder import StepRecord, Value
from allranks.recorded import Noting, note_error
from allranks.training.own.banner import introduce
from allranks.training.own.first_batch import first_batch
from allranks.training.own.ground import Ground
from allranks.training.own.run import Logbook, check_numbers
from allranks.training.own.second_place import find_where_to_go_on
from allranks.training.own.step import OwnStep
from allranks.training.own.turn import FinishedStep
from allranks.training.same_data import compare_data
from allranks.training.saver import Saver
from allranks.training.snapshot import Contents
from allranks.training.stop import StopRequests
from allranks.verdict import Decision


@final
class OwnLoop:
    """The one loop of a world.

    Attributes:
        order: the order of samples, and the position in it.
        done: optimizer steps finished since the first start of the run.
        exit_code: what the process ends with, where a stop was agreed; else 0.
        logbook: the open Run's, or None.
    """

    def __init__(self, ground: Ground, step: OwnStep, order: DataStream, make_loader: Callable[[], Loader]) -> None:
        self.order = order
        self.done = self.exit_code = 0
        self._ground = ground
        self._step = step
        self._make_loader = make_loader
        self._stops: list[StopRequests] = []
        step.stop_requested = self._stop_requested
        self.logbook: Logbook | None = None
        self._saver: Saver | None = None
        self._every: int | None = None
        self._active: Generator[Any, None, None] | None = None
        self._ended = self._inside = False
        self._finished: FinishedStep | None = None
        self._told = True
        self._logged: dict[str, float | torch.Tensor] = {}
        # On CUDA the host runs ahead of the device, and reads an agreement one step later. The end of data that shards
        # itself has to be known at once, and is agreed like a stop.
        self._sharded = order.order == "sharded"
        self._lag = 1 if ground.device.type == "cuda" and not self._sharded else 0

    def open(self) -> Logbook:
        """The Run directory, opened where it is not yet; collective."""
        if self.logbook is None:
            ground = self._ground
            self.logbook = Logbook(ground.open_run(ground.config), ground.processes, self.order.steps_total)
            introduce(self.logbook, self._ground, self.order)
        return self.logbook

    def resume(self, contents: Contents) -> int:
        """Name what is kept, and take the newest good checkpoint's; the step at which it stands, or 0; collective.

        Raises:
            TaskError: it is too late, or was done. CheckpointError: another model, or nothing whole.
        """
        if self._saver is not None or self.done or self._active is not None:
            raise TaskError("world.resume() belongs before the loop, once")
        logbook, processes, run = self.open(), self._ground.processes, self.open().run
        found, warnings, mirroring = find_where_to_go_on(self._ground, logbook)
        data = compare_data(self.order, found, processes, "warn")
        for warning in (*warnings, *data.warnings, *data.decisions):
            logbook.say(f"warning: {warning}")
        contents = replace(contents, fingerprint=data.fingerprint)
        place = (self._ground.config.checkpoint, run.checkpoints, run.id, run.attempts)
        saver = Saver(contents, processes, *place, mirroring=mirroring)
        if found is not None:
            for decision in contents.load(found):
                logbook.say(f"warning: {decision}")
            saver.go_on_from(found)
            self.done = found.step
            logbook.write("resume", step=self.done, samples=found.manifest.samples, path=found.path.name)
            logbook.say(f"resumed at step {self.done:,}, sample {found.manifest.samples:,}, from {found.path.name}")
        saver.prove, self._saver = self._step.watch.prove, saver  # last: what was not restored is not saved
        return self.done

    def batches(self) -> Generator[Any, None, None]:
        """Micro-batches from the stream's position on; an iteration that was left before is over. Raises TaskError."""
        if self._active is not None:
            self._active.close()
        if self._ended and not self.exit_code:
            length = f"steps={self.order.steps_limit}" if self.order.epochs is None else f"epochs={self.order.epochs}"
            raise TaskError(f"the stream has ended ({length}): give world.stream more, instead of a loop around it")
        self._active = self._iterate()
        return self._active

    def finished(self, step: FinishedStep) -> None:
        """A step is over."""
        assert step.samples - step.size == self.order.position, "a step of another position than the stream's"
        self.order.position = step.samples
        self.done, self._finished, self._told = step.number, step, False

    def save(self, every: int) -> Path | None:
        """Write a checkpoint of every `every`-th step, now or at the end of this step; its path where it was now."""
        if self._saver is None:
            raise TaskError("world.save() before world.resume(model, optimizer, stream): that names what is kept")
        if every < 1:
            raise ConfigError(f"world.save(every={every}): expected at least 1 step")
        self._every = every
        return self._save() if self._step.between_steps and self._is_due() else None

    def log(self, values: Mapping[str, float | torch.Tensor]) -> None:
        """Rank 0's numbers, with the line of this step; outside of the loop as an evaluation. Raises TaskError."""
        kept = check_numbers(values)
        if not self._inside:
            self.evaluated({name: float(value) for name, value in kept.items()}, 0.0)
        elif kept:
            self._logged |= kept
            self._told = False  # where a save has told the step already: its line is written again, with these

    def evaluated(self, metrics: Mapping[str, float], seconds: float) -> None:
        """Record an evaluation of the model as it stands."""
        if self.logbook is not None and metrics:
            self._tell()
            samples, rounded = self.order.position, round(seconds, 6)
            self.logbook.write("evaluation", step=self.done, samples=samples, metrics=dict(metrics), seconds=rounded)

    def say(self, line: str) -> None:
        """Rank 0: one line on standard error."""
        if self.logbook is not None:
            self.logbook.say(line)

    def decide(self, decision: Decision) -> bool:
        """Tell of a decision that was made after the start; False where the start is still to come."""
        if self.logbook is None:
            return False
        if self._ground.processes.rank == 0:
            self.logbook.write("decision", what=decision.what, because=decision.because)
            self.logbook.say(str(decision))
        return True

    def finish(self) -> None:
        """The end: what is not yet written or saved is; collective."""
        if self._active is not None:
            self._active.close()
        self._step.abandon()
        self._save_rest()
        if self._saver is not None:
            self._saver.finish(lambda: None)

    def close(self, error: BaseException | None) -> None:
        """Close the Run, after an error too."""
        if self._active is not None:
            self._active.close()
        for stops in self._stops:
            stops.restore()
        if self.logbook is not None:
            reason = "failed" if error is not None else "stopped" if self.exit_code else "done"
            self.logbook.close(reason, error, self._ground.stopwatch.totals())
        self._step.leave()  # last: after an error of the device it may raise, and the journal has its end by then

    def _iterate(self) -> Generator[Any, None, None]:
        if self.exit_code:
            return  # the stop was agreed in an iteration before
        self.open().begin(self.done)
        # Outside of the loop Ctrl-C and SIGTERM do what they always do; but not once a stop is agreed: Ctrl-C reaches a
        # process twice, from the terminal and from its launcher, and the second one must not end the saving.
        stops = StopRequests.install(alone=self._ground.processes.environment.launcher == "none")
        self._stops.append(stops)
        try:
            yield from self._steps()
            self._is_over(0)
            self._step.watch.finish_loop()
            self._ended = True
            self._step.abandon()
            self._save_rest()
        finally:
            if not self.exit_code:
                stops.restore()

    def _steps(self) -> Generator[Any, None, None]:
        self._ground.stopwatch.mark("other")
        try:
            with self._make_loader() as loader:
                started, batch = time.perf_counter(), first_batch(loader, self.order, self._ground.processes)
                while batch is not None:
                    coming = next(loader, None) if self._sharded else None
                    more = 1 if not self._sharded else 0 if coming is None else coming.local_size
                    self._step.begin(batch, more, started, self.order.steps_total)
                    self._inside = True
                    for index in range(len(batch.micro_steps)):
                        yield self._ground.place(self._step.give(index).batch)
                        self._step.take_back()
                    self._end_step()
                    began = time.perf_counter()
                    if self._is_over(self._lag):
                        break
                    started = began if self._lag else time.perf_counter()  # a host that runs ahead waits in there
                    batch = coming if self._sharded else next(loader, None)
        finally:
            self._leave()

    def _end_step(self) -> None:
        self._tell()
        self._finished, self._logged = None, {}
        if self._every is not None and self._is_due():
            self._save()

    def _leave(self) -> None:
        """The loop is left, at its end or by a break: nothing collective here."""
        self._tell()
        self._finished, self._logged, self._inside = None, {}, False
        if self._ground.processes.size == 1:  # nobody to agree with: a request after the last vote counts too
            self._obey(*self._stop_requested())

    def _is_over(self, lag: int) -> bool:
        if (agreed := self._step.agreed(lag)) is None:
            return False
        self._obey(agreed.interrupt, agreed.terminate)
        return self.exit_code != 0 or agreed.next_samples == 0

    def _obey(self, interrupt: bool, terminate: bool) -> None:
        if interrupt or terminate:
            self.exit_code = INTERRUPTED if interrupt else PREEMPTED

    def _stop_requested(self) -> tuple[bool, bool]:
        seen = [stops.seen() for stops in self._stops]
        return any(interrupt for interrupt, _ in seen), any(terminate for _, terminate in seen)

    def _is_due(self) -> bool:
        assert self._saver is not None and self._every is not None
        return self.done > 0 and self.done % self._every == 0 and self._saver.saved_step != self.done

    def _save_rest(self) -> None:
        unsaved = self._saver is not None and self.done > 0 and self._saver.saved_step != self.done
        if unsaved and self._step.watch.stopped is None:
            self._save()

    def _save(self) -> Path:
        assert self._saver is not None
        self._step.agreed(0)  # nothing is kept of a step in which the ranks have parted
        self._step.watch.check_copies(self.done)
        logbook, mark = self.open(), self._ground.stopwatch.mark
        mark("other")
        started = time.perf_counter()
        self._tell()
        # What a resume will not do again has to stand in the journal.
        path = self._saver.save(self.done, logbook.flush)
        mark("checkpoint")
        seconds = round(time.perf_counter() - started, 6)
        logbook.write("checkpoint", step=self.done, samples=self.order.position, path=path.name, seconds=seconds)
        return path

    def _tell(self) -> None:
        finished, logged = self._finished, dict(self._logged)
        if finished is None or self._told or self.logbook is None:
            return
        self._told = True

        def ready() -> Mapping[str, Value]:
            # On the recorder's thread: the loop waits for nothing here.
            return finished.values() | {name: float(value) for name, value in logged.items()}

        numbers = (finished.number, finished.samples, finished.size, finished.lr, finished.seconds)
        self.logbook.record(StepRecord(*numbers, ready))


def end(loop: OwnLoop | None, ground: Ground, error: BaseException | None, left: Callable[[], None]) -> None:
    """Leave the world of `loop`; collective where there was no `error`. Raises SystemExit: 130 or 75, as was agreed.

    Args:
        left: called where this process may join again.
    """
    note_error(error)
    try:
        with Noting():
            if loop is not None and error is None:
                loop.finish()
    except BaseException as failure:
        error = failure
        raise
    finally:
        try:
            if loop is not None:
                loop.close(error)
        finally:
            if ground.leave(failed=error is not None):
                left()
    if error is None and loop is not None and loop.exit_code:
        raise AgreedStop(loop.exit_code)
