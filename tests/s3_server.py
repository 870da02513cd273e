"""A real S3 server in a process of its own, on loopback: moto's; and a line to it that can be cut.

The server keeps what it holds in its memory: who kills it empties it. A line has a port of its own, and lets through,
holds or cuts what goes over it.
"""

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from tests.commands import wait_for
from tests.free_port import free_port

BUCKET = "bucket"
PAGE = 10  # names that the server lists at a time, so that few make several pages
missing = [name for name in ("s3fs", "moto", "flask") if importlib.util.find_spec(name) is None]
needs_s3 = pytest.mark.skipif(bool(missing), reason=f"no {', '.join(missing)} here: pip install s3fs 'moto[server]'")


class S3Server:
    """It keeps its port over restarts."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        """Its URL."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Until it answers; it holds nothing."""
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        with (self._folder / "s3.log").open("ab") as log:
            variables = os.environ | {"MOTO_S3_DEFAULT_MAX_KEYS": str(PAGE)}
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=variables)
        wait_for(self._answers, "an S3 server that answers", 120)

    def _answers(self) -> bool:
        with suppress(OSError), urllib.request.urlopen(f"{self.endpoint}/moto-api/", timeout=2.0):
            return True
        return False

    def refuse_everybody(self, after: int = 0) -> None:
        """From so many calls more on, nobody's key is known; -1: it asks for none."""
        count, plain = float("inf") if after < 0 else after, {"Content-Type": "text/plain"}
        request = urllib.request.Request(f"{self.endpoint}/moto-api/reset-auth", str(count).encode(), plain)
        with urllib.request.urlopen(request, timeout=30.0):
            pass

    @cached_property
    def files(self) -> Any:
        """A client of it, without a memory of listings."""
        return client(self.port, use_listings_cache=False)

    def signal(self, number: signal.Signals) -> None:
        """Stop it, let it go on, or kill it."""
        assert self._process is not None
        self._process.send_signal(number)
        if number in (signal.SIGKILL, signal.SIGTERM):
            self._process.wait()

    def close(self) -> None:
        """End it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    """A server with a bucket; it ends with the block."""
    server = S3Server(folder)
    try:
        server.start()
        server.files.mkdir(BUCKET)
        yield server
    finally:
        server.close()


def client(port: int, **more: Any) -> Any:
    """An fsspec file system of its own, by way of this port; it takes a while to make."""
    import s3fs

    keys = {"key": "testing", "secret": "testing", "endpoint_url": f"http://127.0.0.1:{port}"}
    return s3fs.S3FileSystem(**keys, **more, skip_instance_cache=True)


class Line:
    """From a port of its own to that of a server.

    Attributes:
        port: where it begins.
        sent: bytes that have gone to the server.
        cut_at: when so many have, every connection is cut, and no other one is taken; None: never.
        holds: whether nothing goes on, though connections stay.
        rate: bytes a second that come back at most, on each connection; None: as they come.
    """

    def __init__(self, port: int) -> None:
        self.sent, self.holds = 0, False
        self.cut_at: int | None = None
        self.rate: int | None = None
        self._to = port
        self._open = list[socket.socket]()
        self._lock = threading.Lock()
        self._threads = list[threading.Thread]()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._run(self._accept)

    def close(self) -> None:
        """Cut it for ever."""
        self.cut_at = 0
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(30)

    def cut(self) -> None:
        """End the connections that there are."""
        with self._lock:
            for one in self._open:
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def _is_cut(self) -> bool:
        return self.cut_at is not None and self.sent >= self.cut_at

    def _run(self, target: Any, *arguments: Any) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self._is_cut():
                client.close()
                continue
            try:
                server = socket.create_connection(("127.0.0.1", self._to), 30)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            with self._lock:
                self._open += [client, server]
            self._run(self._pass_on, client, server, True)
            self._run(self._pass_on, server, client, False)

    def _pass_on(self, source: socket.socket, target: socket.socket, counts: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                while self.holds and not self._is_cut():
                    time.sleep(0.02)
                if counts:
                    self.sent += len(data)
                if self._is_cut():
                    self.cut()
                    break
                if self.rate is not None and not counts:
                    time.sleep(len(data) / self.rate)
                target.sendall(data)
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        if counts:
            return
        for one in (source, target):
            one.close()


@contextmanager
def line(port: int) -> Iterator[Line]:
    """One that is cut with the block."""
    made = Line(port)
    try:
        yield made
    finally:
        made.close()
