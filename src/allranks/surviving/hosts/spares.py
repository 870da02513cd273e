"""Spares: hosts, or some of a host's workers, for which a round has no place, because the layout takes no more.

A spare host is no member of the round: it waits for the next one, as one does that comes later, and has a place there
as soon as another is lost or leaves. Hosts that come while others train are let in only where more workers train then.
"""

from collections.abc import Iterable, Sequence
from typing import final

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc

from allranks.errors import AllranksError
from allranks.surviving.hosts.notices import Notices
from allranks.surviving.hosts.seating import Seating
from allranks.surviving.hosts.table import Table, host_of, key_of
from allranks.verdict import Verdict


@final
class Spares:
    """The leader's view of them."""

    def __init__(self, notices: Notices, seating: Seating, most: int) -> None:
        """`most`: hosts of a round."""
        self._notices, self._seating, self._most = notices, seating, most
        self._names = self._told = frozenset[str]()
        self._weighed = frozenset[_NodeDesc]()

    def begin_round(self, table: Table) -> None:
        """A round begins, without those that it has left over."""
        self._names, self._weighed = frozenset(table.spares), frozenset()

    def let_in(self, table: Table, waiting: Iterable[_NodeDesc]) -> tuple[str, ...]:
        """The names of hosts with which more workers would train than do; the others learn that they are spares.

        Raises StoreLostError, SealError.
        """
        known = frozenset(node for node in waiting if self._seating.workers_of(node))
        if not known or known == self._weighed:
            return ()
        nodes = [*table.members, *sorted(known)][: self._most]
        seats = self._seats(nodes)
        if sum(seats) > sum(table.workers):
            return tuple(host_of(node) for node, seat in zip(nodes, seats, strict=True) if seat and node in known)
        self._weighed, self._names = known, frozenset((*table.spares, *map(host_of, known)))
        told = {"workers": sum(table.workers), "hosts": sorted(map(key_of, known))}
        self._notices.post(f"spares/{table.number}", told)
        return ()

    def can_train(self, nodes: Iterable[_NodeDesc]) -> bool:
        """Whether the layout takes workers of these hosts. Raises StoreLostError, SealError."""
        return sum(self._seats([*nodes][: self._most])) > 0

    def suffice(self, nodes: Sequence[_NodeDesc], least: int) -> bool:
        """Whether these hosts, `least` at least, can train. Raises StoreLostError, SealError."""
        return len(nodes) >= least and self.can_train(nodes)

    def _seats(self, nodes: list[_NodeDesc]) -> tuple[int, ...]:
        try:
            return self._seating.seat([self._seating.workers_of(node) for node in nodes])
        except AllranksError:  # they are too few, or the run's config cannot be read now
            return ()

    def news(self, table: Table) -> Verdict | None:
        """Who waits as a spare, where somebody does of whom that was not told; else None."""
        new, self._told = self._names - self._told, self._names
        if not new:
            return None
        what = f"{', '.join(sorted(new))} waits as a spare: {describe(sum(table.workers))}"
        return Verdict("spare", what, (), "nothing; it takes the place of a host that is lost or leaves")


def describe(workers: int) -> str:
    """Why there are spares beside so many workers that train."""
    return f"of the workers that are there {workers} train, and layout and global batch take no more"


def own_words(workers: int) -> str:
    """What a host says that waits as a spare beside so many workers that train."""
    return f"this host waits as a spare: {describe(workers)}; it takes the place of a host that is lost or leaves"
