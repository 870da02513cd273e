"""Dry runs against real processes: peak memory of a step and what travels in it, layout by layout.

    python bench/dryrun_accuracy.py [--quick | --large] [--json] [--save FILE] [--layout LAYOUT] [--device cpu|cuda]

Each configuration is trained by 1, 2 or 4 real processes over gloo; after two steps torch's allocator tells the peak of
the next, and of one more the messages are counted. The dry run of the first and of the last rank is beside it.
Nothing is timed, so the machine may be busy. `--save bench/results/dryrun.json` and `make fix` write the figures of
docs/how-to/rehearse.md and docs/explanation/measured.md.

With --device cuda each process has a GPU of its own: torch.cuda.max_memory_allocated is held against the predicted
peak (within 5%), and max_memory_reserved against that and the margin for the allocator's fragments. Layouts of more
processes than there are GPUs are left out, and named.
"""

import argparse
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from even_experts import EvenSubject
from local_steps import task_of
from rich.console import Console
from rich.table import Table

import allranks
from allranks.benchmarking.machine import describe_machine, machine_load
from allranks.config import Config, resolve_config
from allranks.launching.environment import read_environment
from allranks.observing.counters import Stopwatch
from allranks.parallel.backend import choose_device, start, stop
from allranks.rehearsal import RankRehearsal
from allranks.rehearsing.dryrun import World, rehearse_rank
from allranks.rehearsing.reality import measure_cuda_step, measure_step
from allranks.rehearsing.whole import COMING_AND_GOING, fragment_bytes
from allranks.stepping.session import assemble
from allranks.stepping.world import gather_processes
from allranks.training.prepare import resolve_layout
from allranks.units import format_bytes

TARGETS = {"cpu": 0.02, "cuda": 0.05}
TIMEOUT_SECONDS = 600.0
ACCUMULATED = ("train.micro_batch=1",)
RING = ("layout.context=ring",)
CASES: tuple[tuple[str, int, tuple[str, ...]], ...] = (
    ("single", 1, ()), ("ddp", 2, ()), ("ddp,recompute=full", 2, ACCUMULATED), ("fsdp", 2, ()),
    ("fsdp", 2, ("train.precision=bfloat16",)), ("fsdp,recompute=full", 2, ()),
    ("fsdp,sharding=grad_op", 2, ACCUMULATED), ("dp_shard=2,sharding=optimizer", 2, ()), ("tp=2", 2, ()),
    ("single,recompute=selective", 1, ()), ("cp=2", 2, ()), ("pp=2", 2, ()), ("pp=2,schedule=gpipe", 2, ()),
    ("dp_replicate=2,dp_shard=2", 4, ACCUMULATED), ("tp=2,dp_shard=2", 4, ()), ("cp=2,dp_shard=2", 4, ()),
    ("tp=2,cp=2", 4, ()), ("pp=2,dp_shard=2", 4, ()), ("pp=2,tp=2", 4, ()),
    ("fsdp,recompute=selective", 2, ()), ("tp=2,recompute=selective", 2, ()), ("cp=2,recompute=selective", 2, ()),
    ("pp=2,recompute=selective", 2, ()), ("tp=2,dp_shard=2,recompute=selective", 4, ()),
    ("dp_replicate=2,ep=2", 2, ()), ("dp_shard=2,ep=2", 2, ACCUMULATED), ("dp_replicate=2,ep=2,recompute=full", 2, ()),
    ("dp_shard=2,ep=2,recompute=selective", 2, ()), ("tp=2", 2, ACCUMULATED), ("tp=2,recompute=full", 2, ()),
    ("cp=2", 2, ACCUMULATED), ("cp=2,recompute=full", 2, ()), ("cp=2", 2, RING), ("pp=2", 2, ACCUMULATED),
    ("pp=2,recompute=full", 2, ()), ("pp=2,cp=2", 4, ()), ("dp_replicate=2,tp=2", 4, ()),
    ("dp_replicate=2,cp=2", 4, ()), ("dp_replicate=2,pp=2", 4, ()), ("dp_replicate=2,dp_shard=2,ep=2", 4, ()),
    ("dp_replicate=2,tp=2,ep=2", 4, ()),
    ("dp_replicate=2,cp=2,ep=2", 4, ()), ("dp_shard=2,cp=2,ep=2", 4, ()), ("dp_shard=2,pp=2,ep=2", 4, ()),
    ("dp_shard=2,tp=2,pp=2", 8, ()), ("dp_shard=2,tp=2,cp=2", 8, ()), ("dp_shard=2,cp=2,pp=2", 8, ()),
    ("tp=2,cp=2,pp=2", 8, ()), ("dp_replicate=2,dp_shard=2,tp=2", 8, ()), ("dp_replicate=2,dp_shard=2,pp=2", 8, ()),
    ("dp_replicate=2,tp=2,cp=2,ep=2", 8, ()), ("dp_replicate=2,tp=2,pp=2,ep=2", 8, ()),
    ("dp_replicate=2,cp=2,pp=2,ep=2", 8, ()), ("dp_shard=2,tp=2,pp=2,recompute=full", 8, ACCUMULATED),
)  # fmt: skip
"""(Layout, processes, config keys): every axis, every product of two and of three, and each axis with recomputation and
with more than one micro-step. A layout with experts trains a mixture of them."""
QUICK = ("ddp", "fsdp")
LARGE = tuple(
    (layout, 1, (f"train.precision={precision}", f"train.micro_batch={micro_batch}"))
    for layout, precision, micro_batches in (
        ("single", "bfloat16", (1, 2, 4)), ("single", "float32", (1,)),
        ("single,recompute=full", "bfloat16", (1, 4, 8)), ("single,recompute=selective", "bfloat16", (1, 4)),
        ("single,offload=activations", "bfloat16", (4,)),
    )
    for micro_batch in micro_batches
)  # fmt: skip
"""With --large: of what bench/gpu trains, 1.06 billion parameters, at 4,096 tokens a sample."""

