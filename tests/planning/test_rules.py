"""Every rule refuses what it is for, with its numbers, and agrees with the engine that would run it."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from allranks.errors import LayoutError
from allranks.layout import Layout
from allranks.layout_refusals import refuse_unsupported
from allranks.model_profile import ModelProfile
from allranks.model_shape import ModelShape
from allranks.models.transformer import Transformer
from allranks.parallel.context_ops import check_heads
from allranks.parallel.sequences import Share
from allranks.parallel.stage_plan import plan_stages
from allranks.parallel.tensor_plan import plan_tensor
from allranks.plan import Choice
from allranks.planning import rules
from allranks.planning.choices import Space, groups, kept_modes, layouts, splits
from tests.planning.profiles import choose, cluster, decoder

SCHEDULES = ("1f1b", "gpipe", "interleaved", "looped_bfs", "interleaved_zb", "zbv", "dualpipev")

REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str, str]] = [
    ("world", {}, {"tp": 4, "dp_replicate": 4}, "dp_replicate=4,tp=4", "dp_replicate(4) * tp(4) = 16, but 1x8:toy has"),
    ("world", {}, {"kind": "data_parallel"}, "data_parallel", "one process on several devices"),
    ("batch", {}, {"dp_shard": 8, "global_batch": 6}, "dp_shard=8", "a global batch of 6 leaves 2 of "),
    ("tensor", {"heads": 12, "hidden": 96, "kv_heads": 12}, {"tp": 8}, "tp=8", "tp=8 does not divide 12 heads; tp can"),
    ("tensor", {"kv_heads": 4}, {"tp": 8}, "tp=8", "tp=8 does not divide 4 key-value heads; tp can be 1, 2, 4"),
    ("tensor", {"ffn": 132, "kv_heads": 8}, {"tp": 8}, "tp=8", "the 132 outputs of layers.*.feed_forward.gate"),
    ("tensor", {"tensor_parallel": False}, {"tp": 8}, "tp=8", "tp finds no layer of decoder to cut"),
    ("context", {"seq": 36}, {"cp": 8}, "cp=8", "cp=8 does not divide 36 positions; 32 or 40 can be"),
    ("context", {"seq": 40}, {"cp": 8, "context": "ring"}, "cp=8,context=ring", "2 * cp(8) = 16 does not divide 40"),
    (
        *("context", {"heads": 4, "kv_heads": 2}, {"cp": 8}, "cp=8"),
        "cp=8 does not divide the 4 heads of decoder; layout.context=ring takes any number",
    ),
    ("context", {"heads": 4}, {"tp": 2, "cp": 4}, "cp=4", "cp=4 does not divide the 2 heads of a process"),
    ("context", {"context_parallel": False}, {"cp": 8}, "cp", "decoder has no sequences that cp can cut"),
    ("context", {"stateful": ("norm",)}, {"cp": 8, "batchnorm": "local"}, "batchnorm=local", "norm takes statistics"),
    ("context", {"coupled": True}, {"cp": 8}, "cp", "the loss couples samples"),
    ("expert", {}, {"dp_shard": 8, "ep": 2}, "ep=2", "decoder has no experts"),
    ("expert", {"experts": 6}, {"dp_shard": 8, "ep": 4}, "ep=4", "ep=4 does not divide 6 experts"),
    ("expert", {"experts": 6}, {"dp_shard": 8, "ep": 3}, "ep=3", "does not divide dp_replicate * dp_shard = 8"),
    ("pipeline_blocks", {"layers": 7}, {"pp": 8}, "pp=8", "8 stages need as many blocks, and there are 7"),
    ("pipeline_blocks", {}, {"pp": 8, "schedule": "interleaved"}, "pp=8,schedule=interleaved", "16 stages need"),
    (
        "pipeline_batch",
        {},
        {"pp": 4, "dp_replicate": 2, "global_batch": 65},
        "dp_replicate=2,pp=4",
        "over dp=2 leaves 1",
    ),
    ("pipeline_batch", {}, {"pp": 8, "micro_batch": 5}, "pp=8,micro_batch=5", "does not divide the 64 samples"),
    ("pipeline_batch", {}, {"pp": 8, "micro_batch": 16}, "pp=8", "over 8 stages takes as many micro-steps at least; a"),
    (
        "micro_steps",
        {},
        {"dp_replicate": 8, "global_batch": 900_000},
        "dp_replicate=8,micro_batch=1",
        "a step of 900000 samples has 112,500 micro-steps, and can have 100,000",
    ),
    ("sharding", {}, {"dp_replicate": 8, "sharding": "grad_op"}, "sharding=grad_op", "nobody to share with"),
    ("blocks", {"layers": 0}, {"dp_replicate": 8, "recompute": "full"}, "recompute=full", "no part of decoder repeats"),
    ("modes", {}, {"dp_replicate": 8, "offload": "all"}, "offload=all", "this layout shards none"),
    ("modes", {}, {"pp": 4, "dp_shard": 2, "schedule": "zbv"}, "schedule=zbv", "dp_shard=2 cannot follow"),
    ("modes", {}, {"dp_replicate": 8, "recompute": "budget"}, "recompute=budget", "add compile=block"),
    ("slow_links", {}, {"dp_shard": 8, "ddp_hook": "bfloat16"}, "ddp_hook=bfloat16", "has no DDP: leave it out"),
    ("slow_links", {}, {"dp_shard": 8, "local_sgd": 100}, "local_sgd=100", "puts the copies of dp_replicate together"),
]


@pytest.mark.parametrize(("rule", "model", "layout", "refused", "because"), REFUSED)
def test_a_rule_refuses_with_its_numbers(
    rule: str, model: dict[str, Any], layout: dict[str, Any], refused: str, because: str
) -> None:
    profile = decoder(**model)
    found = rules.check(profile, cluster(), choose(**layout))
    assert found is not None
    assert (found.rule, found.layout) == (rule, refused)
    assert because in found.because


@pytest.mark.parametrize(
    ("hosts", "missing"),
    [
        ({"host_memory_bytes": None}, "give host_memory_gb in"),
        ({"host_bandwidth": None}, "give host_bandwidth_gb_per_s in"),
        ({"host_memory_bytes": None, "host_bandwidth": None}, "give host_memory_gb and host_bandwidth_gb_per_s in"),
    ],
)
def test_offload_wants_to_know_the_hosts(hosts: dict[str, Any], missing: str) -> None:
    found = rules.check(decoder(), cluster(**hosts), choose(dp_replicate=8, offload="activations"))
    assert found is not None and found.rule == "blocks" and missing in found.because


def test_offload_takes_the_host_of_the_vendor() -> None:
    there = cluster(host_memory_bytes=None)
    there = dataclasses.replace(there, device=dataclasses.replace(there.device, host_memory_bytes=250e9))
    for mode in ("activations", "all"):
        assert rules.check(decoder(), there, choose(dp_shard=8, offload=mode)) is None


@pytest.mark.parametrize(
    "layout",
    [
        {"dp_replicate": 8},
        {"dp_shard": 8, "sharding": "grad_op", "recompute": "selective"},
        {"dp_replicate": 2, "tp": 4, "offload": "activations"},
        {"tp": 2, "cp": 4, "recompute": "full"},
        {"cp": 8, "context": "ring"},
        {"pp": 4, "schedule": "interleaved", "dp_shard": 2},
        {"pp": 4, "schedule": "zbv", "dp_replicate": 2},
    ],
)
def test_what_the_engine_runs_is_let_in(layout: dict[str, Any]) -> None:
    assert rules.check(decoder(), cluster(), choose(**layout)) is None


def test_a_ring_has_no_windows() -> None:
    """Which the engine refuses as the mask that they are (tests/parallel/test_ring.py)."""
    shape = ModelShape("mist", 8, 64, 4, 128, 512, seq=64, windows=(16, 0))
    profile, toy = shape.profile(), cluster()
    refused = rules.context(profile, toy, choose(cp=4, dp_shard=2, context="ring"))
    assert refused is not None and refused.because.startswith("layers of mist attend to windows, a mask that ring ")
    assert rules.context(shape.profile(16), toy, choose(cp=4, dp_shard=2, context="ring")) is None
    assert rules.context(profile, toy, choose(cp=4, dp_shard=2)) is None
    refused = rules.context(profile, toy, choose(cp=8))
    assert refused is not None and refused.because.endswith("the 4 heads of mist; cp can be 1, 2, 4")


def test_a_precision_is_one_of_the_engines_and_of_the_devices() -> None:
    def refused(precision: str) -> str:
        found = rules.check(decoder(), cluster(), Choice(Layout(dp_replicate=8), 64, 1, precision))
        return "" if found is None else found.because

    assert refused("bfloat16") == ""
    assert refused("float4") == "train.precision is one of float32, bfloat16, float16, float8, float64"
    assert refused("float64") == "toy has no rate for it: it has bfloat16, float16, float32"


@pytest.mark.parametrize(
    ("degrees", "beside"), [({"dp_shard": 8}, ""), ({"tp": 8}, "train.precision=float8 with tp=8")]
)
def test_float8_goes_with_data_parallel_layouts(degrees: dict[str, Any], beside: str) -> None:
    made = cluster()
    device = dataclasses.replace(made.device, peak_flops={**made.device.peak_flops, "float8": 200e12})
    made = dataclasses.replace(made, device=device)
    found = rules.check(decoder(), made, Choice(Layout(**degrees), 64, 1, "float8"))
    assert found is None if not beside else found is not None and found.because.startswith(beside)


def test_chunks_are_those_of_the_schedule() -> None:
    found = rules.check(decoder(), cluster(), Choice(Layout(pp=8), 64, 1, chunks=2))
    assert found is not None and found.because == "schedule=1f1b gives a process 1 of the stages, not 2"


def test_a_cpu_has_nowhere_to_move_activations_to() -> None:
    device = cluster().device
    cpu = cluster(device=type(device)("cpu", "a core", 4e9, 1e10, device.peak_flops))
    found = rules.check(decoder(), cpu, choose(dp_replicate=8, offload="activations"))
    assert found is not None and found.rule == "blocks"


def refuses(rule: rules.Rule, profile: ModelProfile, choice: Choice) -> bool:
    return rule(profile, cluster(), choice) is not None


@pytest.mark.parametrize("tp", range(2, 10))
@pytest.mark.parametrize(("heads", "kv_heads", "hidden", "ffn"), [(8, 8, 64, 128), (8, 4, 64, 120), (6, 3, 96, 60)])
def test_tp_is_refused_where_the_engine_refuses_it(tp: int, heads: int, kv_heads: int, hidden: int, ffn: int) -> None:
    model = Transformer(64, num_layers=1, hidden=hidden, num_heads=heads, num_kv_heads=kv_heads, ffn=ffn, max_seq=32)
    profile = decoder(layers=1, hidden=hidden, heads=heads, kv_heads=kv_heads, ffn=ffn, vocab=64)
    try:
        plan_tensor({"": model}, {}, tp)
    except LayoutError:
        assert refuses(rules.tensor, profile, choose(tp=tp))
    else:
        assert not refuses(rules.tensor, profile, choose(tp=tp))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("layers", [3, 4, 5, 8])
def test_stages_are_refused_where_the_engine_refuses_them(layers: int, schedule: str) -> None:
    model = Transformer(64, num_layers=layers, hidden=16, num_heads=2, max_seq=32)
    layout = Layout(pp=4, schedule=schedule)
    try:
        plan_stages(model, layout.stage_ranks)
    except LayoutError:
        assert refuses(rules.pipeline_blocks, decoder(layers=layers), choose(pp=4, schedule=schedule))
    else:
        assert not refuses(rules.pipeline_blocks, decoder(layers=layers), choose(pp=4, schedule=schedule))


@pytest.mark.parametrize("cp", range(2, 9))
@pytest.mark.parametrize("kind", ["ulysses", "ring"])
@pytest.mark.parametrize("seq", [24, 32, 36])
def test_cp_is_refused_where_the_engine_refuses_it(cp: int, kind: Any, seq: int) -> None:
    try:
        Share(0, cp, balanced=kind == "ring").check("tokens", seq)
        if kind == "ulysses":
            check_heads(torch.empty(1, 8, seq, 4), cp)
    except LayoutError:
        assert refuses(rules.context, decoder(seq=seq), choose(cp=cp, context=kind))
    else:
        assert not refuses(rules.context, decoder(seq=seq), choose(cp=cp, context=kind))


DEGREES = st.sampled_from([1, 2, 4])


@settings(max_examples=400, deadline=None)
@given(
    *(DEGREES, DEGREES, DEGREES, DEGREES, DEGREES),
    st.sampled_from(["full", "grad_op", "none", "optimizer"]),
    st.sampled_from(SCHEDULES),
    st.sampled_from(["none", "selective", "full", "budget"]),
    st.sampled_from(["none", "parameters", "activations", "all"]),
    st.sampled_from(["none", "block"]),
)
def test_modes_are_refused_where_the_engine_refuses_them(
    tp: int,
    cp: int,
    pp: int,
    dp_shard: int,
    ep: int,
    sharding: Any,
    schedule: str,
    recompute: str,
    offload: str,
    compile: str,
) -> None:
    degrees = {"tp": tp, "cp": cp, "pp": pp, "dp_shard": dp_shard, "ep": ep}
    words = {"schedule": schedule, "recompute": recompute, "offload": offload, "compile": compile}
    layout = Layout(**degrees, sharding=sharding, **words)  # type: ignore[arg-type]
    found = rules.modes(decoder(), cluster(), Choice(layout, 64, 1))
    try:
        refuse_unsupported(layout)
    except LayoutError as error:
        assert found is not None and found.because == str(error)
    else:
        assert found is None


def test_of_other_modes_the_rules_of_modes_say_the_same_as_all() -> None:
    """A search asks them alone of the members of a group."""
    there, refused = cluster(1, 8, host_memory_bytes=None), 0
    for precision in ("bfloat16", "float8"):
        space = Space({precision: decoder()}, there, 16)
        for layout in layouts(there, decoder()):
            for group in groups(space, precision, layout, SCHEDULES, {}):
                for split in splits(space, layout):
                    for recompute, offload in kept_modes(space):
                        modes: dict[str, Any] = {"recompute": recompute, "offload": offload}
                        made = dataclasses.replace(split, schedule=group.plain.layout.schedule, **modes)
                        choice = dataclasses.replace(group.plain, layout=made)
                        every = rules.check(decoder(), there, choice)
                        assert (rules.check_modes(decoder(), there, choice) is None) == (every is None), every
                        refused += every is not None
    assert refused > 100


@pytest.mark.parametrize("sizes", [{"heads": 80, "kv_heads": 8, "hidden": 640}, {"ffn": 132}, {"kv_heads": 0}])
def test_the_degrees_that_a_refusal_of_tp_advises_are_let_in(sizes: dict[str, int]) -> None:
    profile = decoder(**sizes)
    refusal = rules.tensor(profile, cluster(8, 8), choose(tp=64))
    assert refusal is not None
    degrees = [int(word) for word in refusal.because.partition("tp can be ")[2].split(", ")]
    assert 1 in degrees and max(degrees) > 1
    for degree in degrees:
        assert rules.tensor(profile, cluster(8, 8), choose(tp=degree)) is None, degree
