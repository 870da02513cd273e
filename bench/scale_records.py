"""What ranks and hosts tell each other, made by the code that a run makes it with, for worlds of many sizes.

A world is torch's fake process group: of a collective it keeps what a rank brings. Checkpoints are written to a disk,
rank after rank, and committed; hosts meet at a store in this process.
"""

import json
import pickle
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from measured_row import Row, timed
from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from allranks.checkpointing.checkpoint import MANIFEST_FILE, Header
from allranks.checkpointing.commit import Share, commit, merge
from allranks.checkpointing.index import read_parts
from allranks.checkpointing.index_table import IndexTable, encode_parts
from allranks.checkpointing.manifest import CHUNK_BYTES, Manifest, parse_manifest, render_manifest
from allranks.checkpointing.portion import Place, place_of
from allranks.checkpointing.save import write_own
from allranks.config import Config
from allranks.hosts_request import Endpoint
from allranks.parameter_map import Box, Entry
from allranks.stepping.agreement import Agreement, Ballot, Pending
from allranks.stepping.alike import find_difference
from allranks.stepping.replicas import differ, sum_copies
from allranks.stepping.shards import LOOKED_AT
from allranks.surviving.hosts.backend import SealedBackend
from allranks.surviving.hosts.handler import MOST_SKIPPED
from allranks.surviving.hosts.meeting import MeetingStore
from allranks.surviving.hosts.seal import Seal

HEADER = Header("scale", 1, "fsdp", 1, 1)
ROWS, COLUMNS = 8, 4
"""Of each tensor what one rank holds: little, so that many ranks fit on one disk."""
MOST_COMPARED = 4096
"""Ranks whose settings are made and compared; of more they would fill this machine's memory."""
JOIN_ALONE = 512
"""Hosts that come to a meeting one by one; of more, the others come at once."""
MASK = (1 << 64) - 1


@contextmanager
def world(ranks: int, rank: int = 0) -> Iterator[dist.ProcessGroup]:
    """A fake process group of so many ranks, as one of them has it."""
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


class Reduced(TorchDispatchMode):
    """Keeps a copy of every tensor that goes into an all-reduce."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.tensors: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.c10d.allreduce_.default:
            self.tensors += [tensor.clone() for tensor in args[0]]
        return func(*args, **(kwargs or {}))

    def only(self) -> torch.Tensor:
        """The one that there was."""
        (tensor,) = self.tensors
        return tensor


def ballot(rank: int, ledger: int) -> Ballot:
    """What a rank brings to a step."""
    return Ballot(torch.tensor(float(rank), dtype=torch.float64), 4096, 1, rank == 1, False, ledger)


def brought(ranks: int, rank: int, ledger: int, stages: int) -> torch.Tensor:
    """The vector of one rank of so many, as it goes into the reduction."""
    reduced = Reduced()
    with world(ranks, rank) as group, reduced:
        Agreement(group, torch.device("cpu"), stage=rank * stages // ranks, num_stages=stages).start(
            ballot(rank, ledger)
        )
    return reduced.only()


def agreement(ranks: Sequence[int], stages: int = 1) -> Iterator[Row]:
    """The vector that every step reduces over all ranks: of the first, one in the middle and the last.

    Their sum, were all the others' like the one in the middle, has to be read as what they brought: the ledger, a
    number of 64 bits, must not be rounded.
    """
    draw = random.Random(1)
    for number in ranks:
        ledgers = [draw.getrandbits(64) for _ in range(3)]
        places = (0, number // 2, number - 1)
        first, middle, last = (
            brought(number, rank, ledger, stages) for rank, ledger in zip(places, ledgers, strict=True)
        )
        total = first + last + (number - 2) * middle
        agreed = Pending(total, None).read()
        expected = (ledgers[0] + ledgers[2] + (number - 2) * ledgers[1]) & MASK
        if (agreed.ledger, agreed.num_ranks, agreed.next_targets) != (expected, number, 4096 * number):
            raise AssertionError(f"of {number} ranks' sum something else was read: {agreed}")
        sizes = {vector.numel() * vector.element_size() for vector in (first, middle, last)}
        (size,) = sizes  # an all-reduce takes the same from every rank
        with world(number) as group:
            took = timed(partial(agree_once, Agreement(group, torch.device("cpu"), num_stages=stages)), 20)
        of_stages = f", of {stages} stages" if stages > 1 else ""
        yield Row(f"agreement on a step: one rank's vector{of_stages}", "ranks", number, took, size)


def agree_once(agreement: Agreement) -> None:
    """One step's, as one rank has it."""
    agreement.start(ballot(0, 1)).read()


