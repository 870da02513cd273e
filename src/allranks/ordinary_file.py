"""Files where anybody may have put something else in their place: a pipe, a device, a directory, a link, a wrong type.

Nothing here waits for a pipe's other end or reads a device that has no end; nothing but the named types is made of
what is read.
"""

import errno
import os
import stat
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter

T = TypeVar("T")

MOST_BYTES = 64 << 20
"""Of a record, a config or a plan: these are some kilobytes, a large plan is a megabyte."""


def open_ordinary(path: Path, *, follow: bool = True) -> tuple[int, int]:
    """Open an ordinary file for reading: its descriptor and its length in bytes.

    Args:
        follow: whether it may be a symbolic link to one.

    Raises:
        OSError: it is missing, may not be read, or is no ordinary file.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags if follow else flags | os.O_NOFOLLOW)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.EINVAL, "no ordinary file", str(path))
    return descriptor, status.st_size


def open_to_append(path: Path) -> int:
    """A descriptor of a file to read and append to, made if it is absent: never through a link, which leads to another.

    Raises:
        OSError: it is a link, or may not be written.
    """
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)


def read_ordinary(path: Path, last_bytes: int | None = None) -> bytes:
    """All of an ordinary file, or its last bytes. Raises OSError as `open_ordinary`."""
    descriptor, size = open_ordinary(path)
    with open(descriptor, "rb") as file:
        if last_bytes is not None:
            file.seek(max(0, size - last_bytes))
        return file.read()


def check_small(path: Path) -> None:
    """Raises OSError where it is no ordinary file, or larger than anything that is kept as one text."""
    descriptor, size = open_ordinary(path)
    os.close(descriptor)
    if size > MOST_BYTES:
        raise OSError(errno.EFBIG, f"larger than {MOST_BYTES >> 20} MB", str(path))


def read_small(path: Path) -> bytes:
    """All of what `check_small` lets pass. Raises OSError as that."""
    check_small(path)
    return read_ordinary(path)


def read_record(path: Path, kind: type[T]) -> T:
    """An ordinary file's JSON object as an object of the dataclass `kind`, whose types its members must have.

    Raises:
        OSError: as `read_small`.
        ValueError: it is anything else.
    """
    return TypeAdapter(kind).validate_json(read_small(path), strict=True)
