"""Plans as a search makes them, written by hand: what the tests of the page show, and what one looks at."""

from dataclasses import replace

from allranks.layout import Layout
from allranks.plan import (
    Bill,
    Choice,
    Estimate,
    MemoryUse,
    Plan,
    Ranked,
    Refusal,
    Span,
    StepTime,
    Traffic,
    WhatIf,
)

PIPELINE = Layout(pp=4, dp_shard=2, tp=8, schedule="interleaved", recompute="selective")
MEMORY = MemoryUse(
    weights=8.8e9, gradients=8.8e9, optimizer=17.6e9, activations=21e9, logits=2.1e9, gathered=1.4e9, framework=1.1e9
)
TIME = StepTime(
    compute=19.5, recompute=1.7, tensor=4.1, data=0.42, pipeline=0.35, bubble=1.6, optimizer=0.11, input=0.02
)
COST = Span(342_100.0, 404_250.0, 466_400.0)
TRAFFIC = (
    Traffic("pp", "hdr200", 1.7e10, 512, 0.9, 0.55),
    Traffic("dp", "hdr200", 3.5e10, 96, 1.6, 1.2),
    Traffic("tp", "nvlink3", 1.1e12, 20480, 5.2, 1.1),
)


def make_estimate(
    layout: Layout = PIPELINE,
    memory: MemoryUse = MEMORY,
    time: StepTime = TIME,
    *,
    global_batch: int = 256,
    micro_batch: int = 1,
    capacity: float = 79e9,
    traffic: tuple[Traffic, ...] = TRAFFIC,
    seq: int = 8192,
) -> Estimate:
    """An Estimate whose sums agree with its parts."""
    stages = {0: memory}
    if layout.pp > 1:
        stages[layout.pp // 2] = replace(memory, activations=0.6 * memory.activations)
    total, seconds = memory.total, time.total
    rate = global_batch / seconds
    return Estimate(
        choice=Choice(layout, global_batch, micro_batch, chunks=layout.num_stages // layout.pp),
        memory=memory,
        stages=stages,
        peak_bytes=Span(0.95 * total, total, 1.06 * total),
        capacity_bytes=capacity,
        time=time,
        step_seconds=Span(0.9 * seconds, seconds, 1.15 * seconds),
        traffic=traffic,
        mfu=0.412,
        samples_per_second=rate,
        tokens_per_second=rate * seq,
    )


def pipelined() -> Plan:
    """70 billion parameters on 8 nodes of 8, with everything that a plan can hold."""
    slower = replace(TIME, bubble=0.0, data=6.4, tensor=5.0)
    fsdp = make_estimate(Layout(dp_shard=64, recompute="full"), replace(MEMORY, activations=9e9), slower, micro_batch=4)
    large = make_estimate(Layout(dp_replicate=64), replace(MEMORY, weights=141e9, optimizer=565e9, gradients=141e9))
    others = (Ranked(fsdp, "14% slower: gradients and gathered parameters 6.4 s; 12.0 GB less memory"),)
    refusals = tuple(
        Refusal("heads", f"tp={size},dp_shard=*", f"tp({size}) does not divide 8 kv heads") for size in range(9, 20)
    )
    return Plan(
        model="llama3-70b",
        cluster="8x8:a100-80g@hdr200",
        searched=1834,
        best=Ranked(make_estimate(), "the fastest of 212 that fit: computation 70% of the step; 18.1 GB to spare"),
        others=(*others, Ranked(large, "does not fit: 871.1 GB of 79.0 GB (11.0 times)", family="ddp")),
        refusals=(*refusals, Refusal("one node", "tp=16,dp_shard=4", "tp(16) is more than the 8 devices of a node")),
        notes=("precision bfloat16, because a100-80g multiplies it 16 times as fast as float32",),
        num_devices=64,
        nodes=8,
        parameters=70_553_706_496,
        seq=8192,
        what_ifs=(
            WhatIf("recompute=full", make_estimate(memory=replace(MEMORY, activations=4e9)), "-17.0 GB, -11% speed"),
            WhatIf("offload=all", None, "refused: offload=all comes with a later version"),
        ),
        bill=Bill(1e12, 476_838, Span(1.1e7, 1.3e7, 1.5e7), 231_000.0, COST, "USD", None, "1.75 USD an hour"),
    )


def single() -> Plan:
    """A small model on one device, without positions."""
    memory = MemoryUse(weights=4e5, gradients=4e5, optimizer=8e5, activations=3e5, framework=4e8)
    best = make_estimate(
        Layout(kind="single"),
        memory,
        StepTime(compute=0.0021, optimizer=0.0004, input=0.0002),
        global_batch=64,
        micro_batch=32,
        capacity=24e9,
        traffic=(),
        seq=0,
    )
    return Plan("mlp.py:Mlp", "1:cpu", 6, Ranked(best, "the only one that fits"), (), (), parameters=101_770)


def nothing_fits() -> Plan:
    """405 billion parameters on one node: what came nearest."""
    memory = replace(MEMORY, weights=101e9, gradients=101e9, optimizer=203e9)
    near = make_estimate(Layout(dp_shard=8, recompute="full"), memory, micro_batch=1)
    refusals = (Refusal("heads", "tp=3", "tp(3) does not divide 128 heads"),)
    because = "does not fit: 431.6 GB of 79.0 GB (5.5 times); the optimizer's state 203.0 GB"
    return Plan(
        "llama3-405b",
        "8:a100-80g",
        91,
        None,
        (),
        refusals,
        Ranked(near, because),
        num_devices=8,
        parameters=405_000_000_000,
        seq=8192,
    )


def refused() -> Plan:
    """Not even an estimate: every layout is refused."""
    return Plan("odd", "3:h100", 0, None, (), (Refusal("batch", "dp_replicate=3", "3 ranks do not share 2 samples"),))


def huge() -> Plan:
    """16,384 devices."""
    layout = Layout(pp=16, dp_replicate=8, dp_shard=16, tp=8)
    best = make_estimate(layout, global_batch=2048)
    refusals = tuple(Refusal("memory", f"tp={n}", "too large for a device " * 3) for n in range(1500))
    return Plan(
        "llama3-405b", "2048x8:h100", 20_411, Ranked(best, "the fastest of 8,120 that fit"),
        tuple(Ranked(make_estimate(layout, global_batch=2048, micro_batch=2), "as fast within 1%") for _ in range(14)),
        refusals, num_devices=16_384, nodes=2048, parameters=405_853_388_800, seq=8192,
    )  # fmt: skip
