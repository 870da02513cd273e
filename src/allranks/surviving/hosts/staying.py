"""Who stays: the hosts that go on where others leave, because they were asked to stop, or are lost."""

from collections.abc import Iterable, Sequence

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc

from allranks.failure import INTERRUPTED, TRANSIENT, Failure
from allranks.surviving.hosts.ending import Report
from allranks.surviving.hosts.notices import Notices
from allranks.surviving.hosts.presence import Presence


def find_leaving(members: Sequence[_NodeDesc], reports: Sequence[Report | None]) -> list[_NodeDesc]:
    """The hosts of a round that were asked to stop, as they have reported."""
    return [node for node, one in zip(members, reports, strict=True) if one is not None and one.stopped]


def may_part(said: Iterable[Report], cause: Failure) -> bool:
    """Whether hosts were asked to stop whose leave is theirs alone, after a failure that a restart may mend.

    Ctrl-C is for all.
    """
    codes = {one.exit_code for one in said if one.stopped}
    return bool(codes) and INTERRUPTED not in codes and (cause.consequence or cause.exit_code == TRANSIENT)


def is_unheard(members: Sequence[_NodeDesc], reports: Sequence[Report | None], presence: Presence) -> bool:
    """Whether there is a host that has not reported, and is not known to be lost either."""
    return any(one is None and node not in presence.lost for node, one in zip(members, reports, strict=True))


def find_staying(
    members: Iterable[_NodeDesc], leaving: Iterable[_NodeDesc], presence: Presence, notices: Notices
) -> list[_NodeDesc]:
    """The hosts that there are for the next round, with those that wait. Raises StoreLostError, SealError.

    Hosts, not numbers of them: one that was asked to stop may be lost before that is judged.
    """
    staying = {*members, *presence.waiting()} - {*leaving, *presence.lost}
    return sorted(node for node in staying if not notices.has_left(node))
