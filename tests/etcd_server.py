"""A real etcd, alone, on loopback; Debian's package etcd-server has it."""

import base64
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from allranks.surviving.hosts.etcd import Etcd, EtcdError
from tests.commands import wait_for
from tests.free_port import free_port

BINARY = shutil.which("etcd")
needs_etcd = pytest.mark.skipif(BINARY is None, reason="no etcd here: apt-get install etcd-server")


class EtcdServer:
    """It keeps its port and what it holds over restarts."""

    def __init__(self, folder: Path, *, tls: bool = False) -> None:
        self.port, self._peer_port = free_port(), free_port()
        self.client = Etcd([("127.0.0.1", self.port)], 2.0)
        self._folder = folder
        self._tls = tls
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Until it answers, or listens to TLS only."""
        scheme = "https" if self._tls else "http"
        mine, peers = f"{scheme}://127.0.0.1:{self.port}", f"http://127.0.0.1:{self._peer_port}"
        command = [
            *(str(BINARY), "--data-dir", str(self._folder / "etcd")),
            *("--log-level", "error", "--auto-compaction-retention", "1h"),
            *("--listen-client-urls", mine, "--advertise-client-urls", mine),
            *("--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers),
            *("--initial-cluster", f"default={peers}"),
            *(("--auto-tls",) if self._tls else ()),
        ]
        with (self._folder / "etcd.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        wait_for(self._listens if self._tls else self.answers, "an etcd that answers", 60)

    def _listens(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0):
            return True
        return False

    def answers(self) -> bool:
        """Whether it does, and has a leader of its own."""
        try:
            self.client.read("any")
        except EtcdError:
            return False
        return True

    def list_keys(self) -> list[str]:
        """All keys of allranks."""
        first, behind = (base64.b64encode(text).decode() for text in (b"allranks/", b"allranks0"))
        answer = self.client._request("POST", "/v3/kv/range", {"key": first, "range_end": behind, "keys_only": True})
        return [base64.b64decode(one["key"]).decode() for one in answer.get("kvs", ())]

    def signal(self, number: signal.Signals) -> None:
        """Stop it, let it go on, or kill it."""
        assert self._process is not None
        self._process.send_signal(number)
        if number in (signal.SIGKILL, signal.SIGTERM):
            self._process.wait()

    def stands_still(self) -> bool:
        """Whether every thread of it has stopped: one that had begun to answer may still do so after the signal."""
        assert self._process is not None
        tasks = Path(f"/proc/{self._process.pid}/task").glob("*/stat")
        return all(task.read_text().rpartition(")")[2].split()[0] == "T" for task in tasks)

    def close(self) -> None:
        """End it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@contextmanager
def etcd_server(folder: Path, *, tls: bool = False) -> Iterator[EtcdServer]:
    """A server that ends with the block; `tls`: it speaks nothing else."""
    server = EtcdServer(folder, tls=tls)
    try:
        server.start()
        yield server
    finally:
        server.close()