Real = tuple[int, int, Mapping[str, tuple[int, int]]]
"""(bytes at most, reserved, messages)."""


@dataclass(frozen=True, slots=True)
class Row:
    """One rank of one configuration; error: predicted by real, less one; messages: whether they are the same.

    Of a GPU what its allocator reserves, too: 0 on a processor. coming_bytes: of the peak, what comes and goes.
    """

    layout: str
    keys: str
    processes: int
    rank: int
    real_bytes: int
    predicted_bytes: int
    error: float
    messages: bool
    reserved_bytes: int = 0
    reserved_predicted_bytes: int = 0
    coming_bytes: int = 0


def config_of(layout: str, keys: tuple[str, ...]) -> Config:
    """Steps of eight samples."""
    fixed = ["train.steps=16", "train.global_batch=8", "train.max_norm=1.0", "evaluate.every=0"]
    return resolve_config(task_defaults={}, toml=None, overrides=[*fixed, *keys], layout=layout)


def model_of(layout: str, large: bool = False) -> str:
    """What a layout trains, as `subject` calls it."""
    return "1b" if large else "experts" if ",ep=" in layout else "transformer"


def subject(model: str) -> allranks.Task:
    """What is trained: the "transformer" of ten million parameters, the "experts", or the "1b" of bench/gpu."""
    if model == "transformer":
        return task_of(model)
    if model == "experts":
        return EvenSubject(experts=True)
    sys.path.append(str(Path(__file__).with_name("gpu")))
    from language import Language

    return Language(size=model)


def real_step(layout: str, keys: tuple[str, ...], device: str, model: str) -> Real:
    """In one of the processes."""
    environment, config = read_environment(os.environ), config_of(layout, keys)
    found = resolve_layout(config, environment.world_size)
    choice = choose_device(environment, device, "gloo" if device == "cpu" else "nccl", found)
    start(environment, choice, timeout_seconds=TIMEOUT_SECONDS)
    processes = gather_processes(environment, choice, found)
    measure = measure_step if device == "cpu" else measure_cuda_step
    measured = measure(assemble(subject(model), config, processes, Stopwatch(), lambda: (False, False)))
    processes.barrier()
    stop()
    return measured.peak_bytes, measured.reserved_bytes, dict(measured.collectives)


