"""A dry run's messages against what torch itself records of a real step over gloo: axis, kind, number and bytes.

Nothing here rests on our counter (`Collectives`), nor on the names that the engine gives to groups. torch's profiler
says of every call of gloo its kind, shape and type ("gloo:broadcast"), and of every operator that asked for one whose
broadcast it is and how an exchange was cut ("c10d::broadcast_"). Over which group it goes the profiler does not say of
gloo (only of NCCL: `record_param_comms`): that is taken from torch's flight recorder, which gloo's process group writes
in C++. Both list the same calls, which is looked at first. So what `parallel/gloo_ops.py` puts in the place of gloo's
own all-gather and reduce-scatter is seen as what it is: broadcasts and exchanges.

Sends and receives are in the profiler alone, without a group: a layout here has one axis that has any, and theirs they
are. Bytes are those that a rank receives (of a send: that it sends). Of an all-reduce no record knows them: they are
2 (n - 1) / n of the recorded tensor, as in a ring, as everywhere in a dry run.

No layout here has two axes of which a group's ranks alone do not tell which it is: ep over all of dp_shard, the copies
of experts along cp.

Of experts the router decides what travels. Here it chooses them in turn, so that each gets equally many tokens, which
is what a dry run takes for granted.
"""

import importlib
import json
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from allranks.config import Config
from allranks.layout import Layout
from allranks.parallel import lines
from allranks.parallel.mesh import MESH_AXES
from allranks.rehearsing.dryrun import World, rehearse_rank
from allranks.task import Task
from allranks.training.prepare import resolve_layout
from tests.distributed.pool import Pools
from tests.distributed.sessions import config_of, session_of
from tests.rehearsing.tasks import Adversaries, EvenExperts, Gathering, Normed, Tokens

Over = tuple[str, tuple[int, ...]]
"""A group: torch's number of it, which two groups of the same ranks differ by, and its ranks."""
UNKNOWN: Over = ("", ())
Recorded = list[tuple[Over, str, int]]
"""Of each message: the group (UNKNOWN where the record has none), its kind, the bytes that a rank receives."""

SIZES: dict[str, Any] = {"hidden": 128, "seq": 128, "vocab": 512, "layers": 4}
WARM_STEPS = 2  # DDP makes its buckets anew in the second
BUFFER = 10_000  # calls that the flight recorder holds
WIDTHS = {
    # The profiler's names, then the flight recorder's.
    **{"float": 4, "double": 8, "c10::BFloat16": 2, "c10::Half": 2, "long int": 8, "int": 4, "unsigned char": 1},
    **{"Float": 4, "Double": 8, "BFloat16": 2, "Half": 2, "Long": 8, "Int": 4, "Byte": 1},
}
KINDS = {
    "allreduce_": ("all-reduce", "all_reduce"),
    "broadcast_": ("broadcast", "broadcast"),
    "allgather_": ("all-gather", "all_gather"),
    "_allgather_base_": ("all-gather", "all_gather"),
    "_reduce_scatter_base_": ("reduce-scatter", "all_reduce"),  # gloo's is an all-reduce of the whole (torch 2.13)
    "alltoall_base_": ("all-to-all", "all_to_all"),
}
"""torch's operator -> (our name, gloo's)."""
POINT_TO_POINT = {"gloo:send": "send", "gloo:recv": "receive"}


