"""Causes of wrong gradients: weights of the ranks' batches, axes, grids, missing tensors."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch

from allranks.parameter_map import Box
from allranks.verifying.findings import OTHER
from allranks.verifying.gradient_causes import DIVIDED
from allranks.verifying.judge import judge
from allranks.verifying.recording import Draw, Part, RunRecord
from allranks.verifying.world_view import WorldView
from tests.verifying.records import VALUES, evidence, scale

FIRST = {name: torch.sin(value * 3) for name, value in VALUES.items()}
SECOND = {name: torch.cos(value * 5) for name, value in VALUES.items()}
TENSOR_WORLD = WorldView((0, 0), {"tp": 2})


def mixed(one: float, two: float, noise: float = 0.0) -> dict[str, Part]:
    return {n: Part(None, one * FIRST[n] + two * SECOND[n] + noise * FIRST[n] ** 2) for n in VALUES}


def judged(found: dict[str, Part], expected: dict[str, Part], shares: Any) -> Any:
    def change(ranks: list[RunRecord]) -> None:
        for run in ranks:
            run.steps[0].raw = dict(found)

    def alone(run: RunRecord) -> None:
        run.steps[0].raw = dict(expected)

    (finding,) = judge(evidence(change, alone, shares=lambda step: shares))
    return finding


def test_a_mean_of_means_over_ranks() -> None:
    finding = judged(mixed(0.5, 0.5), mixed(0.2, 0.8), [[FIRST], [SECOND]])
    assert (finding.verdict.kind, finding.axis) == ("S9", "dp")
    assert finding.verdict.evidence[0] == "weights of the ranks' batches [0.5, 0.5], on one device [0.2, 0.8]"


def test_a_mean_of_means_over_micro_batches() -> None:
    half = {name: value * 0.5 + 1 for name, value in FIRST.items()}
    third = {name: value**2 for name, value in SECOND.items()}

    def of(*weights: float) -> dict[str, Part]:
        some = (FIRST, half, SECOND, third)
        return {
            n: Part(None, sum((w * t[n] for w, t in zip(weights, some, strict=True)), start=torch.zeros(())))
            for n in VALUES
        }

    finding = judged(of(0.25, 0.25, 0.25, 0.25), of(0.1, 0.4, 0.1, 0.4), [[FIRST, half], [SECOND, third]])
    assert finding.verdict.kind == "S8"


def test_a_loss_that_couples_samples() -> None:
    assert judged(mixed(0.5, 0.5), mixed(0.5, 0.5, 0.3), [[FIRST], [SECOND]]).verdict.kind == "S29"


@pytest.mark.parametrize(("dtype", "kind"), [(torch.bfloat16, "S37"), (torch.float32, "S37")])
def test_gradients_on_the_grid_of_a_lower_precision(dtype: torch.dtype, kind: str) -> None:
    rounded = {n: Part(None, p.value.to(dtype).double()) for n, p in mixed(0.5, 0.5).items()}
    finding = judged(rounded, mixed(0.5, 0.5), [[FIRST], [SECOND]])
    assert finding.verdict.kind == kind and str(dtype).removeprefix("torch.") in finding.verdict.what


def test_what_is_off_by_more_than_a_grid_was_not_moved_by_it() -> None:
    """FSDP2's policy computes in bfloat16, and its sums in float32 were accused."""
    off = {n: Part(None, (p.value * (1 + 0.02 * FIRST[n])).float().double()) for n, p in mixed(0.5, 0.5).items()}
    assert judged(off, mixed(0.5, 0.5), [[FIRST], [SECOND]]).verdict.kind == "S27"


