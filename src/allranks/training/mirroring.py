"""Checkpoints on their way to the mirror, beside the training."""

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import final

from allranks.checkpointing.checkpoint import Checkpoint, list_checkpoints
from allranks.checkpointing.mirror import Mirror
from allranks.errors import CheckpointError

LOOK_SECONDS = 1.0


@final
class Mirroring:
    """Brings what the first rank has committed to the mirror, one at a time: of those that wait the newest, and before
    it those that stay for ever.

    What the mirror refuses does not end the run: its own checkpoints are whole, and the next one is tried again, with
    what stays for ever and was refused. The first one is followed by those that an earlier process could not bring.

    Args:
        keep, keep_every: which stay there, as in RUN/checkpoints.
        warn: told once what goes wrong, until all is there again; and at the end what is not there.
    """

    def __init__(self, mirror: Mirror, keep: int, keep_every: int | None, warn: Callable[[str], None]) -> None:
        self._mirror = mirror
        self._keep, self._keep_every = keep, keep_every
        self._warn = warn
        self._warned = False
        self._why = "what brings checkpoints to the mirror has ended"
        self._tidy = False  # whether nothing is there but what counts: an earlier process may have died
        self._lock = threading.Lock()
        self._waiting: list[Checkpoint] = []
        self._missing: list[Checkpoint] = []  # the newest, and those that stay for ever, until they are there
        self._caught_up = keep_every is None
        self._under_way: Checkpoint | None = None
        self._thread: threading.Thread | None = None
        self._num_blocks = 0

    def bring(self, checkpoint: Checkpoint) -> None:
        """Bring this one next; returns at once."""
        with self._lock:
            self._missing = [one for one in self._missing if self._stays(one) and one.path.exists()] + [checkpoint]
            self._waiting = [one for one in self._missing if one is not self._under_way]
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="allranks-mirror", daemon=True)
                self._thread.start()

    def leased(self) -> frozenset[Path]:
        """What must stay where it is until it was brought."""
        with self._lock:
            return frozenset(one.path for one in (*self._waiting, self._under_way) if one is not None)

    def finish(self, progress: Callable[[], None]) -> None:
        """Wait until nothing is on its way, and tell what is not there; `progress` is called whenever another block was
        brought.
        """
        seen = -1
        while (thread := self._thread) is not None and thread.is_alive():
            thread.join(LOOK_SECONDS)
            if self._num_blocks != seen:
                seen = self._num_blocks
                progress()
        if self._missing:
            names = ", ".join(one.path.name for one in self._missing)
            with suppress(Exception):  # all is saved, and where it cannot be told there is nobody to tell
                self._warn(f"{self._why}; the run ends, and has no copy of {names} there: a resume makes it")

    def _run(self) -> None:
        try:
            while (checkpoint := self._next()) is not None:
                try:
                    self._make_room()
                    self._mirror.bring(checkpoint, self._advance)
                    with self._lock:
                        self._missing = [one for one in self._missing if one is not checkpoint]
                    self._catch_up(checkpoint)
                    self._prune()
                    with self._lock:  # once nothing that was refused is missing, what goes wrong is news again
                        self._warned = self._warned and any(one not in self._waiting for one in self._missing)
                except Exception as error:  # whatever it is: the next one is tried, and nothing waits for a dead thread
                    self._tell(error)
                    self._advance()  # to the next one: who waits for all of them sees that
        finally:
            with self._lock:
                if self._thread is threading.current_thread():  # it was ended out of its turn
                    self._thread = self._under_way = None

    def _make_room(self) -> None:
        """Let go first what should not be there where the last time came to no end: what it takes the next one may
        lack, and the one after that. Raises CheckpointError: nothing comes further there.
        """
        if not self._tidy:
            try:
                self._prune()
            except CheckpointError as error:
                if isinstance(error.__cause__, TimeoutError):  # who would wait for the next one to stand still, too?
                    raise
        self._tidy = False

    def _prune(self) -> None:
        self._mirror.prune(self._keep, self._keep_every, self._advance)
        self._tidy = True

    def _catch_up(self, checkpoint: Checkpoint) -> None:
        """Bring what stays for ever beside this one and is not there yet; what is damaged stays where it is."""
        if self._caught_up:
            return
        for path in reversed(list_checkpoints(checkpoint.path.parent)):
            try:
                other = Checkpoint.open(path, checkpoint.manifest.run)
            except CheckpointError:
                continue
            if self._stays(other) and other.step != checkpoint.step:
                self._mirror.bring(other, self._advance)
        self._caught_up = True

    def _next(self) -> Checkpoint | None:
        """What is to be brought now; None: nothing waits, and who comes later starts another thread."""
        with self._lock:
            self._under_way = self._waiting.pop(0) if self._waiting else None
            if self._under_way is None:
                self._thread = None
            return self._under_way

    def _stays(self, checkpoint: Checkpoint) -> bool:
        return self._keep_every is not None and checkpoint.step % self._keep_every == 0

    def _tell(self, error: Exception) -> None:
        """Once; where it cannot be told either (the disk with the journal is full, say), with the next one."""
        self._why = str(error)
        if not self._warned:
            with suppress(Exception):
                self._warn(f"{error}; the run goes on, and tries again after every checkpoint")
                self._warned = True

    def _advance(self) -> None:
        self._num_blocks += 1
