"""The journal: what one rank did, append-only, one JSON object a line, readable while it grows and after any crash.

Every line begins with `t` (Unix seconds) and `event`; `samples` counts from the start of the run, over the whole world.

    start       rank, local_rank, world_size, pid, host, device, layout, attempt, total_steps     first of each worker;
                log_bytes: what its log has of earlier attempts
    plan        total_steps                            where only the data tells it; null where nobody knows
    step        step, samples, loss, lr, grad_norm, ledger, seconds; memory_bytes now and then
    evaluation  step, samples, metrics {name: value}, seconds
    checkpoint  step, samples, path, seconds           that the training waited; background_seconds until the commit
                                                       tier: memory, where it was a copy there
    resume      step, samples, path                    the checkpoint's; the steps after it are done again; tier
    left_out    first, past, ledger                    positions first .. past - 1, which this attempt does not feed
    decision    what, because                          step, where it belongs to one
    verdict     kind, what, evidence, next             likewise
    end         reason (done, stopped, failed), seconds {cause: seconds}, memory_bytes, error

A number that is not finite stands as null beside `<name>_text`: "nan", "inf" or "-inf", so that every strict reader of
JSON can read the line.

A disk that refuses lines for a while (full, an error) ends no training: they are held back, and written in their order
when it takes them again. What a resume will not do again stands here before a checkpoint counts (`flush`), so that a
disk that goes on refusing is met by the saves, and ends the run when too many of them have failed.
"""

import json
import math
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, final

from allranks.durable import refusing, replacing
from allranks.errors import RunError
from allranks.ordinary_file import open_to_append
from allranks.units import format_seconds

HELD_BYTES: Final = 16 << 20
"""So much is held back; then the oldest lines go."""

_encode = json.JSONEncoder(allow_nan=False, check_circular=False).encode


