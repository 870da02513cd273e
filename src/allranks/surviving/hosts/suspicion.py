"""Suspicion: which host of a round is lost, by its silence and by what workers have met."""

import time
from collections.abc import Callable

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc

from allranks.config_guard import GuardConfig
from allranks.failure import TRANSIENT, Failure
from allranks.surviving.hosts.lead import Lead
from allranks.surviving.hosts.losses import describe_silence
from allranks.surviving.hosts.notices import Notices
from allranks.surviving.hosts.presence import SUSPECT_SECONDS, Presence
from allranks.surviving.hosts.table import Table, host_of

POLL_SECONDS = 0.25  # between two looks of a host that goes to the next round


def find_lost(
    table: Table, own: _NodeDesc, notices: Notices, presence: Presence, lead: Lead, guard: GuardConfig
) -> Failure | None:
    """The first host of a round that has gone without a word, as the Failure of its first worker.

    All that have gone are taken for lost at once, and lead no more: the next round awaits none of them. `presence`
    has their names then.

    Where workers have lost their connection and nobody has said why, some seconds of silence are enough. Who has
    reported may have left for the next round; of the leader all wait for a word even then.

    Args:
        own: this host's node, which is not lost.

    Raises:
        RendezvousError: the store has gone, or holds what no host wrote.
    """
    number, members = table.number, table.members
    cut_off = notices.lost_a_peer(number, len(members))
    gone = presence.gone(members)
    first, found = None, set[_NodeDesc]()
    for place, node in enumerate(members):
        if node == own or not (node in gone or cut_off):
            continue
        if notices.has_reported(number, place):
            lost = place == 0 and gone.get(node, 0.0) > guard.host_seconds
        else:
            lost = node in gone or presence.suspect(node)
        if lost:
            found.add(node)
            lead.take_for_lost(node)
            what = describe_silence(guard, suspected=node not in gone)
            rank = table.ranks(place)[0]
            first = first or Failure(rank, host_of(node), node.pid, time.time(), TRANSIENT, what)
    presence.lost = frozenset(found)
    return first


def find_more_lost(
    look: Callable[[], Failure | None], table: Table, own: _NodeDesc, notices: Notices, presence: Presence
) -> None:
    """Before the next round, where a host is lost: see whether others are, that fell silent a little later.

    It takes no time from the next round, which awaits whoever lives and has not reported yet.

    Args:
        look: `find_lost`, of the state as it is then.

    Raises:
        RendezvousError: as `find_lost`.
    """
    deadline = time.monotonic() + SUSPECT_SECONDS
    while table.members and look() is not None and time.monotonic() < deadline:
        living = presence.living({*table.members} - {own})
        if all(notices.has_reported(table.number, table.place_of(node)) for node in living):
            return
        time.sleep(POLL_SECONDS)
