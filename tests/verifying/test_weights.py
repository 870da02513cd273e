"""Weights with which gradients make up another one, and what rounding leaves unexplained."""

from dataclasses import replace

import pytest
import torch

from allranks.verifying.evidence import Evidence
from allranks.verifying.recording import Part, RunRecord
from allranks.verifying.weights import is_sum_of, weights_of
from tests.verifying.records import VALUES, evidence

FIRST = {name: torch.sin(value * 3) for name, value in VALUES.items()}
SECOND = {name: torch.cos(value * 5) for name, value in VALUES.items()}
ROUNDED = [(torch.float64, 0.0), (torch.float32, 1e-6), (torch.bfloat16, 0.01), (torch.float16, 0.01)]
"""Types, and how far what computes in them is off."""


def mixed(one: float, two: float, noise: float = 0.0) -> dict[str, Part]:
    return {n: Part(None, one * FIRST[n] + two * SECOND[n] + noise * FIRST[n] ** 2) for n in VALUES}


@pytest.mark.parametrize(("lowest", "rounding"), ROUNDED)
def test_sums_as_far_as_a_type_rounds(lowest: torch.dtype, rounding: float) -> None:
    assert is_sum_of(mixed(0.3, 0.9, rounding), [FIRST, SECOND], lowest)
    assert not is_sum_of(mixed(0.3, 0.9, 0.2), [FIRST, SECOND], lowest)


def test_every_tensor_has_to_be_the_sum() -> None:
    """A router of few parameters may be all that a loss couples by."""
    of = [{**some, "router": torch.ones(2, dtype=torch.float64) * 0.01} for some in (FIRST, SECOND)]
    whole = {**mixed(0.3, 0.9), "router": Part(None, torch.tensor([0.012, 0.013], dtype=torch.float64))}
    assert not is_sum_of(whole, of, torch.float32)
    zero = {**whole, "router": Part(None, torch.tensor([0.012, 0.012 + 1e-8], dtype=torch.float64))}
    assert is_sum_of(zero, of, torch.float32), "as good as nothing beside the others"


def found(got: dict[str, Part], due: dict[str, Part], lowest: torch.dtype, shares: object) -> Evidence:
    def change(ranks: list[RunRecord]) -> None:
        for run in ranks:
            run.steps[0].raw = dict(got)

    def alone(run: RunRecord) -> None:
        run.steps[0].raw = dict(due)

    some = evidence(change, alone, shares=lambda step: shares)
    return replace(some, one=replace(some.one, lowest=lowest))


@pytest.mark.parametrize(("lowest", "rounding"), ROUNDED)
def test_means_of_means_are_told_from_coupled_samples_in_every_precision(lowest: torch.dtype, rounding: float) -> None:
    due = mixed(0.2, 0.8, rounding)
    ranks = found(mixed(0.5, 0.5, rounding), due, lowest, [[FIRST], [SECOND]])
    assert (weights_of(ranks, 0, "raw") or ("",))[0] == "S9"
    micro = found(mixed(0.5, 0.5, rounding), due, lowest, [[FIRST, SECOND]])
    assert (weights_of(micro, 0, "raw") or ("",))[0] == "S8"
    coupled = found(mixed(0.5, 0.5), mixed(0.2, 0.8, 0.3), lowest, [[FIRST], [SECOND]])
    assert (weights_of(coupled, 0, "raw") or ("",))[0] == "S29"
    alike = found(mixed(0.4, 1.6, -rounding), due, lowest, [[FIRST], [SECOND]])
    assert weights_of(alike, 0, "raw") is None, "one factor"
