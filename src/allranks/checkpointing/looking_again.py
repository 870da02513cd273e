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


def _change(directory: Path) -> None:
    """Make an entry and remove it: whoever may not write there waits until the client asks by itself."""
    entry = directory / f".look-{secrets.token_hex(4)}"
    with suppress(OSError):
        entry.mkdir()
        entry.rmdir()
