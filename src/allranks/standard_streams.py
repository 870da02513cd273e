"""Standard streams whose reader may go away: what is printed is then lost, and the work goes on.

`allranks train | head` closes the pipe after ten lines, a terminal is hung up, a log's disk is full, a service manager
starts a command without standard streams at all, a locale lacks a letter. None of these is a reason to end a training
of days.
"""

import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, final

_GONE = (errno.EPIPE, errno.EIO, errno.EBADF)
"""Of a reader that does not come back; a full disk may have room again."""


class OtherStream(io.TextIOBase):
    """A text stream that is another one for whoever writes to it, or sets how it is written (`reconfigure`).

    Attributes:
        stream: that other one.
    """

    def __init__(self, stream: "TextIO | OtherStream") -> None:
        self.stream = stream

    def __del__(self) -> None:
        """Nothing: io's own would close, and so flush, what is somebody else's and may be closed already."""

    def __getattr__(self, name: str) -> Any:
        """What only the other stream has: reconfigure, line_buffering, name, mode ..."""
        if name == "stream":  # before it is there
            raise AttributeError(name)
        return getattr(self.stream, name)

    def flush(self) -> None:
        """Flush the stream."""
        self.stream.flush()

    def isatty(self) -> bool:
        """Whether the stream is a terminal."""
        return self.stream.isatty()

    def fileno(self) -> int:
        """The stream's file descriptor."""
        return self.stream.fileno()

    def writable(self) -> bool:
        """Yes."""
        return True

    @property
    def buffer(self) -> Any:
        """Where the stream's bytes go."""
        return self.stream.buffer

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The stream's encoding."""
        return self.stream.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        """What the stream does with what it cannot encode."""
        return self.stream.errors

    @property
    def newlines(self) -> Any:  # type: ignore[override]
        """The stream's ends of lines."""
        return self.stream.newlines


@final
class SteadyStream(OtherStream):
    """The other stream, which never fails."""

    def write(self, text: str) -> int:
        """Write what can be written."""
        with self._steady():
            try:
                self.stream.write(text)
            except UnicodeEncodeError:  # nothing of it was written; `strict` is what Python has for standard output
                self.stream.write(_encodable(text, self.stream.encoding))
        return len(text)

    def flush(self) -> None:
        """Flush what can be flushed."""
        with self._steady():
            self.stream.flush()

    def finish(self) -> None:
        """Let go of what a full disk has not taken: Python flushes once more at its end, and would end with 120."""
        try:
            self.stream.flush()
        except OSError:
            _send_nowhere(self.stream)
        except ValueError:
            pass  # the user closed it

    @contextlib.contextmanager
    def _steady(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in _GONE:
                _send_nowhere(self.stream)


@contextlib.contextmanager
def steady_streams() -> Iterator[None]:
    """Inside, printing never fails; streams that were not there when the process began lead nowhere from here on."""
    open_missing()
    out, err = SteadyStream(sys.stdout), SteadyStream(sys.stderr)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            yield
        finally:
            out.finish()
            err.finish()


def open_missing() -> None:
    """Give descriptors 0, 1 and 2 to the null device where they are closed: the next file would get their numbers.

    A journal that is descriptor 1 would hold what a library prints. Processes that are started inherit them.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free: this one
    # Python has None for what was closed when it began.
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 (for the life of the process)
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115


def _encodable(text: str, encoding: str) -> str:
    """The text with escapes for what `encoding` lacks: a path's bytes that are no UTF-8, a bar in a Latin locale."""
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _send_nowhere(stream: TextIO | OtherStream) -> None:
    """So that neither what is written later nor what Python flushes at the end fails again."""
    with contextlib.suppress(OSError, ValueError):  # a stream without a descriptor has nothing to send
        descriptor = stream.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        if nowhere == descriptor:
            # It was closed, and was the lowest number that is free: closed again, the next file would get it.
            os.set_inheritable(nowhere, True)
            return
        os.dup2(nowhere, descriptor)
        os.close(nowhere)