ACCUMULATED = ("train.micro_batch=1",)
RING = ("layout.context=ring",)
BFLOAT16 = ("train.precision=bfloat16",)
FLOAT16 = ("train.precision=float16",)
SCHEDULES = ("gpipe", "interleaved_zb", "zbv", "dualpipev", "looped_bfs")
"""1f1b and interleaved are above."""
FIRST = [(Tokens, "ddp", 2, ("layout.ddp_bucket_mb=1",))]
OTHERS = [
    (Tokens, "ddp", 2, ACCUMULATED),
    (Tokens, "fsdp", 4, ()),
    (Tokens, "dp_replicate=2,dp_shard=2", 4, ACCUMULATED),
    (Tokens, "dp_shard=2,sharding=optimizer", 2, ()),
    (Tokens, "dp_shard=2,sharding=grad_op", 2, ACCUMULATED),
    (Tokens, "cp=2", 2, ()),
    (Tokens, "cp=2", 2, RING),
    (Tokens, "cp=4", 4, RING),
    (Tokens, "pp=2", 2, ACCUMULATED),
    (Tokens, "pp=4", 4, ACCUMULATED),
    (Tokens, "pp=2,schedule=interleaved", 2, ACCUMULATED),
    (EvenExperts, "dp_replicate=2,ep=2", 2, ()),
    (EvenExperts, "dp_shard=4,ep=2", 4, ()),
    (EvenExperts, "dp_replicate=2,tp=2,ep=2", 4, ()),
    (Tokens, "tp=4", 4, ()),
    (Tokens, "tp=2,dp_shard=2", 4, ()),
    (Tokens, "pp=2,dp_shard=2", 4, ACCUMULATED),
    (Tokens, "dp_replicate=2,sharding=none", 2, ()),
    (Normed, "ddp", 2, ()),
    (Normed, "fsdp", 2, ()),
    (Adversaries, "ddp", 2, ()),
    (Adversaries, "fsdp", 2, ("train.micro_batch=8",)),
    (Gathering, "ddp", 2, ()),
    (Gathering, "fsdp", 2, ()),
    (Tokens, "ddp", 2, BFLOAT16),
    (Tokens, "fsdp", 2, BFLOAT16),
    (Tokens, "fsdp", 2, FLOAT16),
    (Tokens, "tp=2", 2, BFLOAT16),
    (Tokens, "cp=2", 2, BFLOAT16),
    (Tokens, "pp=2", 2, (*ACCUMULATED, *BFLOAT16)),
    (EvenExperts, "dp_replicate=2,ep=2", 2, BFLOAT16),
    (Tokens, "fsdp,recompute=full", 2, ()),
    (Tokens, "tp=2,recompute=full", 2, ()),
    (Tokens, "tp=2,recompute=selective", 2, ()),
    (Tokens, "cp=2,recompute=full", 2, RING),
    (Tokens, "cp=2,recompute=selective", 2, ()),
    (Tokens, "pp=2,tp=2,recompute=full", 4, ACCUMULATED),
    (EvenExperts, "dp_replicate=2,ep=2,recompute=full", 2, ()),
    *((Tokens, f"pp=2,schedule={schedule}", 2, ACCUMULATED) for schedule in SCHEDULES),
    (Tokens, "tp=2,cp=2", 4, ()),
    (Tokens, "cp=2,dp_shard=2", 4, ()),
    (Tokens, "pp=2,cp=2", 4, ACCUMULATED),
    (EvenExperts, "pp=2,dp_replicate=2,ep=2", 4, ()),
]


@pytest.fixture(scope="module", autouse=True)
def cache_directories() -> None:
    """Fake tensors import this, which sets an environment variable: before any test looks."""
    importlib.import_module("torch._inductor.runtime.cache_dir_utils")


