"""The fork server: one process that has imported everything, from which workers start in milliseconds.

Start it first: it imports while the command parses, checks and imports on the other core. It ends by itself when the
command ends, and when its last worker has. It is used only if it is sound (preload.py); else workers are spawned, each
a fresh interpreter, and a Decision says because.
"""

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, get_context, set_forkserver_preload
from types import MappingProxyType, ModuleType
from typing import Literal, final

from allranks.process_environment import NO_SHADOWS, changed_environment
from allranks.surviving import preload
from allranks.surviving.interrupts import SIGNALS
from allranks.verdict import Decision

# What `import torch` leaves for later and a first step of DDP or FSDP2 with AdamW needs; measured by bench/start.py.
ALWAYS = ("torch", "torch.distributed.fsdp", "torch._dynamo", "torch.profiler", "allranks.surviving.child")
# The server computes nothing, and a pool of OpenMP threads would not survive a fork. NVML counts GPUs without CUDA.
SERVER_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1", **NO_SHADOWS}
# Variables that libraries read when they are imported; a worker forked later cannot change what they said.
READ_AT_IMPORT = ("OMP_", "MKL_", "KMP_", "OPENBLAS_", "CUDA_", "NVIDIA_", "TORCH", "PYTORCH", "PYTHON", "LD_")
NOTHING: Mapping[str, str] = MappingProxyType({})

REQUESTS = tuple(number for number in SIGNALS if number != signal.SIGINT)


@final
@dataclass(frozen=True, slots=True)
class StartMethod:
    """How workers are started, and why so."""

    name: Literal["forkserver", "spawn"]
    decision: Decision


@final
@dataclass(frozen=True, slots=True)
class _Preload:
    """What a server has imported, and the variables under which it did."""

    task: str | None
    modules: tuple[str, ...]
    variables: tuple[tuple[str, str], ...]


@final
class _Server:
    """The one fork server that multiprocessing keeps."""

    has: _Preload | None = None


_server = _Server()


def start(task: str | None = None, modules: Sequence[str] = (), environ: Mapping[str, str] = NOTHING) -> None:
    """Start the fork server and return at once; does nothing where one runs for the same imports and variables.

    Args:
        task: a task as on the command line (`file.py:Name`); its module is imported last.
        modules: dotted names of what else every worker needs, the module of its entry above all.
        environ: variables that the workers will have otherwise than this process: it imports under them, too.
    """
    if sys.platform != "linux":
        return  # fork is not safe beside the system libraries that torch uses on macOS
    both = {**os.environ, **environ}
    variables = tuple(sorted((name, value) for name, value in both.items() if name.startswith(READ_AT_IMPORT)))
    wanted = _Preload(task, tuple(modules), variables)
    if _server.has not in (None, wanted):
        forkserver._forkserver._stop()  # type: ignore[attr-defined]  # what it has imported is not what is wanted now
    _server.has = wanted
    set_forkserver_preload([preload.__name__])
    told = {"modules": [*ALWAYS, *modules], "task": task, "sys_path": sys.path, "parent": os.getpid()}
    with changed_environment({**environ, **SERVER_ENVIRONMENT, preload.VARIABLE: json.dumps(told)}):
        _start_unsignalled()  # nothing where it runs; again where somebody has killed it


def _start_unsignalled() -> None:
    """A request to stop may be sent to every process (Slurm does): of it the server, and multiprocessing's process that
    cleans up behind it, must not end before the workers have saved. They keep the mask, and the server makes it whole
    (starting the other takes SIGTERM out of it, which that ignores); workers drop it (child.py).
    """
    held = signal.pthread_sigmask(signal.SIG_BLOCK, REQUESTS)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


def choose_start_method(environ: Mapping[str, str] = NOTHING) -> StartMethod:
    """Wait until the fork server has imported what the last `start` asked for, and see whether it can be used.

    Starts one where none runs, and another where variables that are read at import have changed since. `environ` is
    `start`'s.
    """
    has = _server.has
    start(environ=environ) if has is None else start(has.task, has.modules, environ)
    if sys.platform != "linux":
        return StartMethod("spawn", Decision("workers are spawned", f"forking torch is not safe on {sys.platform}"))
    report = _ask()
    hindrance = report if isinstance(report, str) else report.hindrance()
    if isinstance(report, str) or hindrance is not None:
        return StartMethod("spawn", Decision("workers are spawned", str(hindrance)))
    because = f"it imported everything in {report.seconds:.1f} s, has one thread and has not touched CUDA"
    return StartMethod("forkserver", Decision("workers start from a fork server", because))


def _ask() -> preload.Report | str:
    """The server's report, through a process forked from it; or why there is none."""
    context = get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    try:
        process = context.Process(target=preload.send_report, args=(sender,), daemon=True)
        with main_hidden():
            process.start()
        sender.close()
        fields = json.loads(receiver.recv_bytes())
        process.join()
    except (EOFError, OSError):
        return "the fork server ended while it imported"
    finally:
        receiver.close()
        sender.close()
    return "this program runs a fork server of its own" if fields is None else preload.Report(**fields)


@contextlib.contextmanager
def main_hidden() -> Iterator[None]:
    """Start processes without running the program's main file again in each.

    So a script needs no `if __name__ == "__main__":`, and a notebook no file; the command's imports are not repeated.
    Nor does a user's file take the place of a module that the interpreter needs before it has this process's path.
    """
    real = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        with changed_environment(NO_SHADOWS):
            yield
    finally:
        sys.modules["__main__"] = real
