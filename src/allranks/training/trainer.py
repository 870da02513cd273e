"""The training loop, and what happens at its boundaries."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, final

from allranks import fault_points
from allranks.data.loader import Loader
from allranks.data.micro_step import StepBatch
from allranks.errors import GuardError
from allranks.failure import DONE, INTERRUPTED, PREEMPTED
from allranks.observing import heartbeat
from allranks.observing.counters import Stopwatch
from allranks.observing.progress import ProgressLine
from allranks.observing.recorder import Recorder, StepRecord, Value
from allranks.recorded import Noting
from allranks.stepping.agreement import Agreed, Pending
from allranks.stepping.session import Session
from allranks.stepping.spikes import ABOVE, Window
from allranks.stepping.step import Outcome
from allranks.training.memory_copies import MemoryCopies
from allranks.training.rollbacks import Rollbacks
from allranks.training.saver import Saver
from allranks.training.saves import Saves
from allranks.training.sentinels import Sentinels
from allranks.training.skips import APPLIED, KIND, Skips, explain_spike
from allranks.training.time_limit import TimeLimit
from allranks.training.validate import check_validation, validate
from allranks.verdict import Decision, Verdict

SMALLEST_SCALE = 1.0
"""Below it gradients are not finite for another reason than the scale, which then makes them smaller than they are."""

SPIKES = 10
"""So many are told of in one attempt, where they are only logged."""

Reason = Literal["done", "interrupted", "terminated"]
EXIT_CODES: Final[Mapping[Reason, int]] = {"done": DONE, "interrupted": INTERRUPTED, "terminated": PREEMPTED}


@dataclass(frozen=True)
class Ending:
    """How a training ended.

    Attributes:
        reason: done, or stopped at a step boundary on request, after saving.
        step: optimizer steps done since the first start.
        validation: the last evaluation, by metric; empty where there was none.
    """

    reason: Reason
    step: int
    validation: Mapping[str, float]


@final
class Trainer:
    """One training from the stream's position to its end.

    Args:
        saver: writes checkpoints; collective.
        recorder: rank 0's pen; None elsewhere.
        progress: rank 0's line; None elsewhere.
        leave_out: writes down that a range of positions is not fed any more; as of Rollbacks.
        memory: copies in this host's memory between the checkpoints; None: none.
        began: when what `train.max_seconds` counts from was; as of TimeLimit.
    """

    def __init__(
        self,
        session: Session,
        saver: Saver,
        stopwatch: Stopwatch,
        recorder: Recorder | None,
        progress: ProgressLine | None,
        leave_out: Callable[[int, int], None] = lambda first, past: None,
        memory: MemoryCopies | None = None,
        began: float | None = None,
    ) -> None:
        self._session = session
        self._stopwatch = stopwatch
        self._recorder = recorder
        self._progress = progress
        per_sample = session.flops_per_sample
        self._flops_per_sample = None if per_sample is None else per_sample / session.processes.size
        check_validation(session)
        self._validation: dict[str, float] = {}
        self._evaluated_at = -1
        self._told_of_scale, self._told_of_spikes = False, 0
        guard = session.config.guard
        watched = ("loss", "grad_norm") if guard.spike == "log" else ()
        self._windows = {name: Window(guard.spike_window, guard.spike_threshold, ABOVE[name]) for name in watched}
        self._num_skipped = 0
        self._skips = Skips(session, self._tell)
        self._sentinels = Sentinels(session, self._tell)
        saver.prove, saver.expect = self._sentinels.prove, self._sentinels.expect
        self._heart = heartbeat.current()
        self._heart.order(session.stream.num_samples if session.stream.order == "map" else None)
        told, stream = (stopwatch, self._heart, recorder, self._tell), session.stream
        self._saves = Saves(saver, lambda: stream.position, *told, memory, stream.step, guard.stop_seconds, self._check)
        self._newest: Pending | None = None
        session.step.saving = self._saves.standing
        self._rollbacks = Rollbacks(session, self._saves, leave_out, self._tell)
        # On CUDA the host runs ahead of the device and reads an agreement a step later; on the CPU it is there already.
        waits = session.processes.device.type != "cuda" or guard.spike == "rollback"
        self._lag = 0 if waits else 1
        self._limit = TimeLimit(session.config.train.max_seconds, began, self._lag, self._saves.seconds_to_save)
        session.step.expired = self._limit.is_reached
        self._clock = saver.clock
        session.step.due = self._clock.vote
        self._heart.time_over(self._limit.ends_at)

    def train(self) -> Ending:
        """Step until the data or the steps end, or a stop is agreed; save and evaluate at the end; collective."""
        try:
            with Noting():
                return self._train()
        finally:
            self._saves.close()

    def _train(self) -> Ending:
        session = self._session
        self._stopwatch.mark("other")
        with session.loader() as loader, Noting():
            batch = self._load(loader, None)
            self._newest = before = session.step.agree_first(batch) if batch is not None else None
            older = before
            done = session.stream.step
            self._stopwatch.mark("input")
            while batch is not None and before is not None and older is not None:
                told = older if self._lag else before
                began = time.perf_counter()
                agreed = self._read(told, batch.step - self._lag)
                # Where the host runs ahead it waits here for the step before, and nowhere else: that is a step's time.
                waited = self._lag * (time.perf_counter() - began)
                self._clock.hear(told, agreed)
                self._rollbacks.hear(before)
                self._guard(agreed, batch.step - self._lag - 1, done)
                reason = self._stop(agreed, before, batch)
                if reason is not None:
                    return self._end(reason, batch.step)
                started = time.perf_counter() - waited
                self._heart.hold(batch.step + 1, batch.position, batch.size)
                self._heart.begin_step(waited)
                fault_points.begin_step(batch.step + 1)
                self._skips.remember(batch, before)
                self._rollbacks.remember(batch)
                outcome = session.step.run(batch, before, partial(self._load, loader, batch))
                session.stream.take(batch)
                self._record(batch, before, outcome, started)
                done = batch.step + 1
                self._heart.finish_step(done)
                self._newest = outcome.pending
                self._boundary(batch, done)
                older, before, batch = before, outcome.pending, outcome.upcoming
        if before is not None and older is not None:
            self._rollbacks.hear(before)
            for lag, pending in enumerate((session.step.agree_last(), before, older)[: 2 + self._lag]):
                self._guard(self._read(pending, done - lag + 1), done - lag, done)
        return self._end("done", done)

    def _load(self, loader: Loader, fed: StepBatch | None) -> StepBatch | None:
        """The batch behind `fed`, or the first one."""
        stream = self._session.stream
        size = stream.cut.global_batch
        coming = (stream.step + 1, stream.position, size)
        if fed is not None:
            coming = (fed.step + 2, stream.left_out.beyond(fed.position + fed.size), size)
        with self._heart.holding(*coming):
            fault_points.reach("data.next")
            with self._heart.loading():
                return next(loader, None)

    def _read(self, pending: Pending, step: int) -> Agreed:
        """What was agreed in step `step` (from 1), which all ranks made alike: else nothing of it may be saved."""
        agreed = self._sentinels.read(pending, step)
        self._saves.hear(pending, agreed)
        return agreed

    def _guard(self, agreed: Agreed, told: int, step: int) -> None:
        """End the run, after saving, where what was agreed about step `told` says so; `step` steps are done."""
        verdict = self._skips.see(agreed, told)
        if verdict is None:
            return
        if verdict.kind == KIND:
            self._saves.save(step)  # the parameters are good, and the samples that were not are behind
        self._tell(verdict, told)
        raise GuardError(f"{verdict.what}; {verdict.next}")

    def _tell(self, verdict: Verdict, step: int) -> None:
        if self._recorder is not None:
            self._recorder.write("verdict", step=step, **verdict.to_json())
        if self._progress is not None:
            self._progress.say(f"warning: {verdict}")

    def _decide(self, decision: Decision, step: int) -> None:
        if self._recorder is not None:
            self._recorder.write("decision", step=step, what=decision.what, because=decision.because)
        if self._progress is not None:
            self._progress.say(str(decision))

    def _stop(self, agreed: Agreed, before: Pending, batch: StepBatch) -> Reason | None:
        if agreed.interrupt:
            return "interrupted"
        if agreed.expired:
            self._heart.time_over(time.monotonic())  # by whichever rank's clock: its agent starts nothing any more
            self._decide(self._limit.explain(batch.step), batch.step)
        if agreed.terminate or agreed.expired:
            return "terminated"
        # Data that shards itself has ended when no rank has a sample left: read at once, not a step later, because a
        # step of nobody's samples would still move the parameters.
        return "done" if batch.exhausted and before.read().next_samples == 0 else None

    def _boundary(self, batch: StepBatch, step: int) -> None:
        if self._sentinels.recomputes(step):
            self._look(step, lambda: self._sentinels.recompute(batch, step))
        if self._sentinels.due(step):
            self._look(step, lambda: self._sentinels.compare(step))
        # Saved before it is evaluated: metrics that fail lose no step.
        self._saves.at_boundary(step)
        evaluate_every = self._session.config.evaluate.every
        if evaluate_every and step % evaluate_every == 0:
            self._evaluate(step)
            self._heart.enter("step")

    def _check(self, step: int) -> None:
        """See that what is live after `step` steps may be kept; collective. Raises an AllranksError where not."""
        if self._newest is not None:
            self._rollbacks.hear(self._newest)
        self._look(step, lambda: self._sentinels.compare_copies(step))

    def _look(self, step: int, look: Callable[[], None]) -> None:
        """Have sentinels look at the ranks after step `step`, which all of them have made alike; collective."""
        self._heart.progress()
        if self._newest is not None:
            self._read(self._newest, step)
        look()
        self._stopwatch.mark("other")

    def _end(self, reason: Reason, step: int) -> Ending:
        self._saves.save_last(step)
        if reason == "done" and self._session.config.evaluate.every != 0 and self._evaluated_at != step:
            self._evaluate(step)
        self._heart.finish(EXIT_CODES[reason])  # who is killed while it brings copies to a mirror has saved all
        self._saves.finish()
        self._heart.enter("end")
        if self._progress is not None:
            self._progress.close()
        return Ending(reason, step, self._validation)

    def _evaluate(self, step: int) -> None:
        started = time.perf_counter()
        self._heart.enter("evaluation")
        found = validate(self._session, self._heart.progress)
        self._stopwatch.mark("evaluation")
        if not found:
            return
        self._validation, self._evaluated_at = found, step
        if self._recorder is not None:
            seconds = round(time.perf_counter() - started, 6)
            samples = self._session.stream.position
            self._recorder.write("evaluation", step=step, samples=samples, metrics=found, seconds=seconds)

    def _record(self, batch: StepBatch, before: Pending, outcome: Outcome, started: float) -> None:
        if self._recorder is None:
            return
        seconds = time.perf_counter() - started
        step, samples = batch.step + 1, batch.position + batch.size

        def ready() -> Mapping[str, Value]:
            # On the recorder's thread: the loop waits for nothing here.
            values = outcome.values(before, batch.size)
            self._watch(step, values)
            if self._progress is not None:
                self._num_skipped += "skipped" in values
                skipped = max(self._num_skipped, int(values.get("skipped_steps", 0)))
                self._progress.update(step, float(values["loss"]), batch.size / seconds, skipped)
            return values

        flops = None if self._flops_per_sample is None else self._flops_per_sample * batch.size
        self._recorder.record(StepRecord(step, samples, batch.size, outcome.lr, seconds, ready, flops))

    def _watch(self, step: int, values: Mapping[str, float | str]) -> None:
        """Tell of spikes; once of a scale that has fallen too far: gradients are not finite for another reason."""
        for name, window in self._windows.items():
            value = float(values[name])
            middle = window.add(value)
            if middle is not None and "skipped" not in values and self._told_of_spikes < SPIKES:
                self._told_of_spikes += 1
                named, follows = name.replace("grad_", "gradient "), f"the step {APPLIED} (guard.spike=log)"
                self._tell(explain_spike(named, step, value, middle, follows), step)
        scale = float(values.get("loss_scale", 1.0))
        if self._told_of_scale or scale >= SMALLEST_SCALE:
            return
        self._told_of_scale = True
        what = f"the scale of the loss has fallen to {scale:g} at step {step}: gradients are not finite at any scale"
        remedy = "stop it; look at the data of these steps, or take train.precision=bfloat16"
        self._tell(Verdict(KIND, what, (), remedy), step)
