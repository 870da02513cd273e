"""Who beside its owner may write into a directory: what is read there later is then theirs, too. No torch."""

import grp
import pwd
import stat
from collections.abc import Iterable
from pathlib import Path


def tell_writers(directories: Iterable[Path]) -> list[str]:
    """A line for the first of these directories that others may write into; [] where there is none.

    A user's own group, which has the user's name and nobody else in it, is nobody else: many systems let it write.
    The sticky bit protects nothing here: who may add a directory adds a newer checkpoint.
    """
    for directory in directories:
        if who := _others(directory):
            mode = stat.S_IMODE(directory.stat().st_mode)
            return [
                f"{directory} may be written by {who} (mode {mode:04o}): who does decides what is resumed and which "
                f"Task's file runs; `chmod -R go-w {directory}` unless you trust them"
            ]
    return []


def _others(directory: Path) -> str:
    """Everybody, a group by its name, or ""."""
    try:
        status = directory.stat()
    except OSError:
        return ""
    if status.st_mode & stat.S_IWOTH:
        return "everybody"
    if not status.st_mode & stat.S_IWGRP:
        return ""
    try:
        owner = pwd.getpwuid(status.st_uid).pw_name
        group = grp.getgrgid(status.st_gid)
    except KeyError:  # a directory service that does not answer
        return f"group {status.st_gid}"
    own = group.gr_name == owner and set(group.gr_mem) <= {owner}
    return "" if own else f"group {group.gr_name}"
