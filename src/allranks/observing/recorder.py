"""Rank 0's pen: the loop hands a step over and goes on; a thread writes it down when its reduction is there.

The thread looks every 80 ms instead of being woken: waking it costs the loop more than all the writing, and on small
steps several are then written in one go. On the CPU the loop itself writes what is at hand, because two threads that
contend for the interpreter lock cost it more; the thread then writes what a loop that is busy with a step has left.
A line stands in the journal at most 0.1 s after its reduction.

What a disk refuses for a while is held back, for TensorBoard as in the journal, whose `warn` is told.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, final

from allranks.observing.board import Board
from allranks.observing.journal import Journal

LOOK_SECONDS = 0.08
INLINE_SECONDS = 0.04
SLOW_SECONDS = 1.0
"""How often the memory is looked at."""

MAY_WAIT = 2
"""The newest records, whose reductions may be on their way: on CUDA the loop runs one step ahead of what it reads."""

STEP_VALUES = frozenset(("loss", "grad_norm", "ledger"))
NOT_PLOTTED = frozenset(("t", "event", "step", "samples", "seconds", "tokens", "ledger"))

Value = float | str | None


class StepRecord(NamedTuple):
    """One optimizer step, as the loop knows it when it goes on.

    Attributes:
        step: its number, from 1.
        samples: samples consumed since the start of the run, this step's included, over the whole world.
        size: samples of this step over the whole world.
        lr: the learning rate it used.
        seconds: how long it took.
        ready: blocks until the reduced values are there and gives them: loss, grad_norm, ledger (16 hex digits), the
            Task's metrics by name, and tokens where the batch has tokens. Called once, on another thread, or in a later
            `record` where the recorder writes inline.
        flops: floating-point operations of the step on each device; None where nobody counted them.
    """

    step: int
    samples: int
    size: int
    lr: float
    seconds: float
    ready: Callable[[], Mapping[str, Value]]
    flops: float | None = None


class _Event(NamedTuple):
    event: str
    fields: Mapping[str, object]


@final
class Recorder:
    """Writes steps and events, in the order in which they are handed over, to the journal and for TensorBoard.

    An error of the writing (a reduction that failed) is raised by the next call of any method.
    """

    def __init__(
        self,
        journal: Journal,
        *,
        tensorboard: Path | None = None,
        purge_from: int | None = None,
        memory: Callable[[], int] | None = None,
        inline: bool = False,
    ) -> None:
        """Start the thread.

        Args:
            journal: rank 0's; stays open after `close`.
            tensorboard: RUN/tensorboard, or None to write nothing there.
            purge_from: the first step to come, where an earlier attempt may have recorded it too.
            memory: gives the peak memory in bytes; asked about once a second.
            inline: whether the loop's thread writes all but the newest steps; their `ready` must not block.
        """
        self._journal = journal
        self._board = Board(tensorboard, purge_from, journal.warn) if tensorboard else None
        self._memory = memory
        self._inline = inline
        self._last_look = 0.0
        self._next_memory = 0.0
        self._pending: deque[tuple[float, StepRecord | _Event]] = deque()
        self._error: BaseException | None = None
        self._writing = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="allranks-recorder", daemon=True)
        self._thread.start()

    def record(self, record: StepRecord) -> None:
        """Hand over one step; returns at once."""
        if self._error is not None:
            raise self._error
        self._pending.append((time.time(), record))
        if self._inline and len(self._pending) > MAY_WAIT and time.monotonic() >= self._last_look + INLINE_SECONDS:
            self._write_known()

    def write(self, event: str, **fields: object) -> None:
        """Hand over any other event, such as "evaluation" (whose `metrics` also go to TensorBoard)."""
        if self._error is not None:
            raise self._error
        self._pending.append((time.time(), _Event(event, fields)))

    def flush(self) -> None:
        """Wait until all that was handed over stands in the journal, and in TensorBoard's file if that can be written.

        Raises:
            RunError: the journal cannot be written; its lines stay held back.
        """
        self._bring()
        self._journal.flush()

    def close(self) -> None:
        """Stop the thread, hand the journal what is left and close TensorBoard's file; closing twice is allowed."""
        self._closing.set()
        self._thread.join()
        try:
            self._bring()
        finally:
            if self._board is not None:
                self._board.close()
                self._board = None

    def _bring(self) -> None:
        self._drain()
        if self._board is not None and self._error is None:
            with self._writing:
                self._board.flush()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while self._error is None and not self._closing.wait(self._rest()):
            if self._rest() == 0.0:
                self._drain()

    def _rest(self) -> float:
        return max(0.0, self._last_look + LOOK_SECONDS - time.monotonic())

    def _write_known(self) -> None:
        # The thread may hold the lock while it waits for the newest reduction: that is no reason for the loop to wait.
        if not self._writing.acquire(blocking=False):
            return
        try:
            if len(self._pending) <= MAY_WAIT:
                return  # counted before without the lock: the thread has written them meanwhile
            self._last_look = time.monotonic()
            self._write_lines()
            if self._board is not None:
                self._board.write_down()
        finally:
            self._writing.release()

    def _drain(self) -> None:
        with self._writing:
            self._last_look = time.monotonic()
            try:
                while self._pending and self._error is None:
                    self._write_lines()
                if self._board is not None:
                    self._board.write_down()
            except BaseException as error:  # the loop must hear of whatever happened here, so nothing is let through
                self._error = error

    def _write_lines(self) -> None:
        """Write what is pending in one go, and by itself a record whose reduction may still have to be waited for."""
        lines = []
        try:
            for _ in range(max(1, len(self._pending) - MAY_WAIT)):
                at, record = self._pending.popleft()
                if isinstance(record, StepRecord):
                    lines.append(self._step_line(at, record))
                else:
                    lines.append(self._event_line(at, record))
        finally:
            if lines:
                self._journal.append(lines)

    def _step_line(self, at: float, record: StepRecord) -> Mapping[str, object]:
        values = record.ready()
        fields: dict[str, Value] = {
            "t": at,
            "event": "step",
            "step": record.step,
            "samples": record.samples,
            "loss": values.get("loss"),
            "lr": record.lr,
            "grad_norm": values.get("grad_norm"),
            "ledger": values.get("ledger"),
            "seconds": round(record.seconds, 6),
            **{name: value for name, value in values.items() if name not in STEP_VALUES},
        }
        if self._memory is not None and at >= self._next_memory:
            fields["memory_bytes"] = self._memory()
            self._next_memory = at + SLOW_SECONDS
        if self._board is not None:
            self._board.add(record.step, at, _step_points(record, fields))
        return fields

    def _event_line(self, at: float, record: _Event) -> Mapping[str, object]:
        metrics, step = record.fields.get("metrics"), record.fields.get("step")
        if self._board is not None and isinstance(metrics, Mapping) and isinstance(step, int):
            self._board.add(step, at, {f"validation/{name}": value for name, value in metrics.items()})
        return {"t": at, "event": record.event, **record.fields}


def _step_points(record: StepRecord, fields: Mapping[str, Value]) -> dict[str, float]:
    points = {
        f"train/{name}": value
        for name, value in fields.items()
        if name not in NOT_PLOTTED and isinstance(value, float | int)
    }
    if record.seconds > 0:
        points["train/samples_per_second"] = record.size / record.seconds
        if record.flops is not None:
            points["train/tflops"] = record.flops / record.seconds / 1e12
        tokens = fields.get("tokens")
        if isinstance(tokens, float | int):
            points["train/tokens_per_second"] = tokens / record.seconds
    return points
