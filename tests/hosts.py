"""Several hosts on one machine: real commands that meet on loopback, each with its own processes and (as root) name."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.commands import LIMIT_SECONDS, POINTS, environment, wait_for
from tests.free_port import free_port

SECRET = "0123456789abcdef0123456789abcdef"


class Host:
    """One host's command and all that it has started."""

    def __init__(self, name: str, folder: Path, words: list[str], secret: str = SECRET) -> None:
        self.name = name if os.geteuid() == 0 else os.uname().nodename
        self.log = folder / f"{name}.log"
        self._file = self.log.open("ab")
        named = ["unshare", "--uts", "sh", "-c", f'hostname {name}; exec "$@"', "sh"] if os.geteuid() == 0 else []
        self.process = subprocess.Popen(
            [*named, sys.executable, "-m", "allranks", "train", *words],
            cwd=folder,
            env=environment() | {"OMP_NUM_THREADS": "1", "ALLRANKS_SECRET": secret},
            stdout=self._file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def kill(self) -> None:
        """What the loss of a host leaves of it, but for the silence: nothing. The kernel ends its workers."""
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def end(self) -> int:
        """Its exit code."""
        return self.process.wait(LIMIT_SECONDS)

    def said(self) -> str:
        """Its screen."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def family(self) -> list[int]:
        """The processes below the command."""
        with suppress(psutil.NoSuchProcess):
            return [child.pid for child in psutil.Process(self.process.pid).children(recursive=True)]
        return []

    def close(self) -> None:
        """End whatever is left."""
        left = self.family()
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self._file.close()


class Cluster:
    """Hosts that are started in one folder, where they see each other's files, with one endpoint on loopback."""

    def __init__(self, folder: Path, nodes: str = "2", etcd_port: int | None = None, task: str = POINTS) -> None:
        """`etcd_port`: they meet in the etcd there; None: at the first of them."""
        self.folder = folder
        self._task = task
        self.run = folder / "run"
        self.endpoint = f"127.0.0.1:{etcd_port or free_port()}"
        self.rendezvous = f"{'c10d' if etcd_port is None else 'etcd'}://{self.endpoint}"
        self._nodes = nodes
        self._hosts: list[Host] = []

    def start(self, name: str, *words: str, secret: str = SECRET) -> Host:
        """One more host, with one worker."""
        common = ["--nodes", self._nodes, "--rendezvous", self.rendezvous, "--nproc", "1"]
        task = [self._task, "--device", "cpu", "--run", str(self.run), *common, *words]
        self._hosts.append(Host(name, self.folder, task, secret))
        return self._hosts[-1]

    def wait_until_led(self) -> None:
        """Until somebody serves the store: who is started from now on follows."""
        port = int(self.endpoint.rpartition(":")[2])

        def listens() -> bool:
            return any(
                one.status == psutil.CONN_LISTEN and one.laddr and one.laddr.port == port
                for one in psutil.net_connections("tcp")
            )

        wait_for(listens, "a leader")

    def close(self) -> None:
        """End all of them."""
        for host in self._hosts:
            host.close()


@contextmanager
def cluster(folder: Path, nodes: str = "2", etcd_port: int | None = None, task: str = POINTS) -> Iterator[Cluster]:
    """A Cluster whose processes all end with it."""
    found = Cluster(folder, nodes, etcd_port, task)
    try:
        yield found
    finally:
        found.close()
