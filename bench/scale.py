"""What each part of the system costs as devices, tensors and samples grow: measured as far as one process reaches.

    python bench/scale.py [--quick] [--json]

Nothing is spread here: a part that runs on one rank is run once with what it would get from so many ranks, which
scale_records.py makes, and torch's fake process group stands for a world of them. `--json > bench/results/scale.json`
and `make fix` write docs/explanation/scale.md, which says what follows. What was reckoned, not made, is marked.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
from measured_row import Row, timed
from scale_records import agreement, digests, growth, meeting, saving, start, world

from allranks.benchmarking.machine import describe_machine, machine_load
from allranks.data.cut import Cut
from allranks.data.permutation import permute
from allranks.layout import Layout
from allranks.named_models import find_model
from allranks.observing.journal import Journal
from allranks.parallel.mesh import build_mesh
from allranks.planning.answer import make_plan
from allranks.planning.hardware import find_cluster
from allranks.planning.question import Question

GROWTH = ((50, 1), (200, 1), (800, 1), (200, 8))
"""(Tensors, chunks of each rank's file) of saves whose bytes are counted."""


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


def mesh(ranks: tuple[int, ...]) -> Iterator[Row]:
    """The mesh and its groups, as one rank builds them."""
    for number in ranks:
        layout = Layout(dp_replicate=number // 64, dp_shard=8, tp=8)
        with world(number):
            took = timed(partial(build_mesh, layout, "cpu"))
        yield Row("mesh: one rank's, hsdp and tp=8", "ranks", number, took)


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
        *agreement((64, 512) if quick else (64, 4096, 131072)),
        *agreement((64,) if quick else (64, 131072), stages=16),
        *start((64, 512) if quick else (64, 4096, 131072)),
        *journal((10**6, 10**15)),
        *digests((64, 4096) if quick else (64, 4096, 131072)),
        *saving((16, 64) if quick else ranks, 20 if quick else 200),
        *growth(8 if quick else 512, GROWTH),
        *meeting((8, 64) if quick else (8, 512, 16384)),
        *mesh(ranks),
        *plan((8, 64) if quick else (8, 256, 2048, 16384)),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    machine, rows = describe_machine("cpu"), measure(arguments.quick)
    if arguments.json:
        about = {**machine, "load_after": machine_load()}
        print(json.dumps({"machine": about, "rows": [asdict(row) for row in rows]}, indent=1))
        return 0
    for row in rows:
        took = "" if row.microseconds is None else f"{row.microseconds:,.1f} us"
        size = "" if row.size_bytes is None else f"{row.size_bytes:,} bytes"
        print(f"{row.part:<66}{row.number:>20,} {row.of:<9}{took:>18}{size:>20}{' (reckoned)' * row.reckoned}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
