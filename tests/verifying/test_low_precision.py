"""Gradients in a low precision: rounding passes, two percent do not."""

from dataclasses import replace

import pytest
import torch

from allranks.verifying.evidence import Evidence
from allranks.verifying.low_precision import (
    EQUAL,
    Factor,
    around_first,
    around_mean,
    compare_noisy,
    distance,
    judge_low_precision,
    say_errors,
    say_noisy,
)
from allranks.verifying.recording import OneDevice, Part, Parts, RunRecord
from tests.verifying.records import VALUES, evidence, one_device, scale


def rounded(run: RunRecord) -> None:
    for step in run.steps:
        step.raw = {name: Part(None, part.value.bfloat16().double()) for name, part in step.raw.items()}


@pytest.mark.parametrize(("factor", "found"), [(1.0, 0), (1.001, 0), (1.02, 1), (0.98, 1)])
def test_two_percent_are_seen(factor: float, found: int) -> None:
    def change(ranks: list[RunRecord]) -> None:
        for run in ranks:
            rounded(run)
            scale(run.steps[0].raw, factor, ["bias"])

    findings = judge_low_precision(evidence(change))
    assert len(findings) == found and all(finding.tensor == "bias" for finding in findings)


def test_what_is_nowhere_is_seen() -> None:
    def change(ranks: list[RunRecord]) -> None:
        for run in ranks:
            del run.steps[0].raw["weight"]

    (finding,) = judge_low_precision(evidence(change))
    assert finding.tensor == "weight" and finding.verdict.kind == "S11"


@pytest.mark.parametrize("wrong", [0, 1])
@pytest.mark.parametrize(("past", "kind"), [(True, "S10"), (False, "S11")])
def test_of_what_ranks_hold_alike_each_ones_is_compared(wrong: int, past: bool, kind: str) -> None:
    """The last rank's was taken for all of them."""

    def change(ranks: list[RunRecord]) -> None:
        for run in ranks:
            rounded(run)
            run.steps[0].past = ("",) if past else ()
        scale(ranks[wrong].steps[0].raw, 0.5)

    some = evidence(change)
    (finding,) = judge_low_precision(some)
    assert finding.verdict.kind == kind and f"on rank {wrong}" in finding.verdict.evidence[0]
    (note,) = say_errors(some, "bfloat16")
    assert "equal to 50% of each tensor" in note


def test_distance() -> None:
    error, factor = distance(torch.full((4,), 1.5), torch.ones(4))
    assert (error, factor) == (0.5, 1.5)


SIGMA = 0.002
"""Of a run's factor, in what follows."""


def runs(number: int, size: int = 4096, signal: float = 1.0, sigma: float = SIGMA, seed: int = 0) -> list[Parts]:
    """One tensor as so many runs have it: factors of a given standard deviation, and noise that has no factor."""
    generator = torch.Generator().manual_seed(seed)
    factors = 1 + sigma * torch.randn(number, generator=generator, dtype=torch.float64)
    noise = 0.01 * torch.randn(number, size, generator=generator, dtype=torch.float64)
    return [{"w": Part(None, signal * f + n)} for f, n in zip(factors, noise, strict=True)]


def test_allowed_are_six_standard_deviations_of_a_run_and_of_the_mean() -> None:
    first, *others = runs(400)
    factor = around_mean(["w"], first, others)["w"]
    assert factor.allowed == pytest.approx(6 * SIGMA, rel=0.1)
    assert float(factor.of.mean()) == pytest.approx(1.0, abs=3e-4), "the mean of all runs, not the first"
    few = [around_mean(["w"], first, others)["w"].allowed for first, *others in (runs(7, seed=n) for n in range(200))]
    assert sum(few) / len(few) == pytest.approx(6 * SIGMA * (1 + 1 / 7) ** 0.5, rel=0.1), "neither more of few runs"


def test_less_than_half_an_ulp_is_never_accused() -> None:
    first, *others = runs(7, sigma=0.0)
    assert around_mean(["w"], first, others)["w"].allowed == 0.004 == around_mean(["w"], first, [])["w"].allowed


def test_runs_that_are_alike_by_chance_are_held_to_what_others_are_not() -> None:
    first, *others = runs(7, sigma=1e-6)
    alone = around_mean(["w"], first, others)["w"].allowed
    loud = [
        {f"v{n}": run["w"] for n, run in enumerate(some)}
        for some in zip(*(runs(7, seed=n) for n in (1, 2, 3)), strict=True)
    ]
    together = [{**run, **more} for run, more in zip([first, *others], loud, strict=True)]
    beside = around_mean(["w", "v0", "v1", "v2"], together[0], together[1:])["w"].allowed
    assert alone == 0.004 and 0.0045 < beside < 6 * SIGMA, "half of theirs, as three runs beside six"


