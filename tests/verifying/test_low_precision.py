"""Gradients in a low precision: rounding passes, two percent do not."""

import pytest
import torch

from allranks.verifying.low_precision import distance, judge_low_precision
from allranks.verifying.recording import Part, RunRecord
from tests.verifying.records import evidence, scale


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


def test_distance() -> None:
    error, factor = distance(torch.full((4,), 1.5), torch.ones(4))
    assert (error, factor) == (0.5, 1.5)