def compare(layout: str, world: int, keys: tuple[str, ...], device: str, model: str) -> list[Row]:
    """Real processes, then the dry run of the first and the last of them."""
    everyones: list[Real] = allranks.launch(real_step, layout, keys, device, model, nproc=world)
    config, rows = config_of(layout, keys), []
    found, which = resolve_layout(config, world), (layout, " ".join(keys), world)
    for rank in sorted({0, world - 1}):
        told = rehearse_rank(subject(model), config, World(found, world, on_cuda=device == "cuda"), rank)
        peak, reserved, messages = everyones[rank]
        same = totals(told) == dict(messages)
        error, taken = (
            told.peak_bytes / peak - 1.0,
            round(told.peak_bytes + fragment_bytes(told, found)) if reserved else 0,
        )
        coming = sum(told.by_category.get(name, 0) for name in COMING_AND_GOING)
        rows.append(Row(*which, rank, peak, told.peak_bytes, error, same, reserved, taken, coming))
    return rows


def totals(told: RankRehearsal) -> dict[str, tuple[int, int]]:
    """ "axis op" -> (bytes, count)."""
    found: dict[str, tuple[int, int]] = {}
    for one in told.collectives:
        num_bytes, count = found.get(f"{one.axis} {one.op}", (0, 0))
        found[f"{one.axis} {one.op}"] = num_bytes + one.bytes, count + one.count
    return found


def document_of(machine: Mapping[str, object], listed: int, rows: list[Row]) -> str:
    """What was found so far, on what, and of how many configurations in all."""
    about = {"machine": {**machine, "load_after": machine_load()}, "listed": listed}
    return json.dumps({**about, "rows": [asdict(row) for row in rows]}, indent=2) + "\n"


def print_rows(rows: list[Row], device: str) -> None:
    """One line a rank."""
    table, target = Table(box=None, pad_edge=False), TARGETS[device]
    numbers = ("real", "dry run", "error", *(("reserved", "with margin") if device == "cuda" else ()))
    for heading in ("layout", "keys", "rank", *numbers, "messages"):
        table.add_column(heading, no_wrap=True, justify="right" if heading in numbers else "left")
    for row in rows:
        sizes = [format_bytes(row.real_bytes), format_bytes(row.predicted_bytes), f"{row.error:+.2%}"]
        if device == "cuda":
            sizes += [format_bytes(row.reserved_bytes), format_bytes(row.reserved_predicted_bytes)]
        table.add_row(row.layout, row.keys, str(row.rank), *sizes, "the same" if row.messages else "DIFFER")
    Console(width=120, highlight=False).print(table)
    far = sum(abs(row.error) > target for row in rows)
    print(f"{len(rows) - far} of {len(rows)} within {target:.0%}; messages the same in {sum(r.messages for r in rows)}")
    if device == "cuda":
        low = sum(row.reserved_bytes > row.reserved_predicted_bytes for row in rows)
        print(f"the allocator reserved more than peak and margin in {low} of {len(rows)}")


def main() -> None:
    """Compare, and print a table or one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two layouts")
    parser.add_argument("--large", action="store_true", help="a model of a billion parameters, on one GPU")
    parser.add_argument("--layout", help="this one only")
    parser.add_argument("--json", action="store_true", help="one JSON document, with the machine and the commit")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write that document after each configuration")
    parser.add_argument("--device", choices=tuple(TARGETS), default="cpu", help="what the processes compute on")
    options = parser.parse_args()
    if options.large and options.device != "cuda":
        parser.error("--large takes 60 GB and more: it is for --device cuda")
    listed = LARGE if options.large else CASES
    cases = [case for case in listed if options.layout in (None, case[0]) and (not options.quick or case[0] in QUICK)]
    if options.device == "cuda":
        there = torch.cuda.device_count()
        for layout, world, _ in (case for case in cases if case[1] > there):
            print(f"left out: {layout} takes {world} GPUs, and here are {there}", file=sys.stderr)
        cases = [case for case in cases if case[1] <= there]
        if not cases:
            raise SystemExit("nothing to compare: no GPU of this machine can be seen")
    rows, machine = [], describe_machine(options.device)
    for case in cases:
        rows += compare(*case, options.device, model_of(case[0], options.large))
        print(f"compared: {' '.join((case[0], *case[2]))}", file=sys.stderr)
        document = document_of(machine, len(listed), rows)
        if options.save:
            options.save.write_text(document)
    if options.json:
        print(document)
    else:
        print_rows(rows, options.device)


if __name__ == "__main__":
    main()
