"""A pool of gloo worker processes that lives as long as the test session: a case costs milliseconds instead of seconds.

    def test_sum(pool: Pools) -> None:
        def case(value: int) -> float:
            tensor = torch.full((), float(value + dist.get_rank()))
            dist.all_reduce(tensor)
            return tensor.item()

        assert pool(2).run(case, 10) == [21.0, 21.0]

Functions travel by value (closures included), arguments and results by cloudpickle: results on the CPU, detached. A
failed or a hanging case ends its workers, because one bad case poisons a process group; the next case gets new ones,
forked from a host that has torch imported already. Between two cases they stand still (SIGSTOP). Each worker has one
thread; after a case its environment, default dtype and generators are put back.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

import cloudpickle
import psutil

from allranks.surviving.by_value import dumps
from tests.distributed.messages import Done, Failed, Setup, kill

ROOT = Path(__file__).parents[2]
START_TIMEOUT_SECONDS = 60.0
STACK_WAIT_SECONDS = 0.5  # how long a hanging worker gets to write down where it stands
# Every DeviceMesh leaves groups behind, each with three threads, of which gloo's wakes a hundred times a second: with a
# thousand of them the next group takes seconds. A new crew costs a tenth of one, so it takes over at this many threads.
THREADS_PER_CREW = 400

HOST_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
}


class Host:
    """The process that has torch imported and forks workers; started when the first worker is wanted."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._environment = os.environ | HOST_ENVIRONMENT  # now: the first test that wants a worker may have changed it
        self._process: subprocess.Popen[str] | None = None

    def fork(self, count: int) -> list[Connection]:
        """`count` new workers, each at the other end of a connection."""
        with tempfile.TemporaryDirectory(dir=self._directory) as folder, socket.socket(socket.AF_UNIX) as server:
            address = f"{folder}/socket"
            server.bind(address)
            server.listen(count)
            server.settimeout(START_TIMEOUT_SECONDS)
            stdin = self._alive().stdin
            assert stdin is not None
            stdin.write(f"{count} {address}\n")
            stdin.flush()
            return [Connection(server.accept()[0].detach()) for _ in range(count)]

    @property
    def pids(self) -> set[int]:
        """The host's process id, where there is one."""
        return set() if self._process is None else {self._process.pid}

    def close(self) -> None:
        """End the host, which ends every worker."""
        if self._process is not None:
            self._process.communicate()  # closes its standard input and waits
            self._process = None

    def _alive(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.distributed.worker"],
                stdin=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                env=self._environment,
            )
        return self._process


class Crew:
    """`world_size` living workers with torchrun's environment, in one gloo group unless `group` is False."""

    def __init__(self, host: Host, world_size: int, directory: Path, *, group: bool) -> None:
        self._connections = host.fork(world_size)
        self._pids: list[int] = [connection.recv() for connection in self._connections]
        self._stacks = [directory / f"stack-{pid}.txt" for pid in self._pids]
        store_port = free_port()
        for rank, connection in enumerate(self._connections):
            environment = torchrun_environment(rank, world_size, store_port)
            connection.send(Setup(rank, world_size, group, store_port, str(self._stacks[rank]), environment))
            if group and rank == 0:
                store_port = connection.recv()

    def run(self, payload: bytes, timeout: float) -> dict[int, Done | Failed]:
        """One case on every rank: the outcomes by rank, up to the first failure.

        Raises TimeoutError with every hanging rank's stack, or ChildProcessError if a worker dies.
        """
        self._signal(signal.SIGCONT)
        for connection in self._connections:
            connection.send_bytes(payload)
        outcomes: dict[int, Done | Failed] = {}
        deadline = time.monotonic() + timeout
        while len(outcomes) < len(self._connections) and not failures(outcomes):
            waiting = [c for rank, c in enumerate(self._connections) if rank not in outcomes]
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(self._where_they_stand(timeout, set(outcomes)))
            for rank, connection in enumerate(self._connections):
                if connection in ready:
                    outcomes[rank] = self._receive(rank, connection)
        if len(outcomes) == len(self._connections):
            self._signal(signal.SIGSTOP)
        return outcomes

    @property
    def num_threads(self) -> int:
        """Of all workers together."""
        return sum(psutil.Process(pid).num_threads() for pid in self._pids)

    def kill(self) -> None:
        """End every worker at once."""
        for pid, connection, stack in zip(self._pids, self._connections, self._stacks, strict=True):
            kill(pid)
            connection.close()
            stack.unlink(missing_ok=True)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _receive(self, rank: int, connection: Connection) -> Done | Failed:
        try:
            outcome: Done | Failed = connection.recv()
        except (EOFError, ConnectionError) as error:
            raise ChildProcessError(f"rank {rank} died in the middle of the case (killed, or os._exit)") from error
        return outcome

    def _where_they_stand(self, timeout: float, done: set[int]) -> str:
        missing = [rank for rank in range(len(self._pids)) if rank not in done]
        for rank in missing:
            os.kill(self._pids[rank], signal.SIGUSR2)
        time.sleep(STACK_WAIT_SECONDS)
        stacks = "\n".join(f"rank {rank}:\n{self._stacks[rank].read_text()}" for rank in missing)
        return f"no answer from ranks {missing} within {timeout:g} s; they stand at\n{stacks}"


