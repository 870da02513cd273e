"""Whether the hosts of a world reach each other on ports such as the backend will take, before it takes them.

A firewall that lets the store's port through and no other, an address that several hosts have (a bridge of docker's),
the wrong interface: gloo and NCCL wait a minute or longer for each, and name one rank at best. Here every host listens
for a moment on a free port at the address of its interface, and every other one connects to it, all at the same time.
"""

import contextlib
import json
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import final

import psutil
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from allranks.errors import ProcessError
from allranks.parallel.store import RETRY_SECONDS, listen
from allranks.process_environment import ProcessEnvironment

REACH_SECONDS = 10.0
NAMED = 4
AT_ONCE = 64
ADVICE = (
    "see whether a firewall lets only some ports through (open those of net.ipv4.ip_local_port_range between hosts), "
    "and whether the interface is the right one (GLOO_SOCKET_IFNAME names another)"
)


@final
@dataclass(frozen=True, slots=True)
class Door:
    """Where a host listens: its name, address and port, and the word that only it says there."""

    host: str
    address: str
    port: int
    word: str


def check_reachable(
    store: Store,
    environment: ProcessEnvironment,
    interface: str | None,
    *,
    arrive_seconds: float,
    reach_seconds: float = REACH_SECONDS,
) -> None:
    """See whether every host reaches every other one; collective over all processes. Nothing on one host.

    Not where an agent serves the store: that of `allranks train --nodes` has looked before (surviving/hosts/doors.py),
    torchrun's may hold what an earlier attempt has written. Not where the interface is left to the backend. Where a
    host does not come in time nothing is said: the backend's own start tells who is missing.

    Args:
        store: the world's; no earlier attempt has written to it.
        interface: the network interface of the backend.
        arrive_seconds: how long the hosts may come one after the other.
        reach_seconds: how long a connection may take, with all of its repetitions.

    Raises:
        ProcessError: on every rank, naming who does not reach whom, and why.
    """
    address = None if interface is None else address_on(interface)
    if environment.num_nodes == 1 or environment.agent_store or address is None:
        return
    with contextlib.suppress(dist.DistError):  # somebody did not come
        if environment.local_rank == 0:
            _look(store, environment, address, arrive_seconds, reach_seconds)
        store.wait(["reach/verdict"], timedelta(seconds=arrive_seconds + 2 * reach_seconds))
        if verdict := store.get("reach/verdict").decode():
            raise ProcessError(verdict)


def address_on(interface: str) -> str | None:
    """The first address of an interface, of version 4 if it has one; None: it has none."""
    entries = psutil.net_if_addrs().get(interface, [])
    for family in (socket.AF_INET, socket.AF_INET6):
        found = [str(one.address) for one in entries if one.family == family]
        if found:
            return found[0]
    return None


def _look(
    store: Store, environment: ProcessEnvironment, address: str, arrive_seconds: float, reach_seconds: float
) -> None:
    """The first process of a host: listen, connect to all others, tell; that of host 0 says what came of it."""
    here, nodes = environment.node_rank, range(environment.num_nodes)
    with open_door(address) as own:
        store.set(f"reach/door/{here}", json.dumps(asdict(own)))
        keys = [f"reach/door/{node}" for node in nodes]
        store.wait(keys, timedelta(seconds=arrive_seconds))
        doors = [Door(**json.loads(text)) for text in store.multi_get(keys)]
        others = {node: door for node, door in enumerate(doors) if node != here}
        store.set(f"reach/row/{here}", json.dumps(find_closed(others, reach_seconds)))
        rows = [f"reach/row/{node}" for node in nodes]
        # Nobody leaves before all have knocked.
        store.wait(rows, timedelta(seconds=2 * reach_seconds))
        if here == 0:
            found = [json.loads(text) for text in store.multi_get(rows)]
            store.set("reach/verdict", explain(doors, found))


@contextmanager
def open_door(address: str) -> Iterator[Door]:
    """Listen on a free port; who connects is told the word, until this is left."""
    word, over = secrets.token_hex(8), threading.Event()
    listener = listen(address, 0)
    listener.settimeout(RETRY_SECONDS)

    def answer() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError):
                caller, _ = listener.accept()
                with caller:
                    caller.sendall(word.encode())

    thread = threading.Thread(target=answer, name="allranks-door", daemon=True)
    thread.start()
    try:
        yield Door(socket.gethostname(), address, listener.getsockname()[1], word)
    finally:
        over.set()
        thread.join()
        listener.close()


def find_closed(others: Mapping[int, Door], seconds: float) -> dict[str, str]:
    """Number of a host that is not reached -> why; all are tried at the same time, for so long."""
    deadline = time.monotonic() + seconds
    with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
        answers = pool.map(lambda door: knock(door, deadline), others.values())
        return {str(node): why for node, why in zip(others, answers, strict=True) if why}


def knock(door: Door, deadline: float) -> str:
    """Connect, and hear the word: why that does not come about until `deadline`; "" where it does."""
    while True:
        left = max(RETRY_SECONDS, deadline - time.monotonic())
        try:
            with socket.create_connection((door.address, door.port), timeout=left) as caller:
                caller.settimeout(left)
                heard = caller.recv(len(door.word)).decode("ascii", "replace")
            if heard == door.word:
                return ""
            why = "another program answers there: several hosts have this address"
        except OSError as error:
            why = error.strerror or str(error) or type(error).__name__
        if time.monotonic() + RETRY_SECONDS >= deadline:
            return why
        time.sleep(RETRY_SECONDS)


def explain(doors: Sequence[Door], rows: Sequence[Mapping[str, str]]) -> str:
    """Who does not reach whom, in one line; "" where all reach all.

    Args:
        doors: of the hosts, by number.
        rows: by number, what `find_closed` has found there.
    """
    pairs = [(doors[here], doors[int(there)], why) for here, row in enumerate(rows) for there, why in row.items()]
    if not pairs:
        return ""
    shown = "; ".join(
        f"{one.host} does not reach {other.host} at {other.address}:{other.port} ({why})"
        for one, other, why in pairs[:NAMED]
    )
    more = f"; and {len(pairs) - NAMED} more" if len(pairs) > NAMED else ""
    total = len(doors) * (len(doors) - 1)
    return f"{len(pairs)} of {total} ways between {len(doors)} hosts are closed: {shown}{more}; {ADVICE}"
