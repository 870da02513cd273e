"""One call in a process of its own: what it touches (a GPU, memory, the environment, threads) ends with it."""

import contextlib
import importlib
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import current_process, get_context
from multiprocessing.connection import Connection
from typing import Any, final

from allranks.errors import ProcessError
from allranks.lifeline import die_with_parent
from allranks.surviving import preload
from allranks.surviving.child import HELD_BACK
from allranks.surviving.forkserver import choose_start_method, main_hidden

OF_RANKS = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_", "OMPI_", "PMI_", "PMIX_", "MPI_"),
)
"""How the names of variables begin by which launchers tell a process which rank it is."""


@final
@dataclass(frozen=True, slots=True)
class _Start:
    """What the process is told: whose child it is, its environment, and where it works."""

    parent: int
    environ: Mapping[str, str]
    folder: str


def call_aside(entry: str, *args: Any, within: float | None = None) -> Any:
    """What `package.module:function` returns for `args` in a short-lived process; all of it travels by pickle.

    The process is forked from the fork server, which has imported everything, where that is sound. What it prints is
    shown nowhere.

    Args:
        within: seconds after which it is ended without an answer.

    Raises:
        TimeoutError: it took longer than `within`.
        ProcessError: the function raised, in one line, or its process ended before it had answered.
    """
    forked = choose_start_method().name == "forkserver"
    return _call("forkserver" if forked else "spawn", entry, args, within, os.environ)


def call_spawned(entry: str, *args: Any) -> Any:
    """The same from a rank of another launcher: in a fresh interpreter, that does not take itself for a rank.

    A fork server would stay as long as this process.
    """
    environ = {name: value for name, value in os.environ.items() if not name.startswith(OF_RANKS)}
    return _call("spawn", entry, args, None, environ)


def _call(method: str, entry: str, args: tuple[Any, ...], within: float | None, environ: Mapping[str, str]) -> Any:
    if current_process().daemon:
        raise ProcessError("this process was started as a daemon, which may start no other")
    context: Any = get_context(method)
    receiver, sender = context.Pipe(duplex=False)
    start = _Start(os.getpid(), dict(environ), os.getcwd())
    process = context.Process(target=_answer, args=(start, entry, args, sender), daemon=True)
    try:
        with main_hidden():
            process.start()
        sender.close()
        if not receiver.poll(within):
            raise TimeoutError(f"{entry} took longer than {within} s")
        failure, found = receiver.recv()
    except TimeoutError:  # an OSError, too
        process.kill()
        raise
    except (EOFError, OSError):
        process.join()
        raise ProcessError(f"the process that was to answer ended first (exit code {process.exitcode})") from None
    except BaseException:
        process.kill()
        raise
    finally:
        sender.close()
        receiver.close()
    process.join()
    if failure:
        raise ProcessError(failure)
    return found


def _answer(start: _Start, entry: str, args: tuple[Any, ...], reply: Connection) -> None:
    """Be the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the command's, with which this process ends
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_BACK)  # multiprocessing ends what is left so
    die_with_parent(preload.REPORT.pid if preload.REPORT is not None else start.parent)
    os.environ.clear()
    os.environ.update(start.environ)
    os.chdir(start.folder)
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        for descriptor in (1, 2):
            os.dup2(nowhere.fileno(), descriptor)
    module, _, name = entry.partition(":")
    try:
        found = "", getattr(importlib.import_module(module), name)(*args)
    except BaseException as error:  # a user's code may end in SystemExit
        line = next(iter(str(error).splitlines()), "")
        found = f"{type(error).__name__}: {line}", None
    with contextlib.suppress(BrokenPipeError):  # the command has ended
        reply.send(found)
