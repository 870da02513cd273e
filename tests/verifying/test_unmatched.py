"""What ranks report or keep under a name that one device has not."""

import torch

from allranks.verifying.recording import Part, RunRecord
from allranks.verifying.unmatched import judge_unmatched
from tests.verifying.records import evidence


def test_what_one_device_does_not_report_is_compared_with_nothing() -> None:
    def reporting(ranks: list[RunRecord]) -> None:
        ranks[1].evaluation = {"accuracy": 0.75, "loss": 1.0}

    def keeping(ranks: list[RunRecord]) -> None:
        for run in ranks:
            run.steps[1].kept = {"average": Part(None, torch.ones(1))}

    def alone(run: RunRecord) -> None:
        keeping([run, run])
        run.steps[1].kept["another"] = Part(None, torch.ones(1))

    assert judge_unmatched(evidence()) == judge_unmatched(evidence(keeping, alone)) == []
    (told,), (kept,) = judge_unmatched(evidence(reporting)), judge_unmatched(evidence(keeping))
    assert (told.verdict.kind, told.tensor, kept.verdict.kind, kept.step) == ("S30", "loss", "S31", 1)
    assert told.verdict.what.startswith("evaluation: loss is reported on rank 1, and not on one device")
    assert kept.verdict.what.startswith("step 1: average is kept on rank 0, 1, and not on one device")
