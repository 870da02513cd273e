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
"""

import json
import math
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import final

from allranks.durable import refusing, replacing
from allranks.errors import RunError
from allranks.ordinary_file import open_to_append

_encode = json.JSONEncoder(allow_nan=False, check_circular=False).encode


@final
class Journal:
    """Appends one rank's events to `path`. Any thread may write: a line is one system call on an append-only file."""

    def __init__(self, path: Path, rank: int = 0) -> None:
        """Open `path`, made if absent, and begin a fresh line if a crash tore the last one.

        Raises:
            RunError: it cannot be written.
        """
        self.path = path
        self.rank = rank
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = open_to_append(path)
            size = os.fstat(self._descriptor).st_size
            if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
                os.write(self._descriptor, b"\n")
        except OSError as error:
            raise self._refusal(error) from error

    def write(self, event: str, *, t: float | None = None, **fields: object) -> None:
        """Append one line; `t` is now unless given.

        Args:
            event: one of the events in the module's docstring.
            t: Unix seconds at which it happened.
            fields: JSON values.

        Raises:
            RunError: the file system refuses (full, read-only).
        """
        self.append([{"t": time.time() if t is None else t, "event": event, **fields}])

    def append(self, lines: Sequence[Mapping[str, object]]) -> None:
        """Append lines that have their `t` and `event`, all in one system call. Raises RunError, as `write` does."""
        content = b"".join(map(_line, lines))
        try:
            written = os.write(self._descriptor, content)
            while written < len(content):
                content = content[written:]
                written = os.write(self._descriptor, content)
        except OSError as error:
            raise self._refusal(error) from error

    def close(self) -> None:
        """Close the file; closing twice is allowed."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _refusal(self, error: OSError) -> RunError:
        reason = error.strerror or str(error)
        return RunError(
            f"rank {self.rank}: {self.path} cannot be written: {reason}; make room there and resume the run"
        )


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
