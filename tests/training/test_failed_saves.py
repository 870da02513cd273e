"""Saves that fail: how many in a row a run bears, what it says of each, and when it ends at once."""

import pytest

from allranks.checkpointing.commit import TAKEN_OVER
from allranks.checkpointing.save import NOT_SAVED
from allranks.errors import CheckpointError
from allranks.training.failed_saves import FailedSaves

FULL = CheckpointError(f"runs/a/step-4 {NOT_SAVED}: rank 0: No space left on device; older checkpoints are untouched")


def test_so_many_in_a_row_are_told_and_one_more_ends_the_run() -> None:
    failed = FailedSaves(2)
    first, second = failed.bear(FULL, 4, 2), failed.bear(FULL, 6, 2)
    assert first.kind == "checkpoint" and first.what == str(FULL)
    assert first.evidence == (
        "the newest stays that of step 2: what ends this run before the next one costs 2 steps and those to come",
        "saves that may still fail in a row: 1 (checkpoint.failures=2)",
    )
    assert second.evidence[1].startswith("saves that may still fail in a row: 0 ")
    with pytest.raises(CheckpointError, match=r"untouched; this is failed save 3 in a row, 2 are borne \(checkpoint\."):
        failed.bear(FULL, 8, 2)


def test_one_that_succeeds_begins_the_count_anew() -> None:
    failed = FailedSaves(1)
    for step in (2, 4, 6):
        assert failed.bear(FULL, step, 0).evidence[0].startswith("there is none yet: ")
        failed.saved()


@pytest.mark.parametrize(
    ("tolerated", "words"),
    [
        (0, str(FULL)),
        (9, f"step-4 {NOT_SAVED}: rank 0: attempt 3 of this run has begun, this is attempt 2: {TAKEN_OVER}"),
        (9, "step-4: 1 tensors differ from their digests: 'model.w'"),
    ],
)
def test_what_the_next_save_would_meet_too_ends_the_run_at_once(tolerated: int, words: str) -> None:
    error = CheckpointError(words)
    with pytest.raises(CheckpointError) as told:
        FailedSaves(tolerated).bear(error, 4, 2)
    assert told.value is error
