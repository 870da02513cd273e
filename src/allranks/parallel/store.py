"""The store through which the processes of a world find each other: opened with a clear word when that fails.

torch's own client waits for ever before a program that takes its connection and says nothing, and prints C++ stacks
while it retries; here it starts only when somebody listens, and has a limit.
"""

import contextlib
import errno
import ipaddress
import secrets
import socket
import threading
import time
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from allranks.errors import ProcessError
from allranks.process_environment import ProcessEnvironment

RETRY_SECONDS = 0.1
_served: dict[tuple[str, int], TCPStore] = {}
_opened: dict[tuple[int, str, int], int] = {}
"""How many worlds this process has opened there, as which rank."""
FREE_PORT = "choose another with MASTER_PORT (torchrun: --master-port), or stop the program that uses it"


def open_store(environment: ProcessEnvironment, *, connect_seconds: float, timeout_seconds: float) -> Store:
    """The world's store; rank 0 serves it unless the launcher does. `timeout_seconds` is how long its reads wait.

    Raises:
        ProcessError: the port is in use, or nobody answers there within `connect_seconds`.
    """
    timeout = timedelta(seconds=timeout_seconds)
    place = (environment.master_addr, environment.master_port)
    if environment.rank == 0 and not environment.agent_store:
        # For the life of the process: groups of an ended world may hold it, and a second one could not listen there.
        served = _served[place] = _served.get(place) or _serve(environment, timeout)
        served.set_timeout(timeout)
        store: Store = served
    else:
        deadline = time.monotonic() + connect_seconds
        _wait_for_listener(environment, deadline)
        store = _connect(environment, timeout, deadline)
        if environment.agent_store:
            # NCCL's watchdog of an attempt that has ended left it there, past every prefix: that of the next one would
            # find it, and abort (ProcessGroupNCCL.cpp, broadcastDumpSignal and HeartbeatMonitor).
            store.delete_key("exception_dump")
    # Group names repeat: neither a restarted worker nor a second world of this process may read what stands there.
    number = _opened.get((environment.rank, *place), 0)
    _opened[(environment.rank, *place)] = number + 1
    if environment.num_nodes == 1:
        store = PrefixStore(f"attempt-{environment.restart_count}", store)
    elif environment.agent_store:  # agents of several nodes need not have started their workers equally often
        store = PrefixStore(agree_on_word(store, environment.rank, environment.world_size, timeout_seconds), store)
    return PrefixStore(f"world-{number}", store) if number else store


def agree_on_word(store: Store, rank: int, world_size: int, seconds: float) -> str:
    """A word that the processes which are here now share, and none that was before them; collective.

    The launcher's store outlives them, and what others have left stands in it. So each rank asks with a word of its
    own, and rank 0 answers whoever asks until all have heard it.

    Raises:
        ProcessError: somebody did not come within `seconds`.
    """
    word, deadline = secrets.token_hex(8), time.monotonic() + seconds
    if rank:
        store.set(f"asks/{rank}", word)
        try:
            store.wait([f"answers/{word}"], timedelta(seconds=seconds))
        except RuntimeError as error:  # torch's DistStoreError is one
            raise ProcessError(f"rank 0 did not come to the launcher's store within {seconds:.0f} s") from error
        found = store.get(f"answers/{word}").decode()
        store.set(f"heard/{found}/{rank}", "")
        return found
    missing = list(range(1, world_size))
    while missing:
        for asking in missing:
            if store.check([f"asks/{asking}"]):
                store.set(f"answers/{store.get(f'asks/{asking}').decode()}", word)
        missing = [asking for asking in missing if not store.check([f"heard/{word}/{asking}"])]
        if missing and time.monotonic() > deadline:
            raise ProcessError(f"rank {missing[0]} did not come to the launcher's store within {seconds:.0f} s")
        time.sleep(RETRY_SECONDS / 5 if missing else 0.0)
    return word


def _serve(environment: ProcessEnvironment, timeout: timedelta) -> TCPStore:
    host, port = environment.master_addr, environment.master_port
    try:
        listener = _listen_where_meant(host, port, alone=environment.num_nodes == 1)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ProcessError(f"rank 0 cannot listen on {host}:{port}: {reason}; {FREE_PORT}") from error
    return serve(listener, host, timeout)


def _listen_where_meant(host: str, port: int, *, alone: bool) -> socket.socket:
    """At the address that the world's processes were given, so that strangers on other networks do not reach it.

    On all addresses where other hosts know the name by another one: Debian gives a host's own name a loopback address,
    and the address of a Kubernetes service is none of the host's. Raises OSError.
    """
    if alone:
        return listen(host, port)
    found = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    if ipaddress.ip_address(found.partition("%")[0]).is_loopback and host not in (found, "localhost"):
        return listen("", port)
    try:
        return listen(found, port)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        return listen("", port)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket at an address of this host ("": all of them); port 0: a free one. Raises OSError."""
    both = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM)[0][0]
    listener = socket.socket(family)
    try:
        if both:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


def serve(listener: socket.socket, host: str, timeout: timedelta) -> TCPStore:
    """A store server on a listening socket, which it takes over."""
    port = listener.getsockname()[1]
    store = TCPStore(
        host, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.fileno()
    )
    listener.detach()
    return store


def _wait_for_listener(environment: ProcessEnvironment, deadline: float) -> None:
    host, port = environment.master_addr, environment.master_port
    began = time.monotonic()
    error = wait_for_listener(host, port, deadline)
    if error is not None:
        raise ProcessError(
            f"rank {environment.rank} cannot reach the store at {host}:{port} ({time.monotonic() - began:.0f} s):"
            f" {error.strerror or error}; see whether rank 0 runs, and whether MASTER_ADDR and MASTER_PORT are right"
        ) from error


def wait_for_listener(host: str, port: int, deadline: float) -> OSError | None:
    """Wait until somebody listens there, or for `deadline` on the monotonic clock: then the last error."""
    while True:
        try:
            with socket.create_connection((host, port), timeout=max(0.1, deadline - time.monotonic())):
                return None
        except OSError as error:
            if time.monotonic() + RETRY_SECONDS >= deadline:
                return error
        time.sleep(RETRY_SECONDS)


def _connect(environment: ProcessEnvironment, timeout: timedelta, deadline: float) -> TCPStore:
    host, port = environment.master_addr, environment.master_port
    store = connect(host, port, timeout, deadline)
    if store is None:
        raise ProcessError(f"what listens on {host}:{port} is not rank 0's store; {FREE_PORT}")
    return store


def connect(host: str, port: int, timeout: timedelta, deadline: float) -> TCPStore | None:
    """A client of the store that listens there; None where what listens is no store, or says nothing until then."""
    opened: list[TCPStore] = []

    def open_client() -> None:
        with contextlib.suppress(dist.DistError, RuntimeError):
            opened.append(TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False))

    thread = threading.Thread(target=open_client, name="allranks-store", daemon=True)
    thread.start()
    thread.join(max(1.0, deadline - time.monotonic()))
    return opened[0] if opened else None
