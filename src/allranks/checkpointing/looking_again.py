"""A name that another host has given, looked for from here. No torch.

An NFS client that has once looked for a name and not found it goes on saying so, until what it remembers of the
directory is too old (nfs(5): lookupcache=all, acdirmin=30 s and acdirmax=60 s by default), or until it has changed the
directory itself: then it sees that another has, too, and asks the server for every name again.
"""

import os
import secrets
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

PATIENCE_SECONDS: Final = 90.0
"""More than a client's acdirmax, so that it has asked the server by then also where this user may not write."""
ASKED_SECONDS: Final = 5.0
"""For a server that has been asked to answer, where whoever asks may as well be wrong about the file system."""
_REST_SECONDS: Final = (0.05, 0.2, 1.0)  # the last one again and again


def await_name(path: Path, seconds: float = PATIENCE_SECONDS) -> bool:
    """Wait until a name is to be seen of which another rank has said that it is there; whether it is.

    Args:
        path: the name, in a directory that several hosts share.
        seconds: for how long; 0.0: this client is made to ask the server, once.
    """
    deadline, looks = time.monotonic() + seconds, 0
    while not os.path.lexists(path):
        if looks > 0 and time.monotonic() >= deadline:
            return False
        if looks > 0:
            time.sleep(_REST_SECONDS[min(looks, len(_REST_SECONDS)) - 1])
        _change(path.parent)
        looks += 1
    return True


def await_run(path: Path) -> None:
    """As `await_name`, for the directory of a Run that another host has made or found at `path`.

    Where there is none after all, as on hosts without a file system in common, whoever opens it says so.
    """
    asks = os.access(path.parent, os.W_OK)  # then a change there has the server asked
    if await_name(path, ASKED_SECONDS if asks else PATIENCE_SECONDS):
        await_name(path / "run.json")


def _change(directory: Path) -> None:
    """Make an entry and remove it: whoever may not write there waits until the client asks by itself."""
    entry = directory / f".look-{secrets.token_hex(4)}"
    with suppress(OSError):
        entry.mkdir()
        entry.rmdir()