def test_whole_parameters_over_ranks_that_cut() -> None:
    def apart(ranks: list[RunRecord]) -> None:
        scale(ranks[1].steps[0].raw, 1.1, ["bias"])
        same_samples(ranks)

    def scaled(factor: float) -> Any:
        def change(ranks: list[RunRecord]) -> None:
            for run in ranks:
                scale(run.steps[0].raw, factor, ["bias"])
            same_samples(ranks)

        return change

    for change, kind in ((apart, "S15"), (scaled(0.5), "S15"), (scaled(2.0), "S16")):
        (finding,) = judge(evidence(change, world=TENSOR_WORLD))
        assert (finding.verdict.kind, finding.axis, finding.tensor) == (kind, "tp", "bias")


def same_samples(ranks: list[RunRecord]) -> None:
    for run in ranks:
        for step, rows in zip(run.steps, ([0, 1, 2, 3], [4, 5, 6, 7]), strict=True):
            step.rows = list(rows)
            step.draws = [Draw(1, (4, 4), False, probability=0.5)]


def test_a_gradient_that_is_nowhere_and_one_of_zeros() -> None:
    def gone(ranks: list[RunRecord]) -> None:
        for run in ranks:
            del run.steps[0].raw["bias"]

    def zero(ranks: list[RunRecord]) -> None:
        for run in ranks:
            scale(run.steps[0].raw, 0.0, ["bias"])

    for change in (gone, zero):
        (finding,) = judge(evidence(change))
        assert (finding.verdict.kind, finding.tensor) == ("S11", "bias")


@pytest.mark.parametrize(
    ("past", "kind"), [(("g", "d"), "S10"), (("d",), "S10"), (("g",), "S11"), (("dis",), "S11"), ((), "S11")]
)
def test_of_several_modules_the_wrapper_that_was_passed_by_is_the_one_of_the_gradient(
    past: tuple[str, ...], kind: str
) -> None:
    """The discriminator's weight is apart, `d.weight`."""

    def named(run: RunRecord) -> None:
        for step in run.steps:
            step.raw["d.weight"] = step.raw.pop("weight")
            step.gradients["d.weight"] = step.gradients.pop("weight")

    def change(ranks: list[RunRecord]) -> None:
        for rank, run in enumerate(ranks):
            named(run)
            scale(run.steps[0].raw, 1.0 + rank, ["d.weight"])
            scale(run.steps[0].gradients, 1.0 + rank, ["d.weight"])
            run.steps[0].past = past

    (finding,) = judge(evidence(change, named))
    assert (finding.verdict.kind, finding.tensor) == (kind, "d.weight")


@pytest.mark.parametrize(("weight", "bias", "kind"), [(3, 1, "S36"), (3, 2, "S36"), (4, 1, "S16"), (3, 3, "S16")])
def test_experts_are_stacked_matrices_among_what_has_fewer_dims(weight: int, bias: int, kind: str) -> None:
    """And a convolution's weight, of four dims, is none."""

    def shaped(run: RunRecord) -> None:
        for name, dims in (("weight", weight), ("bias", bias)):
            value = VALUES[name]
            run.start.parameters[name] = Part(None, value.reshape(*value.shape, *[1] * (dims - value.dim())))

    def change(ranks: list[RunRecord]) -> None:
        for run in ranks:
            shaped(run)
            scale(run.steps[0].raw, 0.5, ["weight"])

    (finding,) = judge(evidence(change, shaped))
    assert (finding.verdict.kind, finding.tensor) == (kind, "weight")


def test_tied_tensors_and_recomputation() -> None:
    def tie(run: RunRecord) -> None:
        run.start.tied = [("bias", "other")]

    def half(ranks: list[RunRecord]) -> None:
        for run in ranks:
            scale(run.steps[0].raw, 0.5, ["bias"])

    (finding,) = judge(evidence(half, tie))
    assert finding.verdict.kind == "S14"

    def other(ranks: list[RunRecord]) -> None:
        for run in ranks:
            run.steps[0].raw["bias"] = Part(None, VALUES["bias"] ** 2 + 0.1)
        ranks[0].steps[0].draws.append(Draw(5, (2, 4), True))

    assert {f.verdict.kind for f in judge(evidence(other))} == {"S34"}


