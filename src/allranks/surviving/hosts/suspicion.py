"""Suspicion: which host of a round is lost, by its silence and by what workers have met."""

import time

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc

from allranks.config_guard import GuardConfig
from allranks.failure import TRANSIENT, Failure
from allranks.surviving.hosts.lead import Lead
from allranks.surviving.hosts.losses import describe_silence
from allranks.surviving.hosts.notices import Notices
from allranks.surviving.hosts.presence import Presence
from allranks.surviving.hosts.table import Table, host_of


def find_lost(
    table: Table, own: _NodeDesc, notices: Notices, presence: Presence, lead: Lead, guard: GuardConfig
) -> Failure | None:
    """A host of a round that has gone without a word, as the Failure of its first worker; it leads no more.

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
    for place, node in enumerate(members):
        if node == own or not (node in gone or cut_off):
            continue
        if notices.has_reported(number, place):
            lost = place == 0 and gone.get(node, 0.0) > guard.host_seconds
        else:
            lost = node in gone or presence.suspect(node)
        if lost:
            lead.take_for_lost(node)
            what = describe_silence(guard, suspected=node not in gone)
            return Failure(table.ranks(place)[0], host_of(node), node.pid, time.time(), TRANSIENT, what)
    return None
