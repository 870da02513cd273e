"""Whether the hosts of a run reach each other (parallel/reachable.py), before any worker of a round with new ones
starts.

They meet at one port, which a firewall may let through alone. What is said goes through the meeting, so that it comes
through even then.
"""

import os
import time
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any, final

from allranks.parallel.interface import choose_interface
from allranks.parallel.reachable import REACH_SECONDS, Door, address_on, explain, find_closed, open_door
from allranks.process_environment import ProcessEnvironment
from allranks.surviving.hosts.notices import Notices
from allranks.surviving.hosts.table import Table

POLL_SECONDS = 0.05


@final
@dataclass(frozen=True, slots=True)
class Ways:
    """What hosts have found, the same on every one.

    Attributes:
        closed: who does not reach whom, in one line; "" where all reach all.
        refused: the places of those that cannot take part: all of a run's first round, later who is new in it; none
            where hosts that were reached before are not: their network may come back.
    """

    closed: str = ""
    refused: frozenset[int] = frozenset()


def look_around(
    notices: Notices, table: Table, place: int, is_over: Callable[[], bool], seconds: float = REACH_SECONDS
) -> Ways | None:
    """Every host that is `tried` tries the ways to all others, and all others the ways to it; None: nobody can say.

    Args:
        place: this host's number in the round.
        is_over: whether there is no sense any more in waiting for the others.
        seconds: how long the others may take to come, and how long a connection.

    Raises:
        StoreLostError, SealError: the meeting has gone, or holds what no host wrote.
    """
    address = own_address(table, place)
    with nullcontext(None) if address is None else open_door(address) as own:
        notices.post(f"door/{table.number}/{place}", {} if own is None else asdict(own))
        told = _hear_all(notices, f"door/{table.number}", len(table.members), is_over, seconds)
        if told is None:
            return None
        doors = [Door(**one) if one else None for one in told]
        tried = range(len(doors)) if place in table.tried else table.tried
        others = {node: door for node in tried if node != place and (door := doors[node]) is not None}
        notices.post(f"row/{table.number}/{place}", find_closed(others, seconds))
        # Nobody leaves before all have knocked.
        rows = _hear_all(notices, f"row/{table.number}", len(table.members), is_over, 2 * seconds)
    if rows is None:
        return None
    closed = {frozenset((here, int(there))) for here, row in enumerate(rows) for there in row}
    refused = _choose_refused(closed, frozenset(table.new), len(rows))
    return Ways(explain([door or Door("", "", 0, "") for door in doors], rows), refused)


def _choose_refused(closed: Collection[frozenset[int]], new: frozenset[int], number: int) -> frozenset[int]:
    """Who cannot take part: of a run's first round all; later who is new and does not reach who is not, and then of two
    new ones that do not reach each other the later one.
    """
    if len(new) == number:
        return new if closed else frozenset()
    kept_out = {place for way in closed for place in way & new if way - new}
    return frozenset(kept_out | {max(way) for way in closed if way <= new and not way & kept_out})


def own_address(table: Table, place: int) -> str | None:
    """Where this host's workers will listen; None where that is left to their backend."""
    environment = ProcessEnvironment(
        *("allranks", table.ranks(place).start, 0, sum(table.workers), table.workers[place]),
        node_rank=place,
        num_nodes=len(table.members),
        master_addr=table.address,
        master_port=table.port,
        interface=os.environ.get("GLOO_SOCKET_IFNAME"),
    )
    interface, _ = choose_interface(environment)
    return None if interface is None else address_on(interface)


def _hear_all(notices: Notices, key: str, number: int, is_over: Callable[[], bool], seconds: float) -> list[Any] | None:
    """What all hosts have said under a key, by number; None: one has said nothing."""
    deadline = time.monotonic() + seconds
    found: dict[int, Any] = {}
    while True:
        for place in range(number):
            if place not in found and (one := notices.read(f"{key}/{place}")) is not None:
                found[place] = one
        if len(found) == number:
            return [found[place] for place in range(number)]
        if is_over() or time.monotonic() > deadline:
            return None
        time.sleep(POLL_SECONDS)
