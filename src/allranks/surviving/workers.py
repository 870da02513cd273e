"""The worker processes of this host, seen from the agent: start, wait, signal, exit codes and replies."""

import array
import contextlib
import fcntl
import multiprocessing
import os
import signal
import socket
import sys
import termios
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess, SpawnProcess
from typing import final

from allranks.failure import TRANSIENT, Failure
from allranks.surviving.beats import SharedBeats
from allranks.surviving.child import WorkerStart, run_worker
from allranks.surviving.forkserver import main_hidden
from allranks.surviving.kernel import ENDED, is_held_dead, process_state, waits_in
from allranks.surviving.outcome import UNKNOWN_CODE, Ended
from allranks.surviving.unended import forsake

LOST_CODE = 255  # multiprocessing's, where the fork server does not tell the code; also a code like any other
KILL_SECONDS = 10.0  # SIGKILL ends a process at once, unless it waits in the kernel for what does not come
LEAVING_SECONDS = 60.0  # a process that has ended gives its memory back first: tens of pinned gigabytes take their time
LOOK_SECONDS = 1.0
GLANCE_SECONDS = 0.01


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
        left: the worker that SIGKILL has not ended, as a failure; None: there is none. It counts as ended.
    """

    def __init__(self, method: str, starts: Sequence[WorkerStart], *, replies: bool) -> None:
        """Start one process for each; `replies`: give each a pipe to answer by. All or none: after an error, none."""
        self.exits: dict[int, Exit] = {}
        self.replies: dict[int, bytes] = {}
        self.killed: set[int] = set()
        self.left: Failure | None = None
        self._answers, self._ranks = replies, [start.rank for start in starts]
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

    def ended(self, beats: SharedBeats | None) -> list[Ended]:
        """How those have ended that have; `beats`: where they showed themselves, if anybody looked."""
        return [
            Ended(
                self._ranks[place],
                self.pids[place],
                one.code,
                one.when,
                killed=place in self.killed,
                finished=self._has_finished(place, one.code, beats),
                step=None if beats is None else beats.steps()[place],
                said=None if beats is None else beats.said(place),
            )
            for place, one in self.exits.items()
        ]

    def _has_finished(self, place: int, code: int, beats: SharedBeats | None) -> bool:
        if beats is not None:
            return beats.has_finished(place, code)
        return place in self.replies or not self._answers

    def _note_exit(self, local_rank: int, seconds: float = KILL_SECONDS) -> None:
        """Note how a worker ended that ends now; what has not after so long is left behind."""
        process = self._processes[local_rank]
        code = _wait_for_code(process, seconds)
        if code is None:
            code = -signal.SIGKILL
            self.killed.add(local_rank)
            self.left = _describe_left(self._ranks[local_rank], process.pid or 0)
            print(f"warning: {self.left.brief()}", file=sys.stderr, flush=True)
        if process.exitcode is None:
            forsake(process)
        self.exits[local_rank] = Exit(code, time.time())

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to every worker that has not ended."""
        if number == signal.SIGKILL:
            self.killed |= set(self.alive)
        for local_rank in self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[local_rank], number)

    def kill(self) -> None:
        """End every worker that has not ended, at once, and wait for it: no longer than ten seconds for all.

        Those that have ended and still give their memory back get a minute more.
        """
        self.signal(signal.SIGKILL)
        deadline = time.monotonic() + KILL_SECONDS
        for local_rank in self.alive:
            self._note_exit(local_rank, max(0.0, deadline - time.monotonic()))
        for receiver in self._receivers.values():
            receiver.close()
        self._receivers = {}


def _wait_for_code(process: ForkServerProcess | SpawnProcess, seconds: float) -> int | None:
    """The exit code of a process that ends now; None: it has not ended after so long, nor begun to."""
    deadline = time.monotonic() + seconds
    last = deadline + LEAVING_SECONDS
    while True:
        has_closed = wait([process.sentinel], timeout=min(LOOK_SECONDS, max(0.0, deadline - time.monotonic())))
        # A fork server writes the code there; where it is gone, there is only an end.
        is_told = not isinstance(process, ForkServerProcess) or _has_bytes(process.sentinel)
        if (code := process.exitcode) is not None:
            process.join()
            return UNKNOWN_CODE if code == LOST_CODE and not is_told else code
        if is_held_dead(process.pid or 0):
            return -signal.SIGKILL
        if time.monotonic() >= deadline:
            if deadline >= last or process_state(process.pid or 0) != ENDED:
                return None
            deadline = min(last, time.monotonic() + 1.0)
        if has_closed:  # a spawned process that closes its files, and is not gone yet
            time.sleep(GLANCE_SECONDS)


def _has_bytes(pipe: int) -> bool:
    count = array.array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, count)
    return count[0] > 0


def _describe_left(rank: int, pid: int) -> Failure:
    where = waits_in(pid)
    words = f"pid {pid} does not end, though it was killed: state {process_state(pid) or 'unknown'}"
    words += f", it waits in the kernel's {where}" if where else ""
    words += "; see its disk, share or driver (`dmesg`); nothing is started again beside it"
    return Failure(rank, socket.gethostname(), pid, time.time(), TRANSIENT, words)
