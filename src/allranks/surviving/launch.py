"""`allranks.launch`: run a function in several processes, from a script or a notebook, and get what they return."""

import contextlib
import os
import signal
import tempfile
import uuid
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle

from allranks.errors import AllranksError, ConfigError, ProcessError
from allranks.failure import INTERRUPTED, Failure
from allranks.launching.environment import read_environment
from allranks.layout import Layout, num_processes, parse_layout
from allranks.process_environment import NO_GPUS, num_cores
from allranks.recorded import note_error
from allranks.surviving.by_value import dumps

VALUE, ERROR = b"V", b"E"
MODULES = ("allranks.surviving.launch", "allranks.parallel.backend")  # what every process imports anyway


def launch(function: Callable[..., Any], *args: Any, nproc: int | None = None, layout: str | None = None) -> list[Any]:
    """Call `function(*args)` in `nproc` processes of this machine; what each returned, by rank.

    Inside, `allranks.join()` finds the other processes. The function may be a closure or defined in a notebook, and the
    calling script needs no `if __name__ == "__main__":`.

    Args:
        nproc: by default as many as the layout needs, or one a GPU, or two where there is none (on one core: one).
        layout: the layout that `join()` takes inside, where it is given none.

    Raises:
        ConfigError, LayoutError: before anything starts.
        ProcessError: a process was lost: killed, or ended (sys.exit, os._exit) before the function returned.
        KeyboardInterrupt: stopped by Ctrl-C.
        Exception: the first failing rank's own, with its traceback there as the cause.
    """
    return _launch(function, args, nproc, layout, {})


def launch_without_gpus(function: Callable[..., Any], *args: Any, nproc: int) -> list[Any]:
    """`launch` in processes that see no GPU of this machine, whatever this process sees."""
    return _launch(function, args, nproc, None, NO_GPUS)


def _launch(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    nproc: int | None,
    layout: str | None,
    environ: Mapping[str, str],
) -> list[Any]:
    environment = read_environment(os.environ)
    if environment.world_size > 1:
        raise ConfigError(
            f"launch() starts processes itself, but this one is already rank {environment.rank} of"
            f" {environment.world_size} ({environment.launcher}); call the function directly"
        )
    from allranks.surviving import forkserver

    forkserver.start(modules=MODULES, environ=environ)  # it imports torch while this process does
    from allranks.surviving.agent import run_workers

    nproc = _choose_nproc(nproc, layout)
    with tempfile.TemporaryDirectory(prefix="allranks-") as folder:
        outcome = run_workers(
            "allranks.surviving.launch:answer",
            (dumps((function, args)),),
            nproc=nproc,
            run_id=f"launch-{uuid.uuid4().hex[:8]}",
            log_dir=Path(folder),
            environ={**environ, **({} if layout is None else {"ALLRANKS_LAYOUT": layout})},
            replies=True,
        )
    if outcome.exit_code == INTERRUPTED:
        raise KeyboardInterrupt
    if outcome.first_failure is not None:
        _raise(outcome.first_failure, outcome.replies.get(outcome.first_failure.rank, b""))
    if outcome.exit_code:
        raise ProcessError(f"the processes were stopped from outside (exit code {outcome.exit_code})")
    return [_value(rank, outcome.replies.get(rank, b"")) for rank in range(nproc)]


def answer(payload: bytes, reply: Connection) -> int:
    """Run in each process: call the function, and send what it returns or raises."""
    # The user's function may be interrupted anywhere. What runs in the background of a shell ignores Ctrl-C, and so do
    # the processes it starts: but what is passed on to this one is meant.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    try:
        function, args = cloudpickle.loads(payload)
        reply.send_bytes(VALUE + dumps(function(*args)))
    except BaseException as error:
        note_error(error)
        # Ctrl-C comes twice, from the terminal and from the agent: the second shall not disturb the end.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with contextlib.suppress(Exception):  # an exception that cannot be pickled: its record tells
            reply.send_bytes(ERROR + dumps(error))
        raise
    return 0


def _choose_nproc(nproc: int | None, layout: str | None) -> int:
    import torch

    if nproc is not None and nproc < 1:
        raise ConfigError(f"nproc={nproc}: expected at least 1 process")
    available = nproc or torch.cuda.device_count() or min(2, num_cores())
    if layout is None:
        return available
    config = parse_layout(layout)
    chosen = nproc or num_processes(config, available)
    Layout.resolve(config, chosen)  # raises here, once, rather than in every process
    return chosen


def _value(rank: int, reply: bytes) -> Any:
    if reply[:1] != VALUE:
        raise ProcessError(f"rank {rank} ended, and the function had not returned there")
    return cloudpickle.loads(reply[1:])


def _raise(failure: Failure, reply: bytes) -> None:
    """Raise the exception that the rank raised, or what says how the rank ended."""
    sent = None
    with contextlib.suppress(Exception):  # classes of the other process may not be found in this one
        sent = cloudpickle.loads(reply[1:]) if reply[:1] == ERROR else None
    if isinstance(sent, AllranksError):
        raise sent  # its message says all
    if not failure.traceback:
        raise ProcessError(failure.render())
    if isinstance(sent, SystemExit):
        raise ProcessError(failure.brief()) from RemoteTraceback(failure)
    told = RuntimeError(failure.message.removeprefix("RuntimeError: "))
    raise (sent if isinstance(sent, Exception) else told) from RemoteTraceback(failure)


class RemoteTraceback(Exception):
    """The cause of an exception that `launch` raises: where it was raised, in the other process."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure = failure

    def __str__(self) -> str:
        return f"\nrank {self.failure.rank} on {self.failure.host}:\n{self.failure.traceback}"
