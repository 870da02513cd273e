"""What is compared, and what is not: elements that Adam divides noise in."""

import torch

from allranks.parameter_map import Box
from allranks.verifying.assembly import compare_parts
from allranks.verifying.evidence import describe, few, largest
from allranks.verifying.recording import Part, RunRecord
from tests.verifying.records import evidence, parts


def noise(run: RunRecord) -> None:
    run.start.optimizers = ["AdamW"]
    for step in run.steps:
        step.gradients["weight"].value[0, 0] = 1e-15


def moved(ranks: list[RunRecord]) -> None:
    for run in ranks:
        for step in run.steps:
            step.gradients["weight"].value[0, 0] = 1e-15
        value = run.steps[0].parameters["weight"].value.clone()
        value[0, 0] += 1e-3
        run.steps[0].parameters["weight"] = Part(None, value)


def test_adam_is_compared_where_the_gradient_is_not_noise() -> None:
    assert evidence(moved, noise).compare(0, "parameters") == []

    def sgd(run: RunRecord) -> None:
        noise(run)
        run.start.optimizers = ["SGD"]

    assert [m.name for m in evidence(moved, sgd).compare(0, "parameters")] == ["weight"]


def test_words() -> None:
    def change(ranks: list[RunRecord]) -> None:
        for run in ranks:
            run.steps[0].raw["weight"] = Part(None, run.steps[0].raw["weight"].value * 0.5)

    found = evidence(change)
    (mismatch,) = found.compare(0, "raw")
    said = "gradient of weight is off by 0.5 of its largest value (allowed are 1e-12)"
    assert describe(mismatch, "gradient of", found.world) == (
        f"{said}; it is 1/data ranks = 1/2 times what one device has"
    )
    held = [{"w": Part(Box((0,), (2,)), torch.ones(2))}, {}]
    (mismatch,) = compare_parts(held, {"w": Part(None, torch.ones(3))}, (), {})
    assert describe(mismatch, "parameter", found.world) == "parameter w is in part on no rank"
    assert few(["a", "b", "c"]) == "a, b, c" and few(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"
    assert largest(parts()) == 6.0 and largest({"w": Part(None, torch.empty(0))}) == 0.0


def test_adam_is_not_compared_where_rounding_may_turn_a_gradient_around() -> None:
    """An element of a thousandth, in a program whose rounding was seen to move that gradient by a ten-thousandth."""

    def small(run: RunRecord) -> None:
        run.start.optimizers = ["NAdam"]
        run.steps[0].gradients["weight"].value[0, 0] = 1e-3

    def turned(ranks: list[RunRecord]) -> None:
        for run in ranks:
            run.steps[0].gradients["weight"].value[0, 0] = -1e-3
            value = run.steps[0].parameters["weight"].value.clone()
            value[0, 0] += 1e-3
            run.steps[0].parameters["weight"] = Part(None, value)

    rounded = evidence(turned, small)
    assert [m.name for m in rounded.compare(0, "gradients")] == ["weight"]
    assert [m.name for m in rounded.compare(0, "parameters")] == ["weight"]
    (variant,) = rounded.one.variants
    variant.steps[0].gradients["weight"].value[0, 1] += 1e-4
    assert rounded.compare(0, "gradients") == [] and rounded.compare(0, "parameters") == []
    # What is larger than that is compared as before.
    rounded.ranks[0].steps[0].parameters["weight"].value[2, 1] += 1e-9
    assert [m.name for m in rounded.compare(0, "parameters")] == ["weight"]


def test_adam_is_compared_where_a_gradient_is_exactly_zero_everywhere() -> None:
    """A row of an embedding that no sample of a step has looked up, say."""

    def adam(run: RunRecord) -> None:
        run.start.optimizers = ["Adam"]
        run.steps[0].gradients["weight"].value[0, 0] = 0.0

    def off(ranks: list[RunRecord]) -> None:
        for run in ranks:
            run.steps[0].gradients["weight"].value[0, 0] = 0.0
            run.steps[1].parameters["weight"].value[0, 0] += 1e-3

    found = evidence(off, adam)
    assert [m.name for m in found.compare(1, "parameters")] == ["weight"]
    # Noise of one rank, or of another rounding, is what Adam makes a step of full size of.
    found.ranks[1].steps[0].gradients["weight"].value[0, 0] = 1e-17
    assert found.compare(1, "parameters") == []
    found.ranks[1].steps[0].gradients["weight"].value[0, 0] = 0.0
    found.one.variants[0].steps[0].gradients["weight"].value[0, 0] = 1e-17
    assert found.compare(1, "parameters") == []
    found.one.variants[0].steps[0].gradients["weight"].value[0, 0] = 0.0
    for run in found.ranks:
        del run.steps[0].gradients["weight"], run.steps[0].raw["weight"]
    assert found.compare(1, "parameters") == []
