"""What differs before the first step; and where parts lie that were cut by hand."""

from collections.abc import Callable

import pytest
import torch

from allranks.parameter_map import Box
from allranks.verifying.evidence import Evidence
from allranks.verifying.judge import judge
from allranks.verifying.recording import OneDevice, Part, RunRecord, Start, StepRecord
from allranks.verifying.start_causes import places_of, unplaced
from allranks.verifying.world_view import view_of
from tests.verifying.records import VALUES, evidence, one_device, two_ranks


def initial(ranks: list[RunRecord]) -> None:
    ranks[1].start.parameters["weight"] = Part(None, VALUES["weight"] + 1e-12)


def buffer(ranks: list[RunRecord]) -> None:
    ranks[0].start.buffers = {"table": Part(None, torch.zeros(3))}


def unlinked(ranks: list[RunRecord]) -> None:
    for run in ranks:
        run.start.unlinked = ["bias"]


def unlinked_where_it_is(ranks: list[RunRecord]) -> None:
    """As of one stage of a pipeline: the other ranks have no such parameter."""
    del ranks[1].start.parameters["bias"]
    ranks[0].start.unlinked = ["bias"]


def halves(ranks: list[RunRecord]) -> None:
    ranks[0].start.unlinked, ranks[1].start.unlinked = ["bias"], ["weight"]


def dtype(ranks: list[RunRecord]) -> None:
    for run in ranks:
        run.start.buffers = {"table": Part(None, torch.ones(3).bfloat16())}


def table(run: RunRecord) -> None:
    run.start.buffers = {"table": Part(None, torch.ones(3))}


CASES = [(initial, "S32"), (buffer, "S33"), (unlinked, "S12"), (unlinked_where_it_is, "S12"), (dtype, "S27")]


@pytest.mark.parametrize(("change", "kind"), CASES)
def test_starts(change: Callable[[list[RunRecord]], None], kind: str) -> None:
    (finding,) = judge(evidence(change, table))
    assert (finding.verdict.kind, finding.step) == (kind, None)


def test_what_some_ranks_optimizer_holds_is_linked_and_judged_by_what_becomes_of_it() -> None:
    assert judge(evidence(halves)) == []

    def kept_back(ranks: list[RunRecord]) -> None:
        halves(ranks)
        ranks[0].steps[0].parameters["bias"] = ranks[0].start.parameters["bias"]

    (finding,) = judge(evidence(kept_back))
    assert (finding.verdict.kind, finding.step, finding.tensor) == ("S12", 0, "bias")


def test_a_statistic_in_another_precision_is_no_table() -> None:
    def alone(run: RunRecord) -> None:
        table(run)
        run.steps[-1].buffers["table"] = Part(None, torch.zeros(3))

    assert [finding.verdict.kind for finding in judge(evidence(dtype, alone))] == ["S26"]


def test_tied_tensors_that_are_apart() -> None:
    def alone(run: RunRecord) -> None:
        run.start.tied = [("bias", "weight")]

    assert [finding.verdict.kind for finding in judge(evidence(alone=alone))] == ["S14"]


def test_places_of_what_was_cut_by_hand() -> None:
    one, ranks = one_device(), two_ranks()
    for rank, run in enumerate(ranks):
        run.start.parameters["weight"] = Part(None, VALUES["weight"][:, rank : rank + 1].clone())
    places = places_of(one, ranks)
    assert places["weight", 1] == Box((0, 1), (3, 1)) and unplaced(one, ranks, places) == ""
    ranks[0].start.parameters["weight"] = Part(None, torch.full((3, 1), 9.0))
    assert "rank 0 has weight of shape [3, 1], on one device it is [3, 2]" in unplaced(
        one, ranks, places_of(one, ranks)
    )
    ranks[0].start.parameters["new"] = Part(None, torch.ones(1))
    del ranks[0].start.parameters["weight"]
    assert "rank 0 has a parameter new" in unplaced(one, ranks, places)


DRAWN = torch.tensor([[1.0, -2.0, 0.5, 3.0], [0.25, 4.0, -1.0, 2.0]], dtype=torch.float64)
"""Gradients of two steps."""


def constant(gradients: torch.Tensor, rows: int) -> RunRecord:
    """A run whose bias begins with zeros."""
    start = Start(parameters={"b": Part(None, torch.zeros(len(gradients[0]), dtype=torch.float64))})
    steps = [StepRecord(rows=[rows], gradients={"b": Part(None, gradient)}) for gradient in gradients]
    return RunRecord(start=start, steps=steps)


@pytest.mark.parametrize(
    ("held", "rows", "factor", "first", "expected"),
    [
        ((0, 2), (1, 1), 1.0, 1.0, (0, 2)),
        ((2, 0), (1, 1), 1.0, 1.0, (2, 0)),  # whatever the order of the ranks
        ((2, 0), (1, 1), 1.0, 0.0, (2, 0)),  # nothing flows back to it in the first step
        ((0, 0, 2, 2), (1, 2, 1, 2), 1.0, 1.0, (0, 0, 2, 2)),
        # Gradients that are wrong tell nothing: ranks that are fed the same follow each other, or all do.
        ((0, 2), (1, 1), 2.0, 1.0, (0, 2)),
        ((0, 0, 2, 2), (1, 2, 1, 2), 2.0, 1.0, (0, 0, 2, 2)),
        ((0, 2, 0, 2), (1, 1, 2, 2), 2.0, 1.0, (0, 2, 0, 2)),
        ((0, 2, 0, 2), (1, 1, 1, 1), 2.0, 1.0, (0, 2, 0, 2)),
        ((0, 2), (1, 2), 2.0, 1.0, (0, 2)),
        ((0, 2), (1, 1), 0.0, 0.0, (0, 2)),  # frozen
    ],
)
def test_parts_that_begin_alike_are_told_by_their_gradients_and_by_the_order_of_ranks(
    held: tuple[int, ...], rows: tuple[int, ...], factor: float, first: float, expected: tuple[int, ...]
) -> None:
    whole = DRAWN * torch.tensor([[first], [1.0]], dtype=torch.float64)
    parts = [whole[:, place : place + 2] * factor for place in held]
    ranks = [constant(part, some) for part, some in zip(parts, rows, strict=True)]
    places = places_of(constant(whole, 1), ranks)
    assert [places["b", rank].offset for rank in range(len(held))] == [(place,) for place in expected]


def test_a_layer_that_is_cut_by_hand_may_begin_with_zeros() -> None:
    def findings(factor: float) -> list[str]:
        one, ranks = one_device(), two_ranks()
        for run, place in ((one, slice(0, 2)), (ranks[0], slice(0, 1)), (ranks[1], slice(1, 2))):
            times = 1.0 if run is one else factor
            run.start.parameters["cut"] = Part(None, torch.zeros(2)[place].double())
            for step, gradient in zip(run.steps, DRAWN, strict=True):
                step.raw["cut"] = step.gradients["cut"] = Part(None, gradient[:2][place] * times)
                step.parameters["cut"] = Part(None, -gradient[:2][place])
        held = Evidence(OneDevice(one, [one]), ranks, view_of(ranks), places_of(one, ranks))
        return [finding.verdict.kind for finding in judge(held)]

    assert findings(1.0) == [] and findings(2.0) == ["S16"]
