"""How `allranks dryrun` ends."""

from dataclasses import replace

from allranks.cli.rehearsing import exit_code
from allranks.rehearsal import Finding
from tests.test_rehearsal import rank, rehearsal


def test_exit_codes() -> None:
    assert exit_code(rehearsal()) == 0
    assert exit_code(rehearsal(rank(0, 950))) == 1
    assert exit_code(replace(rehearsal(), findings=(Finding("hang", "a", "b", fails=True),))) == 1