def test_a_gradient_of_nothing_but_rounding_is_allowed_any_factor_and_widens_no_other() -> None:
    """Each run is like the mean that it is in, and another run is not: 0 times it."""
    noise, plain = runs(8, signal=0.0), runs(8, sigma=1e-6, seed=1)
    together = [{"w": a["w"], "b": b["w"], "c": b["w"]} for a, b in zip(plain, noise, strict=True)]
    together = [{**parts, "d": parts["w"]} for parts in together]
    *known, other = [{"w": p["w"], "x": p["d"], "y": p["d"], "b": p["b"]} for p in together]
    factors = around_mean(["w", "x", "y", "b"], known[0], known[1:])
    assert abs(distance(other["b"].value, factors["b"].of)[1] - 1) == pytest.approx(1.0, abs=0.2)
    assert factors["b"].allowed > 2 and factors["w"].allowed == 0.004


def test_a_gradient_of_zero_says_nothing() -> None:
    first, *others = runs(7)
    zeros = [{**run, **{f"z{n}": Part(None, torch.zeros(3)) for n in range(5)}} for run in (first, *others)]
    names = list(zeros[0])
    assert around_mean(names, zeros[0], zeros[1:])["w"].allowed == around_mean(["w"], first, others)["w"].allowed


def deviating(run: RunRecord, by: float) -> RunRecord:
    scale(run.steps[0].raw, 1 + by)
    return run


@pytest.mark.parametrize(("own_types", "found"), [(True, 0), (False, 1)])
def test_an_own_loop_is_allowed_a_multiple_of_its_largest_shake(own_types: bool, found: int) -> None:
    """Of one run in eight that is 0.4% off the factor may be 3.2%, and is within six standard deviations at 0.9%."""

    def off(ranks: list[RunRecord]) -> None:
        for run in ranks:
            scale(run.steps[0].raw, 1.015, ["bias"])

    some = evidence(off)
    shakes = [deviating(one_device(), by) for by in (0.004, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)]
    some = replace(some, one=OneDevice(one_device(), shakes), own_types=own_types)
    assert [finding.tensor for finding in judge_low_precision(some)] == ["bias"] * found
    first = one_device().steps[0].raw
    assert around_first("bias", first, [run.steps[0].raw for run in shakes]).allowed == pytest.approx(0.032)
    assert torch.equal(around_first("bias", first, []).of, VALUES["bias"] * 0.25)


def moved(factor: float, off: float) -> Evidence:
    """Ranks with a gradient that is so many times too large; one device whose rounding moves it by the part `off`."""

    def change(ranks: list[RunRecord]) -> None:
        for run in ranks:
            scale(run.steps[0].raw, factor, ["bias"])

    found = evidence(change)
    variants = [one_device() for _ in range(3)]
    for sign, run in zip((1, -1, 1), variants, strict=True):
        value = run.steps[0].raw["bias"].value
        # Across it, so that it is no factor.
        across = torch.tensor([2.0, 1.0, 0.0], dtype=torch.float64)
        run.steps[0].raw["bias"] = Part(None, value + sign * off * across * value.norm() / across.norm())
    return replace(found, one=OneDevice(one_device(), variants))


@pytest.mark.parametrize("factor", [0.5, 2.0, -1.0])
def test_no_rounding_excuses_a_factor_of_two(factor: float) -> None:
    (finding,) = judge_low_precision(moved(factor, 0.19))
    assert finding.tensor == "bias" and judge_low_precision(moved(1.0, 0.19)) == []
    wide = moved(factor, 0.19)
    expected, held = wide.one.run.steps[0].raw, [run.steps[0].raw for run in wide.ranks]
    variants = [run.steps[0].raw for run in wide.one.variants]
    anything = Factor(expected["bias"].value, 9.0)
    mismatch = compare_noisy("bias", expected, held, variants, anything, wide)
    assert mismatch is not None and mismatch.bound == pytest.approx(0.4 * mismatch.size), "whatever factors were seen"


def test_what_rounding_moves_too_far_is_told_and_accuses_nobody() -> None:
    (note,) = say_noisy(moved(1.0, 0.3).one, "bfloat16")
    assert note == (
        "rounding in bfloat16 alone moves these gradients by more than a fifth, so that a factor is not seen in them: "
        "bias"
    )
    assert say_noisy(moved(1.0, 0.19).one, "bfloat16") == () and judge_low_precision(moved(1.0, 0.3)) == []


def test_how_far_what_is_equal_is_apart_is_told_of_what_can_be_judged() -> None:
    assert say_errors(moved(1.003, 0.01), "bfloat16") == (EQUAL.format("bfloat16", 0.3, 0.3),)
    noisy = moved(0.5, 0.3)
    assert say_errors(noisy, "bfloat16") == (EQUAL.format("bfloat16", 0.0, 0.0),), "bias is named by say_noisy"
    for run in (noisy.one.run, *noisy.one.variants):
        del run.steps[0].raw["weight"]
        run.steps[0].gradients.clear()
    assert say_errors(noisy, "bfloat16") == ()
