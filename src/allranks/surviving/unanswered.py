"""A call that touches a disk, for which the agent does not wait without end: the disk may be what hangs."""

import threading
from collections.abc import Callable
from typing import TypeVar

DISK_SECONDS = 5.0

Found = TypeVar("Found")


def within(seconds: float, call: Callable[[], Found], otherwise: Found) -> Found:
    """What `call` returns, or `otherwise` where it has not returned in time: then its thread is left to itself.

    Raises what `call` raises in time.
    """
    found, failed = [otherwise], list[BaseException]()

    def run() -> None:
        try:
            found[0] = call()
        except BaseException as error:  # it is raised below, by whoever has asked
            failed.append(error)

    thread = threading.Thread(target=run, name="allranks-disk", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no more threads may be started here
        return call()
    thread.join(seconds)
    if failed:
        raise failed[0]
    return found[0]
