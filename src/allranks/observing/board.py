"""TensorBoard's side of the recorder: points by step, brought to its file about once a second.

What the disk refuses for a while is held back: charts end no training.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final, final

from allranks.errors import RunError

if TYPE_CHECKING:
    from allranks.observing.tensorboard import ScalarWriter

FLUSH_SECONDS: Final = 1.0
"""How often the file is flushed."""

HELD_POINTS: Final = 50_000
"""Steps that are held back for TensorBoard; then the oldest go."""


@final
class Board:
    """Points for one run of TensorBoard's. Importing its library takes 0.1 s, so that is done beside the first steps.

    Args:
        directory: RUN/tensorboard.
        purge_from: the first step to come, where an earlier attempt may have recorded it too.
        warn: told once of points that are held back, and of those that are lost; None: what cannot be written is
            raised.
    """

    def __init__(self, directory: Path, purge_from: int | None, warn: Callable[[str], None] | None) -> None:
        self._points: deque[tuple[int, float, dict[str, float]]] = deque()
        self._directory, self._purge_from = directory, purge_from
        self._warn, self._warned, self._num_lost = warn, False, 0
        self._writer: ScalarWriter | None = None
        self._error: BaseException | None = None
        self._opening: threading.Thread | None = None
        self._next_write = 0.0

    def add(self, step: int, at: float, points: dict[str, float]) -> None:
        """Keep the points of one step until `write_down`."""
        self._points.append((step, at, points))
        while len(self._points) > HELD_POINTS:
            self._points.popleft()
            self._num_lost += 1

    def write_down(self) -> None:
        """Write what was added, once the library is there.

        Raises:
            RunError: the file cannot be opened; or be written, and nobody is to be told instead.
        """
        if self._error is not None:
            self._bear(self._error)
        now = time.monotonic()
        if now < self._next_write or (self._opening is not None and self._opening.is_alive()):
            return
        if self._writer is None:
            if self._points:
                self._opening = threading.Thread(target=self._open, daemon=True)
                self._opening.start()
            return
        self._next_write = now + FLUSH_SECONDS
        try:
            while self._points:
                self._writer.write(*self._points[0])
                self._points.popleft()  # the writer has it, also where it cannot bring it to the disk yet
            self._writer.flush()
        except RunError as error:
            self._bear(error)

    def flush(self) -> None:
        """Wait for the library, if there is anything to write, and bring everything to the file; as `write_down`."""
        self._settle()
        if self._error is not None:  # of a time that is over: it is tried again now
            self._bear(self._error)
        for _ in range(2):  # the first may find nothing open
            self._settle()
            self._next_write = 0.0
            self.write_down()

    def close(self) -> None:
        """Close the file, if one was opened; what it has not taken is lost, and told."""
        self._settle()
        try:
            if self._writer is not None:
                self._writer.close()
        except RunError as error:
            if self._warn is None:
                raise
            self._warn(f"{error}; what was held back is lost")
        self._num_lost += len(self._points)
        self._points.clear()
        if self._num_lost and self._warn is not None:
            self._warn(f"{self._num_lost} steps are not in {self._directory}, which could not be written for too long")
        self._num_lost = 0

    def _settle(self) -> None:
        """Wait until the file is open, or was refused."""
        if self._opening is not None:
            self._opening.join()

    def _bear(self, error: BaseException) -> None:
        if self._warn is None or not isinstance(error, RunError):
            raise error
        self._error, self._next_write = None, time.monotonic() + FLUSH_SECONDS
        if not self._warned:
            self._warned = True
            self._warn(f"{error}; what comes is held back until it can be written")

    def _open(self) -> None:
        try:
            from allranks.observing.tensorboard import ScalarWriter

            self._writer = ScalarWriter(self._directory, purge_from=self._purge_from)
        except BaseException as error:  # borne or raised by the next write_down, on the thread that asks
            self._error = error