def test_each_rank_clips_by_the_norm_of_its_own_part() -> None:
    def halves(ranks: list[RunRecord]) -> None:
        for rank, (run, factor) in enumerate(zip(ranks, (0.7, 0.9), strict=True)):
            for step in run.steps:
                for name, value in VALUES.items():
                    cut = 1 + rank
                    box = Box((0, *(0 for _ in value.shape[1:])), (1, *value.shape[1:]))
                    box = box if rank == 0 else Box((1, *box.offset[1:]), (len(value) - 1, *value.shape[1:]))
                    for what in (step.raw, step.gradients, step.parameters):
                        part = what[name].value[:1] if cut == 1 else what[name].value[1:]
                        scaled = part * factor if what is step.gradients else part
                        what[name] = Part(box, scaled)

    (finding,) = judge(evidence(halves))
    assert (finding.verdict.kind, finding.step) == ("S13", 0)


def test_a_coupled_loss_off_by_the_ranks_was_gathered_without_its_gradient() -> None:
    finding = judged(mixed(0.25, 0.25, 0.15), mixed(0.5, 0.5, 0.3), [[FIRST], [SECOND]])
    assert (finding.verdict.kind, finding.factor) == ("S29", "1/data ranks = 1/2")


@pytest.mark.parametrize(("coupled", "kind"), [(0.1, "S16"), (0.0, "S29")])
def test_a_coupled_loss_of_experts_does_not_compose(coupled: float, kind: str) -> None:
    """Unless each rank has compared its own samples only."""

    def change(ranks: list[RunRecord]) -> None:
        del ranks[1].start.parameters["bias"]
        for run in ranks:
            run.steps[0].raw = mixed(0.5, 0.4, coupled)

    def alone(run: RunRecord) -> None:
        run.steps[0].raw = mixed(0.5, 0.5, 0.3)

    (finding,) = judge(evidence(change, alone, shares=lambda step: [[FIRST], [SECOND]]))
    assert finding.verdict.kind == kind


@pytest.mark.parametrize(("what", "kind"), [("raw", OTHER), ("gradients", "S13")])
def test_a_factor_that_counts_nothing_is_one_of_the_norm_after_clipping_alone(what: str, kind: str) -> None:
    def change(ranks: list[RunRecord]) -> None:
        for run in ranks:
            scale(getattr(run.steps[0], what), 1.5)

    (finding,) = judge(evidence(change))
    assert (finding.verdict.kind, finding.factor) == (kind, 1.5)
    assert (finding.verdict.next == DIVIDED) == (kind == OTHER) and "norm" not in finding.verdict.next + (
        finding.verdict.what if kind == OTHER else ""
    )


@pytest.mark.parametrize(
    ("world", "names", "kind", "axis"),
    [
        (None, ("weight", "bias"), "S16", "dp"),
        (None, ("bias",), OTHER, "dp"),
        (WorldView((0, 1), {"dp_shard": 2}), ("weight", "bias"), "S16", "dp_shard"),
    ],
)
def test_the_only_axis_is_named_where_no_factor_fits_and_the_ranks_agree(
    world: WorldView | None, names: tuple[str, ...], kind: str, axis: str
) -> None:
    def change(ranks: list[RunRecord]) -> None:
        for run in ranks:
            run.steps[0].raw |= {name: Part(None, VALUES[name] ** 2 + 0.1) for name in names}

    (finding,) = judge(evidence(change, world=world))
    assert (finding.verdict.kind, finding.axis, finding.factor) == (kind, axis, "")
    assert f"gradients differs over {axis}: {names[0]}" in finding.verdict.what


@pytest.mark.parametrize(("size", "kind"), [(1e-7, "S27"), (1e-3, "S27"), (0.2, "S16")])
def test_what_is_as_small_as_a_rounding_is_called_one(size: float, kind: str) -> None:
    def change(ranks: list[RunRecord]) -> None:
        for run in ranks:
            for name, part in run.steps[0].raw.items():
                run.steps[0].raw[name] = Part(None, part.value * (1 + size * FIRST[name]))

    (finding,) = judge(evidence(change))
    assert finding.verdict.kind == kind


