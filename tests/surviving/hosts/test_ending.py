"""What hosts say of their ends, as it travels."""

import json
from dataclasses import replace

import pytest

from allranks.errors import ProcessError
from allranks.failure import Failure
from allranks.surviving.hosts.ending import MOST_CHARACTERS, Ending, Report, RunEnded
from allranks.surviving.outcome import Outcome

FAILURE = Failure(1, "b", 9, 2.5, 76, "lost", consequence=True)


@pytest.mark.parametrize("failure", [None, FAILURE])
def test_there_and_back(failure: Failure | None) -> None:
    for said in (Ending(76, failure, "a line"), Report(75, failure, True)):
        assert type(said).from_json(json.loads(json.dumps(said.to_json()))) == said


def test_what_is_too_long_for_etcd_loses_its_middle() -> None:
    long = "ValueError: \U0001f600" + "\U0001f600" * 3_000_000 + " the end"
    failure = replace(FAILURE, message=long, traceback=long)
    for said in (Ending(76, failure, long), Report(75, failure, True)):
        text = json.dumps(said.to_json())
        assert len(text) < 1.4 * 2**20
        came = type(said).from_json(json.loads(text)).failure
        assert came is not None and came.message.startswith("ValueError") and came.message.endswith("the end")
        assert f"{len(long) - MOST_CHARACTERS} characters are left out" in came.traceback


def test_an_ending_is_an_outcome_or_a_line() -> None:
    assert Ending(76, FAILURE).outcome() == Outcome(76, FAILURE)
    with pytest.raises(ProcessError, match="did not come"):
        Ending(76, message="did not come").outcome()
    assert RunEnded(Ending(0)).ending.exit_code == 0
