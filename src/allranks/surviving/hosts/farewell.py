"""The farewell: who leaves last closes what all have met in."""

import time
from collections.abc import Iterable

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc

from allranks.surviving.hosts.notices import Notices
from allranks.surviving.hosts.presence import Presence

POLL_SECONDS = 0.05


def is_last(others: Iterable[_NodeDesc], presence: Presence, notices: Notices, seconds: float) -> bool:
    """Whether all others have left or are silent, after so many seconds at most. Raises StoreLostError, SealError."""
    here, deadline = set(others), time.monotonic() + seconds
    while here := {node for node in presence.living(here) if not notices.has_left(node)}:
        if time.monotonic() >= deadline:
            break
        time.sleep(POLL_SECONDS)
    return not here
