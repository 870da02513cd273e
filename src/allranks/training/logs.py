"""One log per rank: rank 0 keeps the terminal and copies what Python prints there, the others write to theirs alone."""

import contextlib
import io
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO, final

from allranks.durable import refusing
from allranks.ordinary_file import open_to_append
from allranks.standard_streams import OtherStream, SteadyStream, steady_streams

STYLING = re.compile(r"\x1b\[[0-9;]*m|\x1b\]8;[^\x1b\x07]*(?:\x1b\\|\x07)")  # colours and links
MOVING = re.compile(r"\x1b\[[0-9;?]*[A-HJKSTfhl]")  # what a progress line is redrawn with


@contextlib.contextmanager
def log_of_rank(path: Path, *, rank: int) -> Iterator[int]:
    """Send what this process prints to `path`, which is appended to; on leaving, everything is as before.

    Gives the length of the log so far, in bytes: what earlier attempts have printed.

    Rank 0: Python's stdout and stderr go to both, without colours, and without the redrawing of a progress line. Other
    ranks: file descriptors 1 and 2 go to the log, so that compiled code and child processes write there as well.

    Raises:
        RunError: it cannot be written.
    """
    with refusing(path):
        descriptor = open_to_append(path)
    try:
        begin = os.fstat(descriptor).st_size
        with _copied(descriptor) if rank == 0 else _redirected(descriptor):
            yield begin
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _redirected(descriptor: int) -> Iterator[None]:
    _flush()
    kept = {target: os.dup(target) for target in (1, 2)}
    try:
        for target in kept:
            os.dup2(descriptor, target)
        with steady_streams():
            for steady in (sys.stdout, sys.stderr):
                stream = steady.stream if isinstance(steady, SteadyStream) else steady
                if isinstance(stream, io.TextIOWrapper):
                    stream.reconfigure(line_buffering=True)  # a killed worker leaves its last line
            yield
    finally:
        _flush()
        for target, copy in kept.items():
            os.dup2(copy, target)
            os.close(copy)


@contextlib.contextmanager
def _copied(descriptor: int) -> Iterator[None]:
    stdout, stderr = SteadyStream(sys.stdout), SteadyStream(sys.stderr)
    try:
        with (
            contextlib.redirect_stdout(CopyingStream(stdout, descriptor)),
            contextlib.redirect_stderr(CopyingStream(stderr, descriptor)),
        ):
            yield
    finally:
        _flush()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError, OSError):
            stream.flush()


@final
class CopyingStream(OtherStream):
    """The other stream, of which complete lines are copied to a file."""

    def __init__(self, stream: TextIO | OtherStream, descriptor: int) -> None:
        super().__init__(stream)
        self._descriptor = descriptor
        self._rest = ""

    def write(self, text: str) -> int:
        """Write to the stream; a line goes to the log when it is complete."""
        written = self.stream.write(text)
        if MOVING.search(text):
            return written
        *lines, self._rest = (self._rest + STYLING.sub("", text)).split("\n")
        if lines:
            kept = "".join(line.rpartition("\r")[2] + "\n" for line in lines)
            with contextlib.suppress(OSError):  # a full disk: the training matters more than what it says
                os.write(self._descriptor, kept.encode("utf-8", "backslashreplace"))
        return written
