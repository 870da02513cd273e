"""How a process of allranks ends: its exit functions, its files, its code, and no destructors of compiled libraries."""

import atexit
import contextlib
import gc
import io
import os
import sys
import threading
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, final

from allranks.failure import DONE

HOLDING_BACK = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
"""Files that keep what is written to them; text first, which writes into the others."""

FLUSH_SECONDS = 10.0  # for what may be a pipe that nobody reads


def end_process(code: int) -> NoReturn:
    """End this process, a worker or a command, with its exit code.

    Its exit functions have ended then, and where all went well its threads; what files hold back is written.

    Destructors do not run: that of a process group waits for collectives that peers never join, and can wait for ever
    for a thread of its own that needs Python's lock (torch 2.13, where DDP holds the last reference).
    """
    if code == DONE:
        # The interpreter's own first step: idle threads of an executor are told to end, and would wait for ever else.
        threading._shutdown()  # type: ignore[attr-defined]  # CPython's, 3.11 to 3.14
    atexit._run_exitfuncs()  # the user's may close files
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    writer = threading.Thread(target=_flush_all, daemon=True)
    writer.start()
    writer.join(FLUSH_SECONDS)
    os._exit(code)


def is_observed() -> bool:
    """Whether somebody waits for this process to end as Python ends: a profiler, a debugger, `python -i`."""
    tools: Any = getattr(sys, "monitoring", None)  # from Python 3.12
    watched = tools is not None and any(tools.get_tool(number) for number in range(6))
    return watched or bool(sys.getprofile() or sys.gettrace() or sys.flags.interactive)


@final
class _Hidden:
    """Files that the collector does not know of any more."""

    files: Sequence[Any] = ()


def freeze() -> None:
    """As `gc.freeze`, before this process forks others: files that are open now are written out by each at its end.

    They hold nothing back afterwards, which each of them would write again.
    """
    gc.collect()
    _flush_all()
    _Hidden.files = _list_open(gc.get_objects())
    gc.freeze()


def _list_open(objects: Iterable[Any]) -> list[Any]:
    # By its type: isinstance() asks objects for attributes, of which torch warns that some are deprecated.
    return [one for one in objects if issubclass(type(one), HOLDING_BACK)]


def _flush_all() -> None:
    found = [*_list_open(gc.get_objects()), *_Hidden.files]
    for kind in HOLDING_BACK:
        for one in found:
            if isinstance(one, kind):
                with contextlib.suppress(Exception):  # closed, detached, a full disk: none keeps the others waiting
                    one.flush()
