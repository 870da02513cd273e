"""Table: the hosts of one round in their order, and which ranks each of them has."""

import json
from dataclasses import dataclass
from typing import final

from torch._C._distributed_c10d import HashStore, Store
from torch.distributed.elastic.agent.server.api import _RoleInstanceInfo
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc

ROLE = "allranks"


@final
@dataclass(frozen=True, slots=True)
class Table:
    """One round.

    Attributes:
        number: the round's.
        members: its hosts' agents: the leader first, the others ascending.
        address, port: of the workers' store on the leader's host.
        workers: how many workers each of them has.
        attempt: of the run, as the leader has counted it.
        new: the places of hosts that were reached in none before.
        tried: the places of hosts of which all see whether they are reached: the new ones, and after a round in which
            connections were lost, or nothing went on, all.
        addresses: of all networks that its hosts are on; empty where it has one host.
        spares: in words, hosts and workers that are there and have no place in it.
    """

    number: int
    members: tuple[_NodeDesc, ...]
    address: str
    port: int
    workers: tuple[int, ...] = ()
    attempt: int = 0
    new: tuple[int, ...] = ()
    tried: tuple[int, ...] = ()
    addresses: tuple[str, ...] = ()
    spares: tuple[str, ...] = ()

    def place_of(self, node: _NodeDesc) -> int:
        """A host's number among the members."""
        return self.members.index(node)

    def ranks(self, place: int) -> range:
        """The global ranks of a host's workers."""
        first = sum(self.workers[:place])
        return range(first, first + self.workers[place])

    def describe(self, place: int) -> str:
        """What a host's user hears of the round: which of its ranks are there, and who leads."""
        ranks = self.ranks(place)
        own = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
        return f"{own} of {sum(self.workers)}; {host_of(self.members[0])} leads"

    def assignments(self) -> Store:
        """What torchelastic's agents would agree on through the common store, in one of this process alone.

        There everybody who reaches the port could write it; here it stands as the sealed notices said.
        """
        store, total = HashStore(), sum(self.workers)
        for place, workers in enumerate(self.workers):
            base = self.ranks(place).start
            store.set(f"torchelastic/role_info/{place}", _RoleInstanceInfo(ROLE, place, workers).serialize().decode())
            store.set(f"torchelastic/assigned_ranks/{place}", json.dumps([base, total, base, total]))
        return store


def host_of(node: _NodeDesc) -> str:
    """The name of a node's host."""
    return str(node.addr)


def key_of(node: _NodeDesc) -> str:
    """A node in the keys of notices."""
    return json.dumps([node.addr, node.pid, node.local_id])
