"""What differs before the first step; and where parts lie that were cut by hand."""

from collections.abc import Callable

import pytest
import torch

from allranks.parameter_map import Box
from allranks.verifying.judge import judge
from allranks.verifying.recording import Part, RunRecord
from allranks.verifying.start_causes import places_of, unplaced
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
