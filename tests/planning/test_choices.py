"""What there is to choose from: every layout once, every micro-batch that the engine takes."""

from dataclasses import replace
from math import prod

import pytest

from allranks.layout import Layout
from allranks.plan import Refusal
from allranks.planning.choices import Space, every_choice, groups, kept_modes, layouts, of_layout, splits
from allranks.planning.rules import check
from tests.planning.profiles import cluster, decoder


@pytest.mark.parametrize(("nodes", "devices", "experts"), [(1, 1, 0), (1, 6, 0), (2, 4, 4)])
def test_every_factorisation_once(nodes: int, devices: int, experts: int) -> None:
    found = list(layouts(cluster(nodes, devices), decoder(experts=experts)))
    degrees = [(one.dp_replicate, one.tp, one.cp, one.pp, one.ep, one.context) for one in found]
    assert len(set(degrees)) == len(degrees)
    assert all(prod(one[:4]) == nodes * devices for one in degrees)
    assert {one[1] for one in degrees} == {n for n in range(1, nodes * devices + 1) if nodes * devices % n == 0}
    assert {one.ep for one in found} == ({1, 2, 4, 8} if experts else {1})
    assert {one.context for one in found if one.cp > 1} <= {"ulysses", "ring"}


def test_every_choice_is_one_that_the_engine_runs_and_none_twice() -> None:
    space = Space({"bfloat16": decoder()}, cluster(1, 4), 12)
    found = list(every_choice(space))
    assert len(set(found)) == len(found) > 100
    assert all(check(space.profiles["bfloat16"], space.cluster, choice) is None for choice in found)
    assert {choice.layout.recompute for choice in found} == {"none", "selective", "full"}
    assert {choice.layout.sharding for choice in found} == {"full", "grad_op", "optimizer"}
    assert {choice.layout.offload for choice in found} == {"none", "activations"}
    assert len({choice.layout.schedule for choice in found}) == 7


def test_micro_batches_divide_a_pipelines_share() -> None:
    space = Space({"bfloat16": decoder()}, cluster(1, 4), 24)
    assert space.micro_batches(Layout(dp_replicate=2, pp=2)) == [1, 2, 3, 4, 6, 12]
    assert space.micro_batches(Layout(dp_replicate=4)) == [1, 2, 3, 4, 6]
    assert space.micro_batches(Layout(dp_replicate=5)) == [1, 2, 4, 5]
    assert Space({}, cluster(), 24, micro_batch=3).micro_batches(Layout()) == [3]
    assert Space({}, cluster(), 24, micro_steps=5).micro_batches(Layout(dp_replicate=4)) == [2]


def test_splits_share_among_some_or_all_of_the_ranks() -> None:
    space = Space({"bfloat16": decoder()}, cluster(1, 4), 24)
    found = {(one.dp_replicate, one.dp_shard, one.sharding) for one in splits(space, Layout(dp_replicate=4))}
    shared = {(4 // n, n, mode) for n in (2, 4) for mode in ("full", "grad_op", "optimizer")}
    assert found == shared | {(4, 1, "full")}


def test_a_written_layout_notes_who_is_refused() -> None:
    space = Space({"bfloat16": decoder()}, cluster(1, 8), 16)
    refusals: dict[tuple[str, str], object] = {}
    assert list(of_layout(space, Layout(tp=8), refusals)) == []  # type: ignore[arg-type]
    assert [rule for rule, _ in refusals] == ["tensor"]


def test_too_few_micro_steps_are_noted_where_no_micro_batch_has_enough() -> None:
    space = Space({"bfloat16": decoder()}, cluster(1, 8), 8)
    for layout in (Layout(dp_replicate=2, tp=2, pp=2), Layout(dp_replicate=2, pp=4)):
        refusals: dict[tuple[str, str], Refusal] = {}
        found = list(groups(space, "bfloat16", layout, ("1f1b",), refusals))
        assert len(found) < len(space.micro_batches(layout)) and found and not refusals
        assert list(of_layout(space, layout, refusals)) and not refusals
    refusals = {}
    two = list(groups(space, "bfloat16", Layout(dp_replicate=4, pp=2), ("1f1b", "interleaved"), refusals))
    assert [one.plain.layout.schedule for one in two] == ["1f1b"] and not refusals
    few = replace(space, global_batch=4)
    assert not list(groups(few, "bfloat16", Layout(dp_replicate=4, pp=2), ("1f1b", "interleaved"), refusals))
    ((rule, name),) = refusals
    assert (rule, name) == ("pipeline_batch", "dp_replicate=4,pp=2"), "pp=2 alone, with fewer copies, is let in"
    assert refusals[rule, name].because.endswith("a rank has 1: global_batch can be 8")
    written: dict[tuple[str, str], Refusal] = {}
    assert not list(of_layout(few, Layout(dp_replicate=4, pp=2), written)) and written == refusals


def test_too_many_micro_steps_are_noted_where_no_micro_batch_has_fewer() -> None:
    space = Space({"bfloat16": decoder()}, cluster(1, 8), 900_000)
    refusals: dict[tuple[str, str], Refusal] = {}
    found = list(groups(space, "bfloat16", Layout(dp_replicate=8), ("1f1b",), refusals))
    assert found and min(one.plain.micro_batch for one in found) == 2 and not refusals
    assert not list(groups(replace(space, micro_batch=1), "bfloat16", Layout(dp_replicate=8), ("1f1b",), refusals))
    assert list(refusals) == [("micro_steps", "dp_replicate=8,micro_batch=1")]


def test_the_vendors_host_is_filled_only_where_somebody_asks() -> None:
    there = cluster(1, 4, host_memory_bytes=None)
    there = replace(there, device=replace(there.device, host_memory_bytes=250e9))
    space = Space({"bfloat16": decoder()}, there, 16)
    assert {offload for _, offload in kept_modes(space)} == {"none"}
    assert {offload for _, offload in kept_modes(replace(space, modes={"offload": "activations"}))} == {"activations"}
    own = replace(space, cluster=replace(there, host_memory_bytes=1e12))
    assert {offload for _, offload in kept_modes(own)} == {"none", "activations"}
