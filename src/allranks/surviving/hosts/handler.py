"""torch's rendezvous handler as hosts here want it: over our backend, and without a store of its own."""

import random
import secrets
import socket
import time
from datetime import timedelta
from functools import partial
from typing import Any

from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousTimeout,
    _RendezvousExitOp,
)

from allranks.config_guard import GuardConfig

BEATS = 8  # signs of life that may be missing one after the other, at least
BEAT_SECONDS = 0.7  # between two of them, where that makes no fewer: a suspect's silence is measured in them
LAST_CALL_SECONDS = 3.0  # once there are enough hosts: time for more to come, before a round begins without them
POLL_SECONDS = 0.25  # between two looks of a host that waits for others; torch's second is for any number of hosts
HOSTS_A_POLL = 200  # from so many for each second on, as torch
CLOSE_SECONDS = 30.0  # of trying to write the end: a host that does not learn of it waits for the others for long
LEAVE_SECONDS = 5.0
MOST_SKIPPED = 1 << 30  # numbers of nodes, by chance


def make_handler(backend: RendezvousBackend, least: int, most: int, guard: GuardConfig) -> DynamicRendezvousHandler:
    """A handler for a round of `least` to `most` hosts, under this host's name."""
    unused = HashStore()  # of this process alone
    _skip_numbers()
    beats = max(BEATS, int(guard.host_seconds / BEAT_SECONDS))
    handler: DynamicRendezvousHandler = DynamicRendezvousHandler.from_backend(
        "allranks",
        unused,
        backend,
        least,
        most,
        socket.gethostname(),
        RendezvousTimeout(
            join=timedelta(seconds=guard.join_seconds),
            last_call=timedelta(seconds=LAST_CALL_SECONDS),
            close=timedelta(seconds=CLOSE_SECONDS),
            heartbeat=timedelta(seconds=guard.host_seconds),
        ),
        keep_alive_interval=guard.host_seconds / beats,  # type: ignore[arg-type]  # it makes a timedelta of it
        keep_alive_max_attempt=beats,
    )
    # torch would open a store on every interface of this host, and hand restarted workers the address of an old one
    handler._bootstrap_store_info = RendezvousStoreInfo("", 0)
    handler._shared_tcp_store_server = unused
    recorders: tuple[Any, ...] = (handler, handler._op_executor, handler._state_holder)
    for recorder in recorders:
        recorder._record = _record_nothing
    poll = min(1.0, max(POLL_SECONDS, most / HOSTS_A_POLL))
    handler._state_holder._cache_duration = poll  # type: ignore[attr-defined]  # how old a state may be that is looked at
    # Of this process, which has one rendezvous.
    dynamic_rendezvous._delay = partial(_wait, poll)  # type: ignore[attr-defined]
    return handler


def _skip_numbers() -> None:
    """Let the next node have a number by which nobody takes it for one of an earlier process.

    torch counts a process's nodes from 0. A container that starts again has its name and its pid as well, and would be
    the node that the others have lost, or that has said goodbye.
    """
    generator = DynamicRendezvousHandler._node_desc_generator
    with generator._lock:
        generator._local_id += secrets.randbelow(MOST_SKIPPED)


def _wait(poll: float, seconds: float | tuple[float, float]) -> None:
    """In the place of torch's: a look takes the store less than the second costs a run that recovers."""
    time.sleep(random.uniform(*seconds) if isinstance(seconds, tuple) else min(poll, seconds))


def _record_nothing(*words: Any, **named: Any) -> None:
    """In the place of torchelastic's events, which nobody reads here.

    To name itself each looks up the source of every frame on the stack (`inspect.stack`), between the reading of the
    state and the writing: a process with many modules loses every race for it against one with few.
    """


def leave_round(handler: DynamicRendezvousHandler) -> None:
    """Take this host out of the round that has ended, so that the next one waits neither for it nor for its silence.

    Raises:
        RendezvousError: the store has gone.
    """
    with handler._heartbeat_lock:  # a state that its thread has read meanwhile would seem to go back
        handler._op_executor.run(_RendezvousExitOp(), handler._get_deadline(timedelta(seconds=LEAVE_SECONDS)))
