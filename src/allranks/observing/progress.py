"""The line that says how far a run is: rank 0's, live on a terminal, now and then a plain line elsewhere."""

import time
from typing import final

from rich.console import Console
from rich.live import Live
from rich.text import Text

from allranks.units import format_count, format_seconds

REFRESHES_PER_SECOND = 4
PLAIN_SECONDS = 10.0
PLAIN_PARTS = 10
BAR_CELLS = 24


@final
class ProgressLine:
    """Step, loss, samples per second and what is left.

    On a terminal the loop only stores three values and a thread of rich draws one line four times a second (as plain
    text: rich's own Progress costs four times as much). Elsewhere a line is printed at every tenth of the run, and when
    ten seconds have passed since the last.
    """

    def __init__(self, total_steps: int | None, *, first_step: int = 0, console: Console | None = None) -> None:
        """Begin to show.

        Args:
            total_steps: the last step's number; None where nobody knows it.
            first_step: steps that earlier attempts have done.
            console: where to; the standard error stream unless given.
        """
        self._console = console or Console(stderr=True)
        self._total = total_steps
        self._step = self._origin = self._printed = first_step
        self._loss: float | None = None
        self._samples_per_second = 0.0
        self._skipped = 0
        self._start = time.perf_counter()
        self._next_time = self._start + PLAIN_SECONDS
        self._part = max(1, -(-total_steps // PLAIN_PARTS)) if total_steps else 0
        self._next_step = self._after(first_step)
        self._live: Live | None = None
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(
                console=self._console, refresh_per_second=REFRESHES_PER_SECOND, get_renderable=self._line_with_bar
            )
            self._live.start()

    def update(self, step: int, loss: float | None, samples_per_second: float, skipped: int = 0) -> None:
        """Step `step` is done; `loss` is the newest that is known; `skipped` steps so far have changed nothing."""
        self._step = step
        self._loss = loss
        self._samples_per_second = samples_per_second
        self._skipped = skipped
        if self._live is None and (step >= self._next_step or time.perf_counter() >= self._next_time):
            self._print()

    def say(self, text: str) -> None:
        """A line of its own, above what is shown."""
        self._console.print(text, markup=False, emoji=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Show the last state and stop; closing twice is allowed."""
        if self._live is not None:
            self._live.stop()
            self._live = None
            self._printed = self._step
        elif self._step > self._printed:
            self._print()

    def text(self) -> str:
        """The line without its bar: `step 120/1000  12%  loss 2.3456  1.2k samples/s  ETA 3 min 05 s`."""
        parts = [f"step {self._step}" + (f"/{self._total}" if self._total else "")]
        if self._total:
            parts.append(f"{100 * self._step // self._total}%")
        if self._loss is not None:
            parts.append(f"loss {self._loss:.4f}")
        if self._skipped:
            parts.append(f"{self._skipped} skipped")
        if self._step > self._origin:
            parts.append(f"{format_count(self._samples_per_second)} samples/s")
        if self._total and self._origin < self._step < self._total:
            seconds_per_step = (time.perf_counter() - self._start) / (self._step - self._origin)
            parts.append(f"ETA {format_seconds(seconds_per_step * (self._total - self._step))}")
        return "  ".join(parts)

    def _line_with_bar(self) -> Text:
        line = Text(no_wrap=True, overflow="ellipsis")
        if self._total:
            cells = BAR_CELLS * min(self._step, self._total) // self._total
            line.append("━" * cells, style="green").append("━" * (BAR_CELLS - cells), style="bright_black").append("  ")
        return line.append(self.text())

    def _print(self) -> None:
        self._console.print(self.text(), markup=False, highlight=False, soft_wrap=True)
        self._printed = self._step
        self._next_step = self._after(self._step)
        self._next_time = time.perf_counter() + PLAIN_SECONDS

    def _after(self, step: int) -> float:
        return (step // self._part + 1) * self._part if self._part else float("inf")
