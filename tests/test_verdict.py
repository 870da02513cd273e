"""A decision says because; a verdict comes first, then evidence, then the next move."""

import json

from allranks.verdict import Decision, Verdict


def test_a_decision_reads_as_one_line_with_because() -> None:
    decision = Decision("backend gloo", "this machine has no CUDA device")
    assert str(decision) == "backend gloo, because this machine has no CUDA device"


def test_a_verdict_and_its_json_twin_say_the_same() -> None:
    verdict = Verdict(
        "S3", "rank 2 skipped a sample", ("ledger 1f != 2e", "position 40"), "compare the collate of rank 2"
    )
    assert str(verdict).splitlines() == [
        "rank 2 skipped a sample",
        "  ledger 1f != 2e",
        "  position 40",
        "  next: compare the collate of rank 2",
    ]
    assert json.loads(json.dumps(verdict.to_json())) == {
        "kind": "S3",
        "what": "rank 2 skipped a sample",
        "evidence": ["ledger 1f != 2e", "position 40"],
        "next": "compare the collate of rank 2",
    }
