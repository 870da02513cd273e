"""Which ranks the hosts of a round have, told to torchelastic through a store of this process alone."""

import json

from torch.distributed.elastic.agent.server.api import SimpleElasticAgent, WorkerSpec
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc

from allranks.surviving.hosts.table import ROLE, Table, host_of, key_of
from allranks.surviving.rendezvous import LocalRendezvous

A, B, C = (_NodeDesc(name, 1, 0) for name in ("b", "a", "c"))
TABLE = Table(4, (A, B, C), "127.0.0.1", 1234, (2, 1, 3))


def test_ranks_follow_the_order_of_the_hosts() -> None:
    assert [TABLE.ranks(TABLE.place_of(node)) for node in (A, B, C)] == [range(2), range(2, 3), range(3, 6)]


def test_a_host_hears_which_ranks_it_has_and_who_leads() -> None:
    assert [TABLE.describe(place) for place in (1, 2)] == ["rank 2 of 6; b leads", "ranks 3 to 5 of 6; b leads"]


def test_torchelastic_takes_them_from_here() -> None:
    for place, ranks in ((0, [0, 1]), (1, [2]), (2, [3, 4, 5])):
        spec = WorkerSpec(ROLE, len(ranks), LocalRendezvous("run"), entrypoint="x")
        workers = SimpleElasticAgent._assign_worker_ranks(None, TABLE.assignments(), place, 3, spec)
        assert [(one.global_rank, one.world_size) for one in workers] == [(rank, 6) for rank in ranks]


def test_what_stands_there_is_json() -> None:
    assert json.loads(TABLE.assignments().get("torchelastic/assigned_ranks/2")) == [3, 6, 3, 6]


def test_every_process_of_a_host_has_a_key_of_its_own() -> None:
    assert host_of(A) == host_of(_NodeDesc("b", 2, 0)) == "b"
    assert len({key_of(node) for node in (A, B, _NodeDesc("b", 2, 0), _NodeDesc("b", 1, 1))}) == 4