def record_step(task: Task, config: Config) -> Recorded:
    """What torch records of this rank's step in its steady state, in a process that has no group yet."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = str(BUFFER)  # read when the first group is made
    dist.init_process_group("gloo")
    session = session_of(task, config)
    with session.loader() as loader:
        batch = next(loader)
    before = session.step.agree_first(batch)
    for _ in range(WARM_STEPS):
        before = session.step.run(batch, before, lambda: batch).pending
    before.read()
    known = len(flight_record())
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True) as profiled:
        session.step.run(batch, before, lambda: batch).pending.read()
    flown = flight_record()
    assert known < len(flown) < BUFFER  # the step's are among them, and none has been overwritten
    profiler: Any = profiled.profiler
    events = sorted(profiler.kineto_results.events(), key=lambda event: event.start_ns())
    agreement = session.processes.agreement
    return joined(events, flown[known:], None if agreement is None else agreement.group_name)


def flight_record() -> list[dict[str, Any]]:
    """The collectives that this process has begun so far, in their order."""
    c10d: Any = torch._C._distributed_c10d  # whose stubs lack it
    entries: list[dict[str, Any]] = json.loads(c10d._dump_fr_trace_json())["entries"]
    return sorted(entries, key=lambda entry: entry["record_id"])


def joined(events: Sequence[Any], flown: Sequence[Mapping[str, Any]], agreement: str | None) -> Recorded:
    """The messages that both records tell of, but for the vector on which ranks agree in a step, no part of a model's.

    Args:
        events: the profiler's, in their order.
        flown: the flight recorder's, in theirs.
    """
    groups = {group.group_name: group for group in dist.distributed_c10d._world.pg_map}
    # Over these, copies compare what they are about to reduce: nor is that a part of the model's step.
    world = dist.group.WORLD
    assert world is not None
    asking = {made[0].group_name for parts, made in lines._LINES.get(world, {}).items() if len(parts) == 1}
    asked = [event for event in events if event.name().startswith("c10d::")]
    asked = outermost([event for event in asked if event.name() not in ("c10d::send", "c10d::recv_")])
    done = [event for event in events if event.name().startswith("gloo:")]
    between = [event for event in done if event.name() in POINT_TO_POINT]
    of_gloo = Counter((one.name(), size_of(one.shapes()[0], one.dtypes()[0])) for one in done if one not in between)
    of_recorder = Counter((one["profiling_name"], given(one, "input")) for one in flown)
    assert of_gloo == of_recorder
    sizes = ((one.name(), size_of(one.shapes()[0], one.dtypes()[0])) for one in between)
    found: Recorded = [(UNKNOWN, POINT_TO_POINT[name], size) for name, size in sizes]
    flown = [entry for entry in flown if entry["process_group"][0] not in asking]
    for event, entry in zip(asked, flown, strict=True):
        name, group = event.name().removeprefix("c10d::"), groups[entry["process_group"][0]]
        kind, gloos = KINDS[name]
        assert entry["profiling_name"] == f"gloo:{gloos}"
        if group.group_name != agreement:
            ranks = tuple(dist.get_process_group_ranks(group))
            size = received(kind, event.concrete_inputs(), entry, len(ranks), dist.get_rank(group))
            found.append(((group.group_name, ranks), kind, size))
    return found


def outermost(events: Sequence[Any]) -> list[Any]:
    """Those within no other one: what selective recompute sees of an operator, it hands on, and both are recorded."""
    found: list[Any] = []
    for event in events:
        if not found or event.start_ns() >= found[-1].start_ns() + found[-1].duration_ns():
            found.append(event)
    return found


def received(kind: str, inputs: Sequence[Any], entry: Mapping[str, Any], num_ranks: int, rank: int) -> int:
    """Bytes that come from other ranks.

    Args:
        inputs: the operator's, those that are no tensors: the third is a broadcast's source, the fourth says into how
            many rows from each rank an exchange's output is cut, [] for equally many.
        rank: in the group.
    """
    sent, got = given(entry, "input"), given(entry, "output")
    if kind == "all-reduce":
        return got * 2 * (num_ranks - 1) // num_ranks
    if kind == "broadcast":
        return 0 if inputs[2] == rank else got
    if kind == "reduce-scatter":
        return sent // num_ranks * (num_ranks - 1)
    if kind == "all-to-all" and inputs[3]:
        rows: list[int] = inputs[3]
        return got - got * rows[rank] // max(1, sum(rows))
    return got - (got // num_ranks if kind == "all-to-all" else sent)


def given(entry: Mapping[str, Any], which: str) -> int:
    """Bytes of an entry's "input" or "output"."""
    pairs = zip(entry[f"{which}_sizes"], entry[f"{which}_dtypes"], strict=True)
    return sum(size_of(shape, dtype) for shape, dtype in pairs)


def size_of(shape: Sequence[int], dtype: str) -> int:
    """Bytes."""
    return math.prod(shape) * WIDTHS[dtype]


