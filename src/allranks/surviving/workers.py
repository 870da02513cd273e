"""The worker processes of this host, seen from the agent: start, wait, signal, exit codes and replies."""

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess, SpawnProcess
from typing import final

from allranks.surviving.child import WorkerStart, run_worker
from allranks.surviving.forkserver import main_hidden
from allranks.surviving.outcome import UNKNOWN_CODE


@final
@dataclass(frozen=True, slots=True)
class Exit:
    """How a worker ended: its exit code (negative: the signal that killed it), and when, in Unix seconds."""

    code: int
    when: float


@final
class LocalWorkers:
    """All workers of one attempt.

    Attributes:
        exits: local rank -> Exit, of those that have ended.
        replies: local rank -> what the worker sent, of those that did.
        killed: the local ranks that were sent SIGKILL from here.
    """

    def __init__(self, method: str, starts: Sequence[WorkerStart], *, replies: bool) -> None:
        """Start one process for each; `replies`: give each a pipe to answer by. All or none: after an error, none."""
        self.exits: dict[int, Exit] = {}
        self.replies: dict[int, bytes] = {}
        self.killed: set[int] = set()
        self._processes: dict[int, ForkServerProcess | SpawnProcess] = {}
        self._receivers: dict[int, Connection] = {}
        held = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # inherited: a worker meets Ctrl-C when ready
        try:
            for local_rank, start in enumerate(starts):
                self._start(method, local_rank, start, replies)
        except BaseException:
            self.kill()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)

    def _start(self, method: str, local_rank: int, start: WorkerStart, replies: bool) -> None:
        context = multiprocessing.get_context(method)
        receiver, sender = context.Pipe(duplex=False) if replies else (None, None)
        name = f"allranks-worker-{start.rank}"
        assert isinstance(context, multiprocessing.context.ForkServerContext | multiprocessing.context.SpawnContext)
        process = context.Process(target=run_worker, args=(start, sender), name=name)
        with main_hidden():
            process.start()
        self._processes[local_rank] = process
        if receiver is not None and sender is not None:
            sender.close()
            self._receivers[local_rank] = receiver

    @property
    def pids(self) -> dict[int, int]:
        """Local rank -> process id."""
        return {local_rank: process.pid or 0 for local_rank, process in self._processes.items()}

    @property
    def alive(self) -> list[int]:
        """The local ranks that have not ended."""
        return [local_rank for local_rank in self._processes if local_rank not in self.exits]

    @property
    def lost_their_server(self) -> bool:
        """Whether the fork server that knows exit codes has gone, of which its workers die; it is not asked for less.

        Asking a server costs a fork, for which a restart would have to wait.
        """
        return any(one.code == UNKNOWN_CODE for one in self.exits.values())

    def wait(self, seconds: float) -> None:
        """Return when a worker ends or replies, and after `seconds` at the latest."""
        sentinels = {self._processes[local_rank].sentinel: local_rank for local_rank in self.alive}
        receivers = {receiver: local_rank for local_rank, receiver in self._receivers.items()}
        ready = wait([*sentinels, *receivers], timeout=seconds)
        for receiver in [receiver for receiver in receivers if receiver in ready]:
            with contextlib.suppress(EOFError, OSError):
                self.replies[receivers[receiver]] = receiver.recv_bytes()
            self._receivers.pop(receivers[receiver]).close()
        for sentinel in [sentinel for sentinel in sentinels if sentinel in ready]:
            self._note_exit(sentinels[sentinel])

    def _note_exit(self, local_rank: int) -> None:
        process = self._processes[local_rank]
        process.join()
        self.exits[local_rank] = Exit(process.exitcode if process.exitcode is not None else 1, time.time())

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to every worker that has not ended."""
        if number == signal.SIGKILL:
            self.killed |= set(self.alive)
        for local_rank in self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[local_rank], number)

    def kill(self) -> None:
        """End every worker that has not ended, at once, and wait for it."""
        self.signal(signal.SIGKILL)
        for local_rank in self.alive:
            self._note_exit(local_rank)
        for receiver in self._receivers.values():
            receiver.close()
        self._receivers = {}
