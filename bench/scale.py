"""What each part of the system costs as devices, tensors and samples grow: measured as far as one process reaches.

    python bench/scale.py [--quick] [--json]

Nothing is spread here: a part that runs on one rank is run once with what it would get from so many ranks, and torch's
fake process group stands for a world of them. docs/explanation/scale.md says what follows.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState
from torch.testing._internal.distributed.fake_pg import FakeStore

from allranks.checkpointing.checkpoint import Header
from allranks.checkpointing.commit import Share, merge
from allranks.checkpointing.index_table import IndexTable, encode_parts
from allranks.checkpointing.manifest import CHUNK_BYTES, Manifest, parse_manifest, render_manifest
from allranks.checkpointing.tensor_file import Part
from allranks.config import Config
from allranks.data.cut import Cut
from allranks.data.permutation import permute
from allranks.layout import Layout
from allranks.named_models import find_model
from allranks.observing.journal import Journal
from allranks.parallel.mesh import build_mesh
from allranks.parameter_map import Box, Entry
from allranks.planning.answer import make_plan
from allranks.planning.hardware import find_cluster
from allranks.planning.question import Question
from allranks.stepping.agreement import Agreement, Ballot
from allranks.stepping.replicas import differ, sum_copies
from allranks.stepping.shards import LOOKED_AT
from allranks.surviving.hosts.backend import KEY
from allranks.surviving.hosts.seal import Seal
from allranks.surviving.hosts.state import StateReader

CHUNK = "0" * 64
LAST_BYTES = 1 << 20
GROWTH = ((50, 1), (200, 1), (800, 1), (200, 8))
"""(Tensors, chunks of each rank's file) of saves whose bytes are counted."""


@dataclass(frozen=True)
class Row:
    """What a part of the system took at one size.

    Attributes:
        part: of the system; of what: the size.
        microseconds: of the processor; size_bytes: that are sent, kept or written; None where that is not the point.
    """

    part: str
    of: str
    number: int
    microseconds: float | None = None
    size_bytes: int | None = None


def timed(call: Callable[[], object], turns: int = 1) -> float:
    """Microseconds of the processor for one call."""
    start = time.process_time()
    for _ in range(turns):
        call()
    return (time.process_time() - start) / turns * 1e6


def order(samples: tuple[int, ...]) -> Iterator[Row]:
    """The sample at a position, and what a checkpoint keeps of the order: the position."""
    positions = np.arange(1024)
    for number in samples:
        permute(number, 1, positions)
        each = timed(partial(permute, number, 1, number - 1 - positions), 50) / len(positions)
        yield Row("order of samples: one position", "samples", number, each, len(json.dumps(number)))


def cut(ranks: tuple[int, ...]) -> Iterator[Row]:
    """Which samples of a step are a rank's."""
    for number in ranks:
        cut = Cut(global_batch=4 * number, num_ranks=number, micro_batch=1)
        yield Row(
            "cut of a step: one rank's samples",
            "ranks",
            number,
            timed(partial(cut.spans, cut.global_batch, 7), 20),
        )


def agreement(ranks: tuple[int, ...]) -> Iterator[Row]:
    """The vector that every step reduces over all ranks."""
    pending = Agreement(None, torch.device("meta")).start(Ballot(torch.zeros(()), 1, 1, False, False, (1 << 64) - 1))
    vector = pending.next_targets._base
    assert vector is not None
    for number in ranks:
        yield Row("agreement on a step: one rank's vector", "ranks", number, None, vector.numel() * 8)


def shares(ranks: int, tensors: int, chunks: int = 1) -> list[Share]:
    """What so many ranks tell the first one after they have written a checkpoint of sharded tensors.

    Args:
        chunks: of each rank's file, 16 MiB each but for the last.
    """
    last = chunks - 1
    pieces = [[n * CHUNK_BYTES, CHUNK_BYTES if n < last else LAST_BYTES, CHUNK] for n in range(chunks)]
    found = []
    for rank in range(ranks):
        whole, offset, extent = (8 * ranks, 4), (8 * rank, 0), (8, 4)
        mine = [(f"model.layers.{n}.weight", "float32", whole, offset, extent, n) for n in range(tensors)]
        file = {f"rank-{rank}.safetensors": {"bytes": last * CHUNK_BYTES + LAST_BYTES, "chunks": pieces}}
        held = [(name, dtype, shape) for name, dtype, shape, *_ in mine] if rank == 0 else []
        found.append(Share(rank, files=file, tensors=mine, held=held))
    return found


def manifest(ranks: tuple[int, ...], tensors: int) -> Iterator[Row]:
    """Saving: what the first rank gathers and merges, and the manifest that all read."""
    header = Header("scale", 1, "fsdp", 1, 1)
    for number in ranks:
        told = shares(number, tensors)
        gathered = sum(len(json.dumps(asdict(share))) for share in told)
        took = timed(partial(merge, header, told, {}, "2", "scale"))
        text = render_manifest(merge(header, told, {}, "2", "scale"))
        yield Row(f"saving {tensors} tensors: gathered and merged by the first rank", "ranks", number, took, gathered)
        read = timed(partial(parse_manifest, text.encode(), "scale"))
        yield Row(f"saving {tensors} tensors: the manifest, read by every rank", "ranks", number, read, len(text))


def growth(ranks: int, sizes: tuple[tuple[int, int], ...]) -> Iterator[Row]:
    """What a save's bytes grow with besides ranks: (tensors, chunks of each file) at one number of ranks."""
    header = Header("scale", 1, "fsdp", 1, 1)
    for tensors, chunks in sizes:
        told = shares(ranks, tensors, chunks)
        what = f"saving {tensors} tensors in files of {chunks} chunk{'s' * (chunks > 1)}"
        gathered = sum(len(json.dumps(asdict(share))) for share in told)
        yield Row(f"{what}: gathered by the first rank", "ranks", ranks, None, gathered)
        text = render_manifest(merge(header, told, {}, "2", "scale"))
        yield Row(f"{what}: the manifest", "ranks", ranks, None, len(text))


def resuming(ranks: tuple[int, ...], tensors: int) -> Iterator[Row]:
    """What every rank hears of where the others' boxes lie, and takes to find those that it needs."""
    for number in ranks:
        told = shares(number, tensors)
        manifest = merge(Header("scale", 1, "fsdp", 1, 1), told, {}, "2", "scale")
        parts = [
            Part(name, dtype, Box(tuple(offset), tuple(extent)), tuple(whole), f"rank-{share.rank}.safetensors", n)
            for share in told
            for n, (name, dtype, whole, offset, extent, _) in enumerate(share.tensors)
        ]
        rows = encode_parts(parts, manifest)
        find_parts(manifest, rows)  # what torch does once
        took = timed(partial(find_parts, manifest, rows))
        yield Row(
            f"resuming {tensors} tensors: all ranks' boxes, heard by every rank", "ranks", number, took, len(rows)
        )


def find_parts(manifest: Manifest, rows: bytes) -> None:
    """What rank 0 reads of each tensor: it is cut as it was."""
    table = IndexTable(manifest, rows)
    for name in manifest.tensors:
        assert len(table.meeting(name, Box((0, 0), (8, 4)))) == 1


def start(ranks: tuple[int, ...]) -> Iterator[Row]:
    """What every rank was given, which the first one gathers and compares before the first step."""
    settings = len(json.dumps([Config().flat(), 10**9], default=str))
    for number in ranks:
        yield Row("start: every rank's settings, gathered by the first rank", "ranks", number, None, settings * number)


def journal(samples: tuple[int, ...]) -> Iterator[Row]:
    """The line of a step, which rank 0 alone writes."""
    fields = {"loss": 2.345678901234567, "lr": 3e-4, "grad_norm": 0.98765432109876, "seconds": 12.345678}
    for number in samples:
        with tempfile.TemporaryDirectory() as folder:
            kept = Journal(Path(folder) / "rank-00000.jsonl")
            write = partial(kept.write, "step", step=number // 4096, samples=number, ledger=f"{number:016x}", **fields)
            took = timed(write, 200)
            kept.close()
            size = kept.path.stat().st_size // 200
        yield Row("journal: the line of a step", "samples", number, took, size)


def digests(ranks: tuple[int, ...]) -> Iterator[Row]:
    """What ranks tell of their copies and of their parts (the sentinels replicas and shards): all of it, on every rank.

    As of a model whose parameters and states are cut over eight ranks, and whose counters are on all.
    """
    parts = [[f"model.layers.{n}.feed_forward.gate.weight", [8192, 0], (1 << 32) - 1] for n in range(LOOKED_AT)]
    for number in ranks:
        sets = {"parameters": range(0, number, 8), "states": range(0, number, 8), "counters": range(number)}
        entries = [Entry(kind, (4,), "float32", Box.whole((4,)), tuple(held)) for kind, held in sets.items()]
        sums = sum_copies([(entry.name, entry, torch.ones(4)) for entry in entries])
        one = json.dumps({"replicas": {"sums": sums, "fed_nothing": False}, "shards": parts})
        text = "[" + ",".join([one] * number) + "]"

        def look(text: str = text) -> bool:
            return differ([told["replicas"]["sums"] for told in json.loads(text)])

        yield Row(
            "digests of copies and parts: all ranks', read by every rank", "ranks", number, timed(look), len(text)
        )


def meeting(hosts: tuple[int, ...]) -> Iterator[Row]:
    """What hosts that meet keep in their store: each reads and writes all of it with every sign of life."""
    for number in hosts:
        state, now = _RendezvousState(), datetime.now(UTC)
        state.participants = {_NodeDesc(f"node-{n:05}.cluster", 10_000 + n, 0): n for n in range(number)}
        state.last_heartbeats = dict.fromkeys(state.participants, now)
        reader, seal = StateReader(time.monotonic), Seal(b"secret")
        text = seal.close(KEY, reader.write(state, 1))

        def beat(reader: StateReader = reader, seal: Seal = seal, text: str = text) -> None:
            seal.close(KEY, reader.write(reader.read(seal.open(KEY, text)), 2))

        yield Row("rendezvous of hosts: one sign of life of one host", "hosts", number, timed(beat), len(text))


def mesh(ranks: tuple[int, ...]) -> Iterator[Row]:
    """The mesh and its groups, as one rank builds them."""
    for number in ranks:
        dist.init_process_group("fake", rank=0, world_size=number, store=FakeStore())
        layout = Layout(dp_replicate=number // 64, dp_shard=8, tp=8)
        took = timed(partial(build_mesh, layout, "cpu"))
        yield Row("mesh: one rank's, hsdp and tp=8", "ranks", number, took)
        dist.destroy_process_group()


def plan(clusters: tuple[int, ...]) -> Iterator[Row]:
    """The search of a plan for a model of 405 billion parameters, its batch in proportion to the devices."""
    shape = find_model("llama3-405b")
    for nodes in clusters:
        cluster = find_cluster(f"{nodes}x8:h100")
        question = Question(shape.profile, cluster, global_batch=8 * nodes, seq=8192)
        yield Row("plan of 405B", "devices", 8 * nodes, timed(partial(make_plan, question)))


def measure(quick: bool) -> list[Row]:
    """All parts, each at rising sizes."""
    ranks = (64, 512) if quick else (64, 512, 4096)
    return [
        *order((10**6, 10**9) if quick else (10**6, 10**9, 10**12, 10**15)),
        *cut((64, 4096) if quick else (64, 4096, 131072)),
        *agreement((64, 131072)),
        *start((64, 4096, 131072)),
        *journal((10**6, 10**15)),
        *digests((64, 4096) if quick else (64, 4096, 131072)),
        *manifest(ranks, 20 if quick else 200),
        *resuming(ranks, 20 if quick else 200),
        *growth(64 if quick else 512, GROWTH),
        *meeting((8, 64) if quick else (8, 512, 16384)),
        *mesh(ranks),
        *plan((8, 64) if quick else (8, 256, 2048, 16384)),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = measure(arguments.quick)
    if arguments.json:
        print(json.dumps({"torch": torch.__version__, "rows": [asdict(row) for row in rows]}, indent=1))
        return 0
    for row in rows:
        took = "" if row.microseconds is None else f"{row.microseconds:,.1f} us"
        size = "" if row.size_bytes is None else f"{row.size_bytes:,} bytes"
        print(f"{row.part:<66}{row.number:>20,} {row.of:<9}{took:>18}{size:>20}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