class Pool:
    """The workers of one world size; `run` starts them when there are none."""

    def __init__(self, host: Host, world_size: int, directory: Path) -> None:
        self._host = host
        self._world_size = world_size
        self._directory = directory
        self._crew: Crew | None = None

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """`function(*args)` on every rank, inside a gloo group; the results by rank.

        Raises what the first failing rank raised, with that rank's traceback as a note; TimeoutError after `timeout`
        seconds; ChildProcessError if a worker dies.
        """
        self._crew = self._crew or Crew(self._host, self._world_size, self._directory, group=True)
        goes_on = False
        try:
            results = self._run(self._crew, function, args, timeout)
            goes_on = self._crew.num_threads < THREADS_PER_CREW
        finally:
            if not goes_on:
                self.close()
        return results

    def run_alone(self, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """Like `run`, in new processes with torchrun's environment and no process group, which end with the case."""
        crew = Crew(self._host, self._world_size, self._directory, group=False)
        try:
            return self._run(crew, function, args, timeout)
        finally:
            crew.kill()

    def close(self) -> None:
        """End the workers; the next `run` starts new ones."""
        if self._crew is not None:
            self._crew.kill()
            self._crew = None

    def _run(self, crew: Crew, function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
        outcomes = crew.run(pack(function, args), timeout)
        if failed := failures(outcomes):
            rank = min(failed, key=lambda rank: failed[rank].moment)
            raise unpack_failure(failed[rank], f"rank {rank} of {self._world_size}")
        return [
            cloudpickle.loads(outcome.value) for _, outcome in sorted(outcomes.items()) if isinstance(outcome, Done)
        ]


class Pools:
    """What the fixture `pool` gives: `pool(world_size)` is the Pool of that size, kept for the whole session."""

    def __init__(self) -> None:
        self._directory = Path(
            tempfile.mkdtemp(prefix="pool-", dir="/tmp")
        )  # short: a unix socket's path holds 100 characters
        self._host = Host(self._directory)
        self._pools: dict[int, Pool] = {}

    def __call__(self, world_size: int) -> Pool:
        """The pool of `world_size` processes (1 to 16)."""
        assert 1 <= world_size <= 16, f"a pool has 1 to 16 processes, not {world_size}"
        if world_size not in self._pools:
            self._pools[world_size] = Pool(self._host, world_size, self._directory)
        return self._pools[world_size]

    def __enter__(self) -> "Pools":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pool in self._pools.values():
            pool.close()
        self._host.close()
        shutil.rmtree(self._directory)

    @property
    def pids(self) -> set[int]:
        """The processes started directly by this one, which outlive a test on purpose."""
        return self._host.pids


def failures(outcomes: dict[int, Done | Failed]) -> dict[int, Failed]:
    """The ranks that raised."""
    return {rank: outcome for rank, outcome in outcomes.items() if isinstance(outcome, Failed)}


def unpack_failure(failure: Failed, who: str) -> BaseException:
    """The exception that a rank raised, with its traceback as a note; an ordinary one where it could not travel."""
    error: BaseException
    if failure.error is None:
        error = RuntimeError(f"{who} raised what cannot be pickled")
    else:
        error = cloudpickle.loads(failure.error)
    error.add_note(f"{who}:\n{failure.text}")
    return error


def pack(function: Callable[..., Any], args: Sequence[Any]) -> bytes:
    """Pickle a case; what test modules define travels by value, so that workers import neither them nor pytest."""
    for name, module in list(sys.modules.items()):
        if name.startswith("tests.") and name.rpartition(".")[2].startswith("test_"):
            cloudpickle.register_pickle_by_value(module)
    pickled: bytes = dumps((function, tuple(args)))
    return pickled


def free_port() -> int:
    """A TCP port on 127.0.0.1 that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def torchrun_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """The variables that torchrun sets for a process of one node."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "tests",
    }
