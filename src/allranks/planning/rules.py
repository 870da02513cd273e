"""Named rules: what the engine does not run, said before anybody starts it, with the numbers in the reason.

Each rule takes a profile, a cluster and a choice, and returns a Refusal or nothing. They say what the engine says
(`layout_refusals.refuse_unsupported`, parallel/tensor_plan, stages, context, expert, data/cut); a test holds them to
it. The search and a hand-written layout go through the same rules.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import get_args

from allranks.cluster import Cluster
from allranks.config_sections import PROCESS_AXES, TrainConfig
from allranks.errors import LayoutError
from allranks.layout import Layout
from allranks.layout_refusals import refuse_beside_float8, refuse_unsupported
from allranks.model_profile import ModelProfile, Operation
from allranks.plan import Choice, Refusal
from allranks.planning.micro_step_rules import least_batch, micro_steps, name_data, name_stages, pipeline_batch
from allranks.planning.sending_less import slow_links

Rule = Callable[[ModelProfile, Cluster, Choice], Refusal | None]

PRECISIONS: tuple[str, ...] = get_args(TrainConfig.model_fields["precision"].annotation)


def check(profile: ModelProfile, cluster: Cluster, choice: Choice) -> Refusal | None:
    """The first rule that does not let `choice` in; None: the engine runs it (whether it fits is another question)."""
    for rule in RULES:
        if (refusal := rule(profile, cluster, choice)) is not None:
            return refusal
    return None


def check_modes(profile: ModelProfile, cluster: Cluster, choice: Choice) -> Refusal | None:
    """The same of a choice that has the degrees, schedule and batches of one that was let in, and other modes."""
    for rule in MODE_RULES:
        if (refusal := rule(profile, cluster, choice)) is not None:
            return refusal
    return None


def world(profile: ModelProfile, cluster: Cluster, choice: Choice) -> Refusal | None:
    """The degrees multiply to the devices."""
    layout = choice.layout
    if layout.kind in ("data_parallel", "placement"):
        because = f"{layout.kind} is one process on several devices: plan counts one device a process"
        return Refusal("world", layout.kind, because)
    if layout.world_size == cluster.num_devices:
        return None
    written = [f"{axis}({getattr(layout, axis)})" for axis in PROCESS_AXES if getattr(layout, axis) > 1]
    equation = f"{' * '.join(written) or 'single'} = {layout.world_size}"
    devices = "1 device" if cluster.num_devices == 1 else f"{cluster.num_devices} devices"
    return Refusal("world", str(layout), f"{equation}, but {cluster.name} has {devices}")


def batch(profile: ModelProfile, cluster: Cluster, choice: Choice) -> Refusal | None:
    """Every data-parallel rank has a sample in every step."""
    dp, size = choice.layout.dp, choice.global_batch
    if size >= dp:
        return None
    because = f"a global batch of {size} leaves {dp - size} of dp_replicate * dp_shard = {dp} ranks without a sample"
    return Refusal("batch", name_data(choice.layout), f"{because}; global_batch can be {least_batch(choice)} or more")


def precision(profile: ModelProfile, cluster: Cluster, choice: Choice) -> Refusal | None:
    """The type of the heavy operations is one that the engine has, and that the device multiplies."""
    name = f"precision={choice.precision}"
    if choice.precision not in PRECISIONS:
        return Refusal("precision", name, f"train.precision is one of {', '.join(PRECISIONS)}")
    if choice.precision not in cluster.device.peak_flops:
        known = ", ".join(cluster.device.peak_flops)
        return Refusal("precision", name, f"{cluster.device.name} has no rate for it: it has {known}")
    if choice.precision == "float8":
        try:
            refuse_beside_float8(choice.layout)
        except LayoutError as error:
            return Refusal("precision", name, str(error))
    return None


def tensor(profile: ModelProfile, cluster: Cluster, choice: Choice) -> Refusal | None:
    """tp needs layers that it can cut, and divides heads, key-value heads and the sizes of cut matrices."""
    tp = choice.layout.tp
    if tp == 1:
        return None
    if not profile.tensor_parallel:
        return Refusal("tensor", f"tp={tp}", f"tp finds no layer of {profile.name} to cut: see hints().tensor")
    for number, noun in ((profile.heads, "heads"), (profile.kv_heads, "key-value heads")):
        if number % tp:
            return Refusal("tensor", f"tp={tp}", f"tp={tp} does not divide {number} {noun}; {_tensor_degrees(profile)}")
    for block in profile.blocks:
        for operation in block.operations:
            if size := _uncut_size(operation, tp):
                what = f"{size} {'outputs' if operation.cut == 'column' else 'inputs'} of {block.name}.{operation.name}"
                because = f"tp={tp} does not divide the {what}; {_tensor_degrees(profile)}"
                return Refusal("tensor", f"tp={tp}", because)
    return None


def parts_of_sequence(layout: Layout) -> int:
    """Into how many equal parts cp cuts a sequence: one for each rank, or two of a ring (parallel/ring.py)."""
    return layout.cp * (2 if layout.cp > 1 and layout.context == "ring" else 1)


def context(profile: ModelProfile, cluster: Cluster, choice: Choice) -> Refusal | None:
    """cp cuts sequences into equal parts; ulysses shares a rank's heads, ring gives each rank two chunks.

    A window is a mask, which a ring refuses (parallel/ring.py).
    """
    layout, cp = choice.layout, choice.layout.cp
    if cp == 1:
        return None
    name = f"cp={cp}" if layout.context == "ulysses" else f"cp={cp},context={layout.context}"
    if not profile.context_parallel or not profile.seq:
        return Refusal("context", "cp", f"{profile.name} has no sequences that cp can cut")
    if profile.stateful and layout.batchnorm in ("local", "broadcast"):
        because = f"{profile.stateful[0]} takes statistics, and cp gives a rank some positions only: use batchnorm=sync"
        return Refusal("context", f"batchnorm={layout.batchnorm}", because)
    if profile.coupled:
        return Refusal("context", "cp", "the loss couples samples, and cp gives each rank other positions of them")
    if layout.context == "ring" and profile.has_windows:
        because = f"layers of {profile.name} attend to windows, a mask that ring attention has not: context=ulysses has"
        return Refusal("context", name, because)
    chunks = parts_of_sequence(layout)
    if profile.seq % chunks:
        what = f"2 * cp({cp}) = {chunks}" if layout.context == "ring" else f"cp={cp}"
        below = profile.seq // chunks * chunks
        near = " or ".join(str(seq) for seq in (below, below + chunks) if seq)
        return Refusal("context", name, f"{what} does not divide {profile.seq} positions; {near} can be divided")
    heads = profile.heads // layout.tp
    if layout.context == "ulysses" and heads % cp:
        whose = "a process" if layout.tp > 1 else profile.name
        other = _divisors("cp", heads) if profile.has_windows else "layout.context=ring takes any number"
        return Refusal("context", name, f"cp={cp} does not divide the {heads} heads of {whose}; {other}")
    return None


def expert(profile: ModelProfile, cluster: Cluster, choice: Choice) -> Refusal | None:
    """ep divides the experts and the data-parallel ranks."""
    layout, ep = choice.layout, choice.layout.ep
    if ep == 1:
        return None
    if not profile.experts:
        return Refusal("expert", f"ep={ep}", f"{profile.name} has no experts")
    if profile.experts % ep:
        because = f"ep={ep} does not divide {profile.experts} experts; {_divisors('ep', profile.experts)}"
        return Refusal("expert", f"ep={ep}", because)
    if layout.dp % ep:
        return Refusal("expert", f"ep={ep}", f"ep={ep} does not divide dp_replicate * dp_shard = {layout.dp}")
    return None


def pipeline_blocks(profile: ModelProfile, cluster: Cluster, choice: Choice) -> Refusal | None:
    """A stage begins at a block: there are as many blocks as stages at least."""
    layout = choice.layout
    if layout.pp == 1:
        return None
    blocks = profile.num_repeated or sum(block.count for block in profile.blocks if block.parameters)
    if blocks >= layout.num_stages:
        return None
    because = f"{layout.num_stages} stages need as many blocks, and there are {blocks}"
    return Refusal("pipeline_blocks", name_stages(layout), because)


def chunks(profile: ModelProfile, cluster: Cluster, choice: Choice) -> Refusal | None:
    """A rank of a pipeline has as many stages as its schedule gives it."""
    given = choice.layout.num_stages // choice.layout.pp
    if choice.chunks == given:
        return None
    because = f"schedule={choice.layout.schedule} gives a process {given} of the stages, not {choice.chunks}"
    return Refusal("chunks", f"chunks={choice.chunks}", because)


def sharding(profile: ModelProfile, cluster: Cluster, choice: Choice) -> Refusal | None:
    """A sharding that shares needs ranks that share."""
    layout = choice.layout
    if layout.dp_shard > 1 or layout.sharding in ("full", "none") or layout.world_size == 1:
        return None
    return Refusal("sharding", f"sharding={layout.sharding}", "dp_shard=1: there is nobody to share with")


def blocks(profile: ModelProfile, cluster: Cluster, choice: Choice) -> Refusal | None:
    """What changes a model block by block needs blocks; what moves to the host needs a device that is not its CPU."""
    layout = choice.layout
    if layout.offload != "none" and cluster.device.kind == "cpu":
        return Refusal(
            "blocks", f"offload={layout.offload}", "the device is the host's own CPU: there is nowhere to move to"
        )
    unknown = {"host_memory_gb": cluster.memory_of_host, "host_bandwidth_gb_per_s": cluster.host_bandwidth}
    if layout.offload == "parameters":  # a search takes it where somebody asks for it: the answer says what it fills
        unknown.pop("host_memory_gb")
    missing = " and ".join(key for key, known in unknown.items() if not known)
    if layout.offload != "none" and missing:
        because = f"nobody says what the hosts of {cluster.name} have room for: give {missing} in a cluster file"
        return Refusal("blocks", f"offload={layout.offload}", because)
    by_block = layout.offload if layout.offloads_activations else "none"
    modes = {"recompute": layout.recompute, "offload": by_block, "compile": layout.compile}
    written = next((f"{name}={value}" for name, value in modes.items() if value != "none"), "")
    if written and not profile.num_repeated:
        return Refusal("blocks", written, f"no part of {profile.name} repeats: name its parts in hints().blocks")
    return None


def modes(profile: ModelProfile, cluster: Cluster, choice: Choice) -> Refusal | None:
    """What the engine does not make yet, in its own words."""
    layout = choice.layout
    because = _unsupported(
        *(min(degree, 2) for degree in (layout.tp, layout.cp, layout.pp, layout.ep, layout.dp_shard)),
        *(layout.sharding, layout.schedule, layout.recompute, layout.offload, layout.compile),
    )
    if because is None:
        return None
    # Again, because the cached answer has other degrees in it.
    try:
        refuse_unsupported(layout)
    except LayoutError as error:
        because = str(error)
    return Refusal("modes", _modes(layout), because)


RULES: tuple[Rule, ...] = (
    *(world, batch, precision, tensor, context, expert, pipeline_blocks, chunks, pipeline_batch, micro_steps),
    *(sharding, blocks, modes, slow_links),
)
MODE_RULES: tuple[Rule, ...] = (precision, sharding, blocks, modes, slow_links)
"""Those of them that ask how a copy is shared, what is recomputed and what is moved to the host."""


@lru_cache(maxsize=4096)
def _unsupported(
    tp: int,
    cp: int,
    pp: int,
    ep: int,
    dp_shard: int,
    sharding: str,
    schedule: str,
    recompute: str,
    offload: str,
    compile: str,
) -> str | None:
    """What `refuse_unsupported` raises for a layout of these modes; degrees count as 1 or above."""
    degrees = {"tp": tp, "cp": cp, "pp": pp, "ep": ep, "dp_shard": dp_shard}
    words = {"schedule": schedule, "recompute": recompute, "offload": offload, "compile": compile}
    try:
        refuse_unsupported(Layout(**degrees, sharding=sharding, **words))  # type: ignore[arg-type]
    except LayoutError as error:
        return str(error)
    return None


def _uncut_size(operation: Operation, tp: int) -> int:
    """The size of a matrix that tp would have to divide and does not; 0 where it does."""
    size = _cut_size(operation)
    return size if size % tp else 0


def _cut_size(operation: Operation) -> int:
    """The size of a matrix that tp cuts; 0 where it cuts none."""
    if operation.kind != "matmul" or operation.cut not in ("column", "row") or len(operation.shape) < 3:
        return 0
    return operation.shape[1 if operation.cut == "column" else 2]


def _tensor_degrees(profile: ModelProfile) -> str:
    """The degrees that divide all that tp has to: one that divides heads alone would be refused for the next reason."""
    sizes = [_cut_size(operation) for block in profile.blocks for operation in block.operations]
    return _divisors("tp", math.gcd(profile.heads, profile.kv_heads, *sizes))


def _divisors(axis: str, number: int) -> str:
    """`tp can be 1, 2, 4`: at most the eight largest below 1000."""
    found = [n for n in range(1, min(number, 1000) + 1) if number % n == 0]
    return f"{axis} can be {', '.join(map(str, found[-8:]))}"


def _modes(layout: Layout) -> str:
    """The modes of a layout string, without its degrees."""
    parts = [part for part in str(layout).split(",") if part.partition("=")[0] not in (*PROCESS_AXES, "single")]
    return ",".join(parts)