def start(ranks: Sequence[int]) -> Iterator[Row]:
    """What every rank was given, which the first one gathers and compares before the first step."""
    what = "start: every rank's settings, gathered by the first rank"
    for number in ranks:
        sent = [json.dumps([dict(Config().flat()), 10**9], default=str) for _ in range(min(number, MOST_COMPARED))]
        size = sum(map(len, sent))
        if number > MOST_COMPARED:
            yield Row(what, "ranks", number, None, size * number // MOST_COMPARED, reckoned=True)
        else:
            yield Row(what, "ranks", number, timed(partial(compare, sent)), size)


def compare(sent: Sequence[str]) -> None:
    """What the first rank does with them."""
    assert find_difference([json.loads(one) for one in sent]) is None


def digests(ranks: Sequence[int]) -> Iterator[Row]:
    """What ranks tell of their copies and of their parts (the sentinels replicas and shards): all of it, on every rank.

    As of a model whose parameters and states are cut over eight ranks, and whose counters are on all: what ranks of one
    of the eight places tell is alike, and is made once for each place.
    """
    for number in ranks:
        places = [_told_at(place, number) for place in range(8)]
        text = "[" + ",".join(places[rank % 8] for rank in range(number)) + "]"

        def look(text: str = text) -> None:
            assert not differ([told["replicas"]["sums"] for told in json.loads(text)])

        what = "digests of copies and parts: all ranks', read by every rank"
        yield Row(what, "ranks", number, timed(look), len(text))


def _told_at(place: int, ranks: int) -> str:
    """What a rank at one of eight places tells in a round."""
    sets = {"parameters": range(place, ranks, 8), "states": range(place, ranks, 8), "counters": range(ranks)}
    boxes = {kind: Box((4 * place,), (4,)) if kind != "counters" else Box.whole((4,)) for kind in sets}
    entries = [
        Entry(kind, (4 if kind == "counters" else 32,), "float32", boxes[kind], tuple(held))
        for kind, held in sets.items()
    ]
    sums = sum_copies(
        [(one.name, one, torch.full((4,), 1.0 if one.name == "counters" else 2.0 + place)) for one in entries]
    )
    parts = [
        [f"model.layers.{n}.feed_forward.gate.weight", [8192 * place, 0], (1 << 32) - 1 - place]
        for n in range(LOOKED_AT)
    ]
    return json.dumps({"replicas": {"sums": sums, "fed_nothing": False}, "shards": parts})


@contextmanager
def written(ranks: int, tensors: int) -> Iterator[tuple[Place, list[Share]]]:
    """A checkpoint of sharded tensors as so many ranks have written it, and what each tells the first one."""
    with tempfile.TemporaryDirectory(prefix="allranks-scale-") as folder:
        place, shares = place_of(folder, HEADER, "scale"), []
        for rank in range(ranks):
            held = torch.full((ROWS, COLUMNS), float(rank))
            whole, box = (ROWS * ranks, COLUMNS), Box((ROWS * rank, 0), (ROWS, COLUMNS))
            parts = [(Entry(f"model.layers.{n}.weight", whole, "float32", box, (rank,)), held) for n in range(tensors)]
            _, share = write_own(place, parts, rank, {}, {}, tells=rank == 0, looks=rank == 0)
            assert not share.error, share.error
            shares.append(share)
        yield place, shares


def told(shares: Sequence[Share]) -> list[bytes]:
    """What the ranks send to the first one of what they have written."""
    return [json.dumps(asdict(share)).encode() for share in shares]


def saving(ranks: Sequence[int], tensors: int) -> Iterator[Row]:
    """What the first rank gathers and merges, and the manifest of the committed checkpoint, which all ranks read.

    Behind them what every rank hears in a resume of where the others' boxes lie, from the headers of its files, and
    takes to find those that it needs.
    """
    save, resumed = f"saving {tensors} tensors", []
    for number in ranks:
        with written(number, tensors) as (place, shares):
            sent = told(shares)

            def join(sent: list[bytes] = sent) -> Manifest:
                return merge(HEADER, [Share(**json.loads(one)) for one in sent], {}, "2", "scale")

            took = timed(join)
            manifest = commit(place.temporary, place.target, HEADER, shares, {}, "2")
            text = (place.target / MANIFEST_FILE).read_bytes()
            rows = encode_parts(read_parts(place.target, manifest), manifest)
        yield Row(f"{save}: gathered and merged by the first rank", "ranks", number, took, sum(map(len, sent)))
        read = timed(partial(parse_manifest, text, "scale"))
        yield Row(f"{save}: the manifest, read by every rank", "ranks", number, read, len(text))
        find_parts(manifest, rows)  # what torch does once
        found = timed(partial(find_parts, manifest, rows))
        what = f"resuming {tensors} tensors: all ranks' boxes, heard by every rank"
        resumed.append(Row(what, "ranks", number, found, len(rows)))
    yield from resumed


def find_parts(manifest: Manifest, rows: bytes) -> None:
    """What rank 0 reads of each tensor: it is cut as it was."""
    table = IndexTable(manifest, rows)
    for name in manifest.tensors:
        assert len(table.meeting(name, Box((0, 0), (ROWS, COLUMNS)))) == 1


def growth(ranks: int, sizes: Sequence[tuple[int, int]]) -> Iterator[Row]:
    """What a save's bytes grow with besides ranks: (tensors, chunks of each file) at one number of ranks.

    Files of several chunks are not written, 16 MiB for each rank: their chunks are reckoned, in the files that are.
    """
    for tensors, chunks in sizes:
        with written(ranks, tensors) as (_, short):
            shares = [replace(share, files=longer(share.files, chunks)) for share in short]
        what = f"saving {tensors} tensors in files of {chunks} chunk{'s' * (chunks > 1)}"
        gathered, reckoned = sum(map(len, told(shares))), chunks > 1
        yield Row(f"{what}: gathered by the first rank", "ranks", ranks, None, gathered, reckoned)
        text = render_manifest(merge(HEADER, shares, {}, "2", "scale"))
        yield Row(f"{what}: the manifest", "ranks", ranks, None, len(text.encode()), reckoned)


def longer(files: Any, chunks: int) -> dict[str, Any]:
    """The records of files as if of each so many chunks more than one were full, under the digest that the last has."""
    found = {}
    for name, record in files.items():
        (*head, (begin, length, digest)) = record["chunks"]
        full = [(begin + n * CHUNK_BYTES, CHUNK_BYTES, digest) for n in range(chunks - 1)]
        end = begin + (chunks - 1) * CHUNK_BYTES
        found[name] = {"bytes": end + length, "chunks": (*head, *full, (end, length, digest))}
    return found


def meeting(hosts: Sequence[int]) -> Iterator[Row]:
    """What hosts that meet keep in their store: each reads and writes all of it with every sign of life."""
    draw = random.Random(1)
    for number in hosts:
        nodes = [
            _NodeDesc(f"node-{n:05}.cluster", draw.randrange(1, 1 << 22), draw.randrange(MOST_SKIPPED))
            for n in range(number)
        ]
        place = MeetingStore(HashStore(), Endpoint("here", 1), "here", serves=True, call_seconds=60.0)
        alone = nodes if number <= JOIN_ALONE else nodes[-1:]
        if len(alone) < number:
            give_sign(host(place), nodes[:-1])
        for node in alone:
            give_sign(host(place), [node])
        mine = host(place)
        give_sign(mine, nodes[-1:])  # it has seen the others
        took = timed(partial(give_sign, mine, nodes[-1:]))
        found = mine.get_state()
        assert found is not None and len(pickle.loads(found[0]).participants) == number
        size = len(str(found[1]))
        yield Row("rendezvous of hosts: one sign of life of one host", "hosts", number, took, size)


def host(place: MeetingStore) -> SealedBackend:
    """One host's view of the meeting."""
    return SealedBackend(place, Seal(b"secret of the hosts"), lambda state: None)


def give_sign(backend: SealedBackend, nodes: Sequence[_NodeDesc]) -> None:
    """Read the state, enter these hosts' sign of life (who is new takes part), write it: as torch's handler does."""
    found = backend.get_state()
    state, token = (_RendezvousState(), None) if found is None else (pickle.loads(found[0]), found[1])
    for node in nodes:
        state.participants.setdefault(node, len(state.participants))
        state.last_heartbeats[node] = datetime.now(UTC)
    answer = backend.set_state(pickle.dumps(state), token)
    assert answer is not None and answer[2], "nobody else writes"
