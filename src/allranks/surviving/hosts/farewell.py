"""The farewell: who leaves last closes what all have met in."""

import time
from collections.abc import Iterable
from typing import Final

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc

from allranks.surviving.hosts.notices import Notices
from allranks.surviving.hosts.presence import Presence
from allranks.surviving.hosts.table import Table
from allranks.surviving.interrupts import Interrupts
from allranks.surviving.workers import KILL_SECONDS, LEAVING_SECONDS

POLL_SECONDS = 0.05
LONGEST_SECONDS: Final = KILL_SECONDS + LEAVING_SECONDS + 5.0
"""How long the leader waits until the others, as long as they live, have read the end: a host reads nothing while it
ends its workers, and before that it gives these two seconds to say what they met."""
BRIEF_SECONDS: Final = 5.0  # the same, after a second request to stop


def farewell_seconds(interrupts: Interrupts | None, *, leads: bool) -> float:
    """How long a host waits for the others when it leaves; who leads may take the place with it where they meet."""
    if not leads:
        return 0.0
    return BRIEF_SECONDS if interrupts is not None and interrupts.urgent else LONGEST_SECONDS


def is_over(
    node: _NodeDesc,
    table: Table,
    presence: Presence,
    notices: Notices,
    interrupts: Interrupts | None,
    *,
    leads: bool,
) -> bool:
    """Whether nobody needs the meeting any more, when a host leaves a run that has ended; who leads waits for others.

    Args:
        node: this host.
        table: of the last round.

    Raises:
        StoreLostError, SealError
    """
    others = {*table.members, *presence.state.participants, *presence.waiting()} - {node}
    return is_last(others, presence, notices, farewell_seconds(interrupts, leads=leads)) or leads


def is_last(others: Iterable[_NodeDesc], presence: Presence, notices: Notices, seconds: float) -> bool:
    """Whether all others have left or are silent, after so many seconds at most. Raises StoreLostError, SealError."""
    here, deadline = set(others), time.monotonic() + seconds
    while here := {node for node in presence.living(here) if not notices.has_left(node)}:
        if time.monotonic() >= deadline:
            break
        time.sleep(POLL_SECONDS)
    return not here