def test_experts_that_are_mixed_up_are_those_of_some_ranks() -> None:
    def change(ranks: list[RunRecord]) -> None:
        del ranks[1].start.parameters["bias"]
        ranks[0].steps[0].raw["bias"] = Part(None, VALUES["bias"].flip(0))
        del ranks[1].steps[0].raw["bias"]

    (finding,) = judge(evidence(change))
    assert (finding.verdict.kind, finding.tensor) == ("S36", "bias")


def of_four(change: Any, world: WorldView) -> Any:
    """The one finding where four ranks, two records of each data rank or one of each, have been changed."""
    good = evidence()
    data = len(set(world.data_rank))
    ranks = [deepcopy(good.ranks[rank if data == 2 else rank // 2]) for rank in world.data_rank]
    if data == 4:
        for rank, run in enumerate(ranks):
            for step in run.steps:
                step.rows = step.rows[rank % 2 :: 2]
    for rank, run in zip(world.data_rank, ranks, strict=True):
        for step in run.steps:
            step.draws = [Draw(rank, (4, 4), False, probability=0.5)]
    change(ranks)
    (finding,) = judge(replace(good, ranks=ranks, world=world))
    return finding


COPIES = WorldView((0, 1, 2, 3), {"dp_replicate": 2, "dp_shard": 2}, micro_batches=3)
CUT = WorldView((0, 0, 1, 1), {"dp_shard": 2, "tp": 2}, micro_batches=3)


@pytest.mark.parametrize(
    ("world", "off", "kind", "axis"),
    [
        (COPIES, (2, 3), "S11", "dp_replicate"),  # alike along dp_shard
        (COPIES, (1, 3), "S11", "dp_shard"),
        (COPIES, (2, 3), "S13", "dp_replicate"),
        (COPIES, (1, 2, 3), "S11", "dp_replicate*dp_shard"),
        (CUT, (1, 3), "S15", "tp"),
        (CUT, (2, 3), "S11", "dp_shard"),
    ],
)
def test_ranks_that_part_along_one_axis_of_two(world: WorldView, off: tuple[int, ...], kind: str, axis: str) -> None:
    def change(ranks: list[RunRecord]) -> None:
        for rank in off:
            for some in (ranks[rank].steps[0].raw, ranks[rank].steps[0].gradients)[: 1 if kind == "S13" else 2]:
                scale(some, 1.0 + 0.1 * (rank if len(off) > 2 else 1), ["bias"])

    finding = of_four(change, world)
    assert (finding.verdict.kind, finding.axis) == (kind, axis)


@pytest.mark.parametrize(
    ("world", "factor", "names", "kind", "axis", "said"),
    [
        (CUT, 2.0, ("bias",), "S16", "tp", "tp = 2"),
        (CUT, 0.5, ("bias",), "S15", "tp", "1/tp = 1/2"),
        (CUT, 2.0, ("weight", "bias"), "S16", "dp_shard*tp", "dp_shard or tp = 2"),
        (COPIES, 2.0, ("weight", "bias"), "S16", "dp_replicate*dp_shard", "dp_replicate or dp_shard = 2"),
        (COPIES, 0.25, ("weight", "bias"), "S9", "dp_replicate*dp_shard", "1/data ranks = 1/4"),
        (COPIES, 3.0, ("weight", "bias"), "S8", "dp_replicate*dp_shard", "micro-batches = 3"),
    ],
)
def test_a_factor_and_its_axis_say_the_same(
    world: WorldView, factor: float, names: tuple[str, ...], kind: str, axis: str, said: str
) -> None:
    def change(ranks: list[RunRecord]) -> None:
        for run in ranks:
            scale(run.steps[0].raw, factor, names)

    finding = of_four(change, world)
    assert (finding.verdict.kind, finding.axis, finding.factor) == (kind, axis, said)
    assert f"it is {said} times what one device has" in "\n".join(finding.verdict.evidence)