def axis_of(ranks: tuple[int, ...], layout: Layout, *, exchanges: bool) -> str:
    """The axes along which the ranks of a group differ, reckoned from the degrees; () is of the axis that sends.

    Args:
        exchanges: whether any all-to-all goes over the group. Where no parameters are shared, of the ranks that see
            other samples those alone exchange anything that share out experts.
    """
    if not ranks:
        return "pp" if layout.pp > 1 else "cp"
    degrees = {axis: getattr(layout, axis) for axis in MESH_AXES}
    places = torch.unravel_index(torch.tensor(ranks), tuple(degrees.values()))
    moved = [axis for axis, place in zip(degrees, places, strict=True) if len(place.unique()) > 1]
    if len(ranks) == math.prod(degrees[axis] for axis in moved):
        return "ep" if exchanges and moved == ["dp_replicate"] else "+".join(moved)
    return "ep" if ranks[1] == ranks[0] + 1 else "copies of experts"  # a part of an axis


def add_up(recorded: Recorded, layout: Layout) -> dict[tuple[str, str, str], int]:
    """(axis, kind, "count" or "bytes") -> how many, of one rank."""
    exchanging = {over for over, kind, _ in recorded if kind == "all-to-all"}
    found: Counter[tuple[str, str, str]] = Counter()
    for over, kind, num_bytes in recorded:
        if len(over[1]) == 1:
            continue
        axis = axis_of(over[1], layout, exchanges=over in exchanging)
        found[axis, kind, "count"] += 1
        found[axis, kind, "bytes"] += num_bytes
    return dict(found)


def compare(pool: Pools, kind: type[Task], layout: str, world: int, words: tuple[str, ...]) -> None:
    """The first rank, one in the middle (of four stages that is the third) and the last."""
    sizes, batch = (SIZES, 8) if issubclass(kind, Tokens) else ({}, 32)
    precision = next((word.partition("precision=")[2] for word in words if "precision" in word), "float32")
    given = (f"train.global_batch={batch}", "train.max_norm=1.0", *(word for word in words if "precision" not in word))
    config = config_of(layout, *given, precision=precision, steps=16)
    resolved = resolve_layout(config, world)
    recorded = pool(world).run_alone(record_step, kind(**sizes), config, timeout=240)
    for rank in {0, world // 2, world - 1}:
        told: Counter[tuple[str, str, str]] = Counter()
        for one in rehearse_rank(kind(**sizes), config, World(resolved, world, on_cuda=False), rank).collectives:
            if one.ranks == 1:  # travels nowhere, and along no axis
                continue
            told[one.axis, one.op, "count"] += one.count
            told[one.axis, one.op, "bytes"] += one.bytes
        assert dict(told) == add_up(recorded[rank], resolved)


def test_experts_that_lie_along_a_data_axis_are_told_from_it() -> None:
    layout, ranks = Layout(dp_replicate=2, ep=2), (0, 1)
    recorded: Recorded = [
        *((("1", ranks), "all-reduce", 64), (("7", ranks), "all-to-all", 10), (("7", ranks), "all-reduce", 8)),
    ]
    found = {(axis, kind): number for (axis, kind, what), number in add_up(recorded, layout).items() if what == "bytes"}
    assert found == {("dp_replicate", "all-reduce"): 64, ("ep", "all-to-all"): 10, ("ep", "all-reduce"): 8}


@pytest.mark.parametrize(("kind", "layout", "world", "words"), FIRST)
def test_messages_are_those_that_torch_records(
    pool: Pools, kind: type[Task], layout: str, world: int, words: tuple[str, ...]
) -> None:
    compare(pool, kind, layout, world, words)


@pytest.mark.full
@pytest.mark.parametrize(("kind", "layout", "world", "words"), OTHERS)
def test_messages_are_those_that_torch_records_on_every_axis(
    pool: Pools, kind: type[Task], layout: str, world: int, words: tuple[str, ...]
) -> None:
    compare(pool, kind, layout, world, words)