@final
class Journal:
    """Appends one rank's events to `path`. Any thread may write: a line is one system call on an append-only file.

    Attributes:
        warn: as given.
    """

    def __init__(self, path: Path, rank: int = 0, warn: Callable[[str], None] | None = None) -> None:
        """Open `path`, made if absent, and begin a fresh line if a crash tore the last one.

        Args:
            warn: told once of lines that are held back, and of those that are lost; called on any thread. None: what
                the file system refuses is raised at once instead, and nothing is held back.

        Raises:
            RunError: it cannot be opened.
        """
        self.path = path
        self.rank = rank
        self.warn = warn
        self._lock = threading.Lock()
        self._held: deque[bytes] = deque()
        self._held_bytes = self._num_lost = 0
        self._refused_at: float | None = None
        self._warned = False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = open_to_append(path)
            size = os.fstat(self._descriptor).st_size
            torn = size and os.pread(self._descriptor, 1, size - 1) != b"\n"
        except OSError as error:
            raise self._refusal(error) from error
        if torn:
            self._hold(b"\n")
            self._write_held()

    def write(self, event: str, *, t: float | None = None, **fields: object) -> None:
        """Append one line; `t` is now unless given.

        Args:
            event: one of the events in the module's docstring.
            t: Unix seconds at which it happened.
            fields: JSON values.

        Raises:
            RunError: the file system refuses (full, read-only), and lines are not held back.
            ValueError: it is closed.
        """
        self.append([{"t": time.time() if t is None else t, "event": event, **fields}])

    def append(self, lines: Sequence[Mapping[str, object]]) -> None:
        """Append lines that have their `t` and `event`, all in one system call. Raises as `write` does."""
        content = b"".join(map(_line, lines))
        with self._lock:
            self._check_open()
            self._hold(content)
            self._write_held()

    def flush(self) -> None:
        """See that every line stands in the file.

        Raises:
            RunError: some do not; they stay held back.
            ValueError: it is closed.
        """
        with self._lock:
            self._check_open()
            if (refused := self._write_held()) is not None:
                reason = refused.strerror or str(refused)
                raise RunError(f"lines of {self.path} cannot be written: {reason}; make room there")

    def close(self) -> None:
        """Close the file; what is still held back is lost, and told. Closing twice is allowed."""
        with self._lock:
            if self._descriptor < 0:
                return
            refused = self._write_held() if self._held else None
            os.close(self._descriptor)
            self._descriptor = -1
            if refused is not None and self.warn is not None:
                lost = self._num_lost + sum(map(_num_lines, self._held))
                self.warn(f"the last {lost} lines of {self.path} are lost: {refused.strerror or refused}")
            self._held.clear()

    def _check_open(self) -> None:
        if self._descriptor < 0:  # else the system's refusal would pass for a disk's, and the line wait for ever
            raise ValueError(f"{self.path} is closed: nothing is written to it any more")

    def _hold(self, content: bytes) -> None:
        self._held.append(content)
        self._held_bytes += len(content)
        while self._held_bytes > HELD_BYTES and len(self._held) > 2:
            oldest = self._held[1]  # but the first, which may go on a line that was torn
            self._num_lost += _num_lines(oldest)
            self._held_bytes -= len(oldest)
            del self._held[1]

    def _write_held(self) -> OSError | None:
        """Write what is held, in its order; why the file system takes no more of it. It raises where nobody is told."""
        while self._held or self._refused_at is not None:
            if not self._held:
                self._tell_of_gap()
            content, written = self._held[0], 0
            try:
                while written < len(content):
                    written += os.write(self._descriptor, content[written:])
            except OSError as error:
                self._held[0] = _after_short_write(content, written)
                self._held_bytes += len(self._held[0]) - len(content)
                self._bear(error)
                return error
            self._held.popleft()
            self._held_bytes -= len(content)
        return None

    def _bear(self, error: OSError) -> None:
        if self.warn is None:
            self._held.clear()
            self._held_bytes = 0
            raise self._refusal(error) from error
        self._refused_at = self._refused_at or time.time()
        if not self._warned:
            self._warned = True
            self.warn(
                f"rank {self.rank}: {self.path} cannot be written: {error.strerror or error}; its lines are held back "
                "until it can be, and no checkpoint counts before: make room there"
            )

    def _tell_of_gap(self) -> None:
        """The file takes lines again: say for how long it has not, and how many could not be kept until then."""
        seconds = time.time() - (self._refused_at or 0.0)
        lost, self._num_lost, self._refused_at = self._num_lost, 0, None
        what = f"{self.path.name} could not be written for {format_seconds(seconds)}: its lines were held back"
        what += f", and {lost} of them are lost" if lost else ", and none is lost"
        verdict = {"kind": "journal", "what": what, "evidence": [], "next": "see what fills that disk, or why it fails"}
        self._hold(_line({"t": time.time(), "event": "verdict", **verdict}))
        if lost and self.warn is not None:
            self.warn(what)

    def _refusal(self, error: OSError) -> RunError:
        reason = error.strerror or str(error)
        return RunError(
            f"rank {self.rank}: {self.path} cannot be written: {reason}; make room there and resume the run"
        )


def _after_short_write(content: bytes, written: int) -> bytes:
    """What is left of lines when so many bytes of them are written: a line that was torn begins anew, because others
    append to the file, too.
    """
    begun = content.rfind(b"\n", 0, written) + 1
    if begun == written or content[written : written + 1] == b"\n":
        return content[written:]
    return b"\n" + content[begun:]


def _num_lines(content: bytes) -> int:
    return sum(line != b"" for line in content.split(b"\n"))


def take_over(path: Path) -> None:
    """Put a copy in the place of a journal, in one rename: who still has the old file open appends where nobody reads.

    Raises:
        RunError: the file system refuses.
    """
    if path.exists():
        with refusing(path), replacing(path) as draft:
            shutil.copyfile(path, draft)


def _line(fields: Mapping[str, object]) -> bytes:
    try:
        text = _encode(fields)
    except ValueError:
        text = _encode(_finite(fields))
    return text.encode() + b"\n"


def _finite(fields: Mapping[str, object]) -> dict[str, object]:
    plain: dict[str, object] = {}
    for name, value in fields.items():
        if isinstance(value, float) and not math.isfinite(value):
            plain[name] = None
            plain[f"{name}_text"] = str(float(value))
        elif isinstance(value, Mapping):
            plain[name] = _finite(value)
        elif isinstance(value, list | tuple):
            plain[name] = [str(x) if isinstance(x, float) and not math.isfinite(x) else x for x in value]
        else:
            plain[name] = value
    return plain
